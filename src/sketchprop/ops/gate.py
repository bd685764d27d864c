"""The gate: identity forward, sketched gradient backward, at any node of a graph.

It multiplies dense matrices with zeros in them and saves nothing: it is the reference that the
fast paths are tested against, and a way to put the paper's sketches anywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.checks import check_given
from ..core.sampling import Uniforms, draw_uniforms
from ..sketches import AnySketch, ElementMask, Planner, Sketch
from .backward import Form, refuse_second_backward


def gate(
    x: Tensor,
    sketch: Sketch,
    *,
    dim: int = -1,
    weight: Tensor | None = None,
    planner: Planner | None = None,
    uniforms: Uniforms = draw_uniforms,
) -> Tensor:
    """Returns ``x``; in backward its gradient G becomes ``sketch(Vjp(G)).dense()``, E[Ĝ] = G.

    Put it behind a layer, ``gate(F.linear(x, W, b), sketch, weight=W)``, and every gradient of
    the layer comes from Ĝ. ``dim`` holds the columns of G, all other dimensions its rows: 1 for the
    channels of images. ``weight`` is for sketches that look at the layer's weight (Diagonal,
    RankConstrained). A ``weight`` with leading dimensions means a stack of layers. ``planner``
    makes the atoms, one for each gate. ``uniforms``: where the draw's random numbers come from,
    torch's default generator.

    >>> from sketchprop import L1
    >>> h = torch.randn(128, 64, requires_grad=True)
    >>> gate(torch.relu(h), L1(0.1)).sum().backward()
    """
    if reason := unfit(sketch):
        raise TypeError(reason)
    if "W" in sketch.sees:
        check_given(weight, sketch, "weight", "weight=...")
    stack = () if weight is None else weight.shape[:-2]
    n = x.shape[dim]
    rows = x[(0,) * len(stack)].numel() // max(1, n)
    if not (x.requires_grad and torch.is_grad_enabled()) or rows == 0:
        return x
    if x.is_meta or sketch.keeps_all(rows, n, 0):
        return x
    if torch.compiler.is_compiling():
        planner = None  # a step that is compiled may have no side effects
    return _Gate.apply(x, weight, dim, sketch, planner, uniforms)  # type: ignore[no-any-return, no-untyped-call]


def unfit(sketch: AnySketch) -> str:
    """Why a sketch is none of a gradient alone; empty if it is."""
    if isinstance(sketch, ElementMask):
        return (
            "ElementMask masks the weight and the input of a layer, not a gradient: it works in "
            "sketched_linear and sketch_, not in gate; ColumnMask and SampleMask do"
        )
    if not isinstance(sketch, Sketch) or "X" in sketch.sees:
        return (
            f"{sketch!r} looks at a layer's input or treats dX and dW apart: it works in "
            "sketched_linear and sketch_, not in gate; Rows(0.1) does"
        )
    return ""


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, *_: object) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.dim, ctx.sketch, ctx.planner, ctx.uniforms = inputs
        ctx.stack = torch.Size() if weight is None else weight.shape[:-2]
        dims = x.movedim(ctx.dim, -1).shape
        ctx.samples = ctx.sketch.samples_of(tuple(dims[len(ctx.stack) : -1]))
        ctx.save_for_backward(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        with torch.no_grad():
            columns = grad.movedim(ctx.dim, -1)
            form = Form(columns.shape, ctx.stack, ctx.samples)
            vjp = form.vjp(columns, None, weight)
            compact: Any = form.draw(ctx.sketch, vjp, ctx.planner, ctx.uniforms)
            dense = compact.dense().view(columns.shape).movedim(-1, ctx.dim)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            (dense,) = refuse_second_backward((dense,), grad)
        return dense, None, None, None, None, None
