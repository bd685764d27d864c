"""Attention modules of transformers with kept queries, without a change of theirs.

Imports transformers at the top, as the blocks that use it do. A stand-in for the module runs the
module's own forward: it hands kept queries to transformers' registry of attention functions, by a
view of the config that names ours, and takes plain linear layers by kept rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from ..ops import sketched_linear
from ..ops.attention import kept_attention
from ..sketches import Rows, Tokens
from .blocks import hooked, watched

NAME = "kept_tokens"
"""Of the attention function in transformers' registry."""


def kept_linear(layer: nn.Module, sketch: Rows) -> Callable[[Tensor], Tensor]:
    """A plain linear layer with sketched rows; any other layer as it is."""
    if type(layer) is nn.Linear and not watched(layer):
        return lambda x: sketched_linear(x, layer.weight, layer.bias, sketch)
    if type(layer).__name__ == "Conv1D" and not watched(layer):
        return lambda x: sketched_linear(x, layer.weight.mT, layer.bias, sketch)  # type: ignore[arg-type]
    return layer


def stand_in(attention: nn.Module, tokens: Tokens, parts: dict[str, str]) -> Callable[..., Any]:
    """The forward of an attention module, with kept queries; the module itself if it has hooks."""
    if hooked(attention):
        return attention
    if NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(NAME, _kept_attention)
    stand = _StandIn(attention, tokens)
    for name, role in parts.items():
        setattr(stand, name, kept_linear(getattr(attention, name), tokens.of(role)))

    def call(*args: Any, **kwargs: Any) -> Any:
        return type(attention).forward(stand, *args, **kwargs)

    return call


class _StandIn:
    """All that an attention module has, but for what is set here."""

    def __init__(self, module: nn.Module, tokens: Tokens) -> None:
        self._module = module
        self.kept_tokens = tokens
        self.config = _Config(module.config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Config:
    """A config that names the attention function of this file."""

    _attn_implementation = NAME

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _kept_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' ``sdpa`` with kept queries."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = kept_attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        query.shape[2] > 1 and attention_mask is None and bool(causal),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        queries=module.kept_tokens.query_budget,
        capacity=module.kept_tokens.capacity,
    )
    return out.transpose(1, 2).contiguous(), None
