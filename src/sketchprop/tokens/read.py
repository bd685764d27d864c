"""Plain torch layers as row-wise steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .rowwise import Activation, Dropout, LayerNorm, Linear, RMSNorm, RowWise


def read(module: nn.Module) -> RowWise | None:
    """``module`` as steps with their parameters, or ``None`` where it is not known.

    Plain torch layers in any nesting of ``nn.Sequential``. A layer with hooks, or of a subclass,
    is not taken apart: it may do more than its class does.
    """
    if hooked(module):
        return None
    if type(module) is not nn.Sequential:
        step = _STEPS.get(type(module))
        return None if step is None else step(module)
    whole = RowWise.of()
    for child in module:
        part = read(child)
        if part is None:
            return None
        whole += part
    return whole


def _norm(layer: Any) -> RowWise | None:
    if len(layer.normalized_shape) != 1 or layer.eps is None:
        return None
    if type(layer) is nn.RMSNorm:
        return RowWise.of((RMSNorm(layer.eps), (layer.weight,)))
    return RowWise.of((LayerNorm(layer.eps), (layer.weight, layer.bias)))


def _dropout(layer: Any) -> RowWise:
    drops = layer.training and layer.p > 0
    return RowWise.of((Dropout(layer.p), ())) if drops else RowWise.of()


def activation(name: str) -> Callable[[Any], RowWise]:
    return lambda layer: RowWise.of((Activation(name), ()))


_STEPS: dict[type, Callable[[Any], RowWise | None]] = {
    nn.Identity: lambda layer: RowWise.of(),
    nn.Dropout: _dropout,
    nn.Linear: lambda layer: RowWise.of((Linear(), (layer.weight, layer.bias))),
    nn.LayerNorm: _norm,
    nn.RMSNorm: _norm,
    nn.GELU: lambda layer: activation(f"gelu_{layer.approximate}")(layer),
    nn.ReLU: activation("relu"),
    nn.SiLU: activation("silu"),
    nn.Tanh: activation("tanh"),
    nn.Sigmoid: activation("sigmoid"),
}


def hooked(module: nn.Module) -> bool:
    """Whether a module does more than its class: hooks, or a forward of the instance's own."""
    return bool(
        "forward" in vars(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
