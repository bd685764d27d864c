"""How large the layers of a model are in one forward pass of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.cost import Size
from ...layers import SketchedBlock, SketchedModule, block_class, sketched_class
from ..restore import call_hooks


@dataclass(frozen=True)
class Use:
    """One call of a layer."""

    name: str
    layer: Any
    args: Any
    kwargs: Any
    products: tuple[Size, ...]
    sketched: bool = False
    """Whether this call recorded a sketched backward."""


@contextmanager
def recorded_uses(layers: Mapping[nn.Module, str]) -> Iterator[list[Use]]:
    """The calls of ``layers``, by name, in the order of forward.

    Of the arguments only the shapes are kept: tensors on the meta device.
    """
    uses: list[Use] = []

    def note(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            shapes, options = torch.utils._pytree.tree_map(_shape_only, (args, kwargs))
            products = _products(layer, (args, kwargs), output)
            sketched = isinstance(layer, SketchedModule) and layer.is_sketching()
            uses.append(Use(layers[layer], layer, shapes, options, products, sketched))

    with call_hooks(layers, after=note):
        yield uses


def _products(layer: nn.Module, inputs: Any, output: Any) -> tuple[Size, ...]:
    kind = sketched_class(type(layer)) or block_class(type(layer))
    if kind is None:
        return ()
    out = next(x for x in torch.utils._pytree.tree_leaves(output) if isinstance(x, Tensor))
    # Every matrix of a layer sees the same rows (in attention: those of self-attention).
    width = out.shape[-1] if issubclass(kind, SketchedBlock) else kind.matrices(layer)[-1][0]
    rows = out.numel() // max(1, width)
    given = [x for x in torch.utils._pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
    from_below = any(x.requires_grad for x in given)
    trains = any(p.requires_grad for p in layer.parameters() if p.dim() > 1)
    return kind.sizes(layer, rows, from_below, trains)


def _shape_only(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(
        x.shape, x.stride(), dtype=x.dtype, device="meta", requires_grad=x.requires_grad
    )
