"""The gate: identity forward, sketched gradient backward, at any node of a graph.

It multiplies dense matrices with zeros in them and saves nothing: it is the reference that the
fast paths are tested against, and a way to put the paper's sketches anywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.checks import check_weight
from ..core.sampling import Uniforms, draw_uniforms
from ..core.vjp import Vjp
from ..sketches import ElementMask, Sketch
from .backward import as_rows, refuse_second_backward


def gate(
    x: Tensor,
    sketch: Sketch,
    *,
    weight: Tensor | None = None,
    uniforms: Uniforms = draw_uniforms,
) -> Tensor:
    """Returns ``x``; in backward its gradient G becomes ``sketch(Vjp(G)).dense()``, E[Ĝ] = G.

    Put it behind a layer, ``gate(F.linear(x, W, b), sketch, weight=W)``, and every gradient of
    the layer comes from Ĝ. ``weight`` is for sketches that look at the layer's weight (Diagonal,
    RankConstrained). A ``weight`` with leading dimensions means a stack of layers. ``uniforms``:
    where the draw's random numbers come from, torch's default generator.

    >>> from sketchprop import L1
    >>> h = torch.randn(128, 64, requires_grad=True)
    >>> gate(torch.relu(h), L1(0.1)).sum().backward()
    """
    if isinstance(sketch, ElementMask):
        raise TypeError(
            "ElementMask masks the weight and the input of a layer, not a gradient: it works in "
            "sketched_linear and sketch_, not in gate; ColumnMask and SampleMask do"
        )
    if not isinstance(sketch, Sketch) or "X" in sketch.sees:
        raise TypeError(
            f"{sketch!r} looks at a layer's input or treats dX and dW apart: it works in "
            "sketched_linear and sketch_, not in gate; Rows(0.1) does"
        )
    if "W" in sketch.sees:
        check_weight(weight, sketch)
    stack = () if weight is None else weight.shape[:-2]
    rows = x[(0,) * len(stack)].numel() // max(1, x.shape[-1])
    if not (x.requires_grad and torch.is_grad_enabled()) or rows == 0:
        return x
    if x.is_meta or sketch.keeps_all(rows, x.shape[-1], 0):
        return x
    return _Gate.apply(x, weight, sketch, uniforms)  # type: ignore[no-any-return, no-untyped-call]


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, *_: object) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.sketch, ctx.uniforms = inputs
        ctx.stack = torch.Size() if weight is None else weight.shape[:-2]
        ctx.samples = ctx.sketch.samples_of(tuple(x.shape[len(ctx.stack) : -1]))
        ctx.save_for_backward(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        with torch.no_grad():
            vjp = Vjp(as_rows(grad, ctx.stack), weight, None, ctx.samples)
            dense = ctx.sketch(vjp, ctx.uniforms).dense().view(grad.shape)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            (dense,) = refuse_second_backward((dense,), grad)
        return dense, None, None, None
