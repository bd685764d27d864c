"""``nn.TransformerEncoderLayer`` and ``nn.TransformerDecoderLayer`` on kept tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..tokens.function import Tree
from ..tokens.rowwise import Activation, Dropout, Linear, Parameters, RowWise
from .attention import one_mask
from .blocks import Anatomy, RowPart, SelfAttention, SketchedBlock
from .sketched import watched


class InTurnDropout(Dropout):
    """Dropout of rows that lie sample by sample, with the mask of rows that lie token by token.

    ``nn.MultiheadAttention`` returns its result token by token in memory, and dropout draws in
    memory order: so the masks are those of the plain layer.
    """

    def forward(self, x: Tensor, P: Parameters, save: bool) -> tuple[Tensor, Tree]:
        y, mask = torch.native_dropout(x.transpose(0, 1).contiguous(), self.p, True)
        return y.transpose(0, 1), (mask.transpose(0, 1),)


class _TorchBlock(SketchedBlock):
    """What the two have in common."""

    vouched = False
    roles = (
        ("self_attn.out_proj", "queries"),
        ("self_attn", "packed"),
        ("multihead_attn", "exact"),
    )

    def _parts(
        self: Any,
        x: Tensor,
        mask: Tensor | None,
        padding: Tensor | None,
        is_causal: bool,
        last: tuple[nn.Module, nn.Module],
    ) -> Anatomy | str:
        """``last``: norm and dropout of the feed-forward part."""
        if x.is_nested:
            return "nested tensors have no rows to draw: pad them, and give a padding mask"
        if x.dim() != 3:
            return "one sequence without a batch: add an axis of samples, src.unsqueeze(0)"
        if is_causal and mask is None:
            return "is_causal=True without a mask"
        mha = self.self_attn
        turn = not mha.batch_first

        def plain(x: Tensor) -> Tensor:
            x = x.transpose(0, 1) if turn else x
            y: Tensor = self._sa_block(x, mask, padding, is_causal)
            return y.transpose(0, 1) if turn else y

        x = x.transpose(0, 1) if turn else x
        norm, drop = last
        drops = [_in_turn(m) if turn else m for m in (self.dropout, drop)]
        f = (self.linear1, self._activation(), drops[0], self.linear2, drops[1])
        attention = self._attention(x, mask, padding, is_causal)
        why = "nn.MultiheadAttention with hooks, add_bias_kv, add_zero_attn, kdim or vdim"
        return Anatomy(x, attention, plain, (self.norm1, norm), f, self.norm_first, apart=why)

    def _attention(
        self: Any, x: Tensor, mask: Tensor | None, padding: Tensor | None, is_causal: bool
    ) -> SelfAttention | None:
        mha = self.self_attn
        plain = type(mha) is nn.MultiheadAttention and mha.in_proj_weight is not None
        if not plain or watched(mha) or watched(self.dropout1) or mha.bias_k is not None:
            return None
        if mha.add_zero_attn:
            return None
        N, T, _ = x.shape
        is_causal = is_causal and padding is None
        one = None
        if not is_causal:
            one = one_mask(mask, padding, (N, mha.num_heads, T, T), x.dtype)
        packed = RowWise.of((Linear(), (mha.in_proj_weight, mha.in_proj_bias)))
        after = (_linear(mha.out_proj), _in_turn(self.dropout1))
        dropout = mha.dropout if mha.training else 0.0
        return SelfAttention((packed,), after, mha.num_heads, None, one, dropout, is_causal)

    def _activation(self: Any) -> RowPart:
        name = {F.relu: "relu", F.gelu: "gelu_none", F.silu: "silu", torch.relu: "relu"}.get(
            self.activation
        )
        if name is not None:
            return RowWise.of((Activation(name), ()))
        activation: RowPart = self.activation
        return activation


def _in_turn(module: nn.Module) -> RowPart:
    """A dropout whose rows lie token by token in the plain layer; anything else as it is."""
    if type(module) is not nn.Dropout or watched(module):
        return module
    drops = module.training and module.p > 0
    return RowWise.of(*([(InTurnDropout(module.p), ())] if drops else []))


def _linear(module: nn.Module) -> RowWise:
    """``out_proj``: a subclass of ``nn.Linear`` that is never called."""
    return RowWise.of((Linear(), (module.weight, module.bias)))


class SketchedTransformerEncoderLayer(_TorchBlock, nn.TransformerEncoderLayer):
    """``nn.TransformerEncoderLayer`` with a backward on kept tokens in training mode."""

    plain = nn.TransformerEncoderLayer

    def anatomy(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Anatomy | str:
        last = (self.norm2, self.dropout2)
        return self._parts(src, src_mask, src_key_padding_mask, is_causal, last)

    def result(self, y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return y if self.self_attn.batch_first else y.transpose(0, 1)


class SketchedTransformerDecoderLayer(_TorchBlock, nn.TransformerDecoderLayer):
    """``nn.TransformerDecoderLayer`` with a backward on kept tokens in training mode."""

    plain = nn.TransformerDecoderLayer
    left = "cross-attention is exact: its keys and values are the encoder's"

    def anatomy(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Anatomy | str:
        last = (self.norm3, self.dropout3)
        call = self._parts(tgt, tgt_mask, tgt_key_padding_mask, tgt_is_causal, last)
        if isinstance(call, str):
            return call
        turn = not self.self_attn.batch_first

        def across(x: Tensor) -> Tensor:
            x = x.transpose(0, 1) if turn else x
            options = (memory, memory_mask, memory_key_padding_mask, memory_is_causal)
            if self.norm_first:
                x = x + self._mha_block(self.norm2(x), *options)
            else:
                x = self.norm2(x + self._mha_block(x, *options))
            return x.transpose(0, 1) if turn else x

        return call._replace(between=across)

    def result(self, y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return y if self.self_attn.batch_first else y.transpose(0, 1)
