"""A linear layer that saves r rows of its input: the draw for dW is made in forward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..core.compact import scaled, take_rows
from ..core.importance import column_sums
from ..core.samples import Samples
from ..core.sampling import draw_uniforms
from ..sketches import ForwardRows, RowMemory, Sketch, Split
from ..sketches.base import part_of
from .linear import _linear, as_rows, refuse_second_backward, sketched_linear
from .passes import asked, one_draw


def forward_rows_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sketch: ForwardRows | Split,
    u: Tensor | None,
    memory: object,
    layout: Samples,
) -> Tensor:
    """``sketched_linear`` for a sketch that draws in forward."""
    first = sketch.input if isinstance(sketch, Split) else None
    rule = sketch.weight if isinstance(sketch, Split) else sketch
    assert isinstance(rule, ForwardRows)
    if not weight.requires_grad:  # no dW, no rows to save
        return (
            _linear(x, weight, bias)
            if first is None
            else sketched_linear(x, weight, bias, first, layout=layout)
        )
    with torch.no_grad():
        X = as_rows(x.detach(), weight.shape[:-2])
        own, other = _uniforms(sketch, rule, X, weight, u)
        index, scale = rule.choose(X, layout, memory, own)
        kept = scaled(take_rows(X, index), scale.unsqueeze(-1))
    return _ForwardRowsLinear.apply(  # type: ignore[no-any-return, no-untyped-call]
        x, weight, bias, kept, index, first, other, memory, layout
    )


def _uniforms(
    sketch: Sketch, rule: ForwardRows, X: Tensor, weight: Tensor, u: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Those of the draw in forward, and those of the draw for dX."""
    if u is None or sketch is rule:
        return u, None
    assert isinstance(sketch, Split)
    stack = X.dim() - 2
    G = X.new_empty(1).expand(*X.shape[:-1], weight.shape[-2])  # only its shape is looked at
    first = sketch.input
    count = 0 if first is None else math.prod(first.uniform_shape(G, weight)[stack:])
    return part_of(u, stack, count, rule.uniform_shape(G, None)), u[..., :count]


class _ForwardRowsLinear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: object) -> Tensor:
        return _linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, kept, index, ctx.sketch, u, ctx.memory, ctx.layout = inputs
        ctx.save_for_backward(kept, index, weight if ctx.needs_input_grad[0] else None, u)
        ctx.input_shape = x.shape
        ctx.stack = weight.shape[:-2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, index, weight, u = ctx.saved_tensors
        with torch.no_grad():
            grads = _gradients(ctx, grad, kept, index, weight, u)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            grads = refuse_second_backward(grads, grad, kept, weight)
        return (*grads, None, None, None, None, None, None)


def _gradients(
    ctx: Any, grad: Tensor, kept: Tensor, index: Tensor, weight: Tensor | None, u: Tensor | None
) -> tuple[Tensor | None, ...]:
    wants_x, wants_weight, wants_bias = now = asked(ctx)
    sketch: Sketch | None = ctx.sketch
    G = as_rows(grad, ctx.stack)
    dX = dW = db = None
    sums = column_sums(G) if wants_weight or wants_bias else None
    if wants_x:
        assert weight is not None
        if sketch is None or sketch.keeps_all(G.shape[-2], *weight.shape[-2:]):
            dX = G @ weight
        else:
            compact = one_draw(ctx, grad, now, lambda: _draw(ctx, G, weight, u))
            dX = compact.input_grad(weight)
        dX = dX.view(ctx.input_shape)
    if wants_weight:
        # A row that is not kept is not looked at; a non-finite one must be seen.
        assert sums is not None
        unseen = (0 * sums.sum(-1))[..., None, None].to(grad.dtype)
        dW = (take_rows(G, index) + unseen).mT @ kept
        if isinstance(ctx.memory, RowMemory):
            ctx.memory.update(G, ctx.layout)
    if wants_bias:
        assert sums is not None
        db = sums.to(grad.dtype)
    return dX, dW, db


def _draw(ctx: Any, G: Tensor, weight: Tensor, u: Tensor | None) -> Any:
    sketch: Sketch = ctx.sketch
    if u is None:
        u = draw_uniforms(G, sketch.uniform_shape(G, weight))
    else:
        u = part_of(u, len(ctx.stack), 0, sketch.uniform_shape(G, weight))
    return sketch(G, weight, u, layout=ctx.layout)
