"""The fast path: a linear layer whose backward multiplies only what is kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.checks import check_local
from ..core.compact import CompactGradient, KeptColumns
from ..core.importance import column_sums
from ..core.samples import Samples
from ..sketches import AmortisedSketch, PlanMemory, RowMemory, Sketch
from .passes import asked, one_draw


def sketched_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sketch: Sketch,
    *,
    u: Tensor | None = None,
    memory: PlanMemory | RowMemory | None = None,
    accumulate: bool = False,
    layout: Samples | None = None,
) -> Tensor:
    """``F.linear(x, weight, bias)``, with dX and dW from a sketch of the output gradient.

    ``x: [*, d]``, ``weight: [n, d]``, ``bias: [n]``. Or a stack of independent layers, each with
    its own draw: ``weight: [*stack, n, d]``, ``bias: [*stack, n]``, ``x: [*stack, *, d]``.
    Where the sketch would keep everything, or no gradient is wanted, this is ``F.linear`` itself
    and nothing is drawn. Draws come from the default generator, in backward; ``u`` replaces them
    (for tests: every use of a layer must have its own). ``memory`` holds the plan of a sketch with
    ``refresh_every`` above 1; each layer needs its own. ``accumulate``: where ``weight.grad`` is
    there already, backward adds the kept rows of dW to it in place instead of making a dense dW.
    That is for ``loss.backward()`` in a plain loop only: hooks on the weight and
    ``torch.autograd.grad`` do not see what was added. ``layout``: which rows belong to
    one sample, for sketches that keep whole samples; by default as the sketch reads the shape.

    >>> from sketchprop import L1
    >>> W = torch.randn(64, 784, requires_grad=True)
    >>> sketched_linear(torch.randn(128, 784), W, None, L1(0.1)).sum().backward()
    >>> int((W.grad.abs().sum(1) > 0).sum())  # rows of dW that this draw kept
    6
    """
    x, weight, bias = _autocast(x, weight, bias)
    stack = weight.shape[:-2]
    if x.shape[: len(stack)] != stack or x.dim() <= len(stack) or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"x of shape {tuple(x.shape)} does not fit weight of shape {tuple(weight.shape)}: "
            f"x must be [{', '.join([*map(str, stack), '*', str(weight.shape[-1])])}]"
        )
    n, d = weight.shape[-2:]
    rows = x.numel() // max(1, d * stack.numel())
    wanted = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if not wanted or not torch.is_grad_enabled() or rows == 0 or sketch.keeps_all(rows, n, d):
        return _linear(x, weight, bias)
    check_local(weight, sketch)
    if memory is not None and torch.compiler.is_compiling():
        memory = None  # a step that is compiled may have no side effects
    if layout is None and sketch.by_rows:
        layout = sketch.layout_of(tuple(x.shape[len(stack) : -1]))
    if sketch.draws_forward:
        from .forward import forward_rows_linear

        return forward_rows_linear(x, weight, bias, sketch, u, memory, layout)  # type: ignore[arg-type]
    return _SketchedLinear.apply(x, weight, bias, sketch, u, memory, accumulate, layout)  # type: ignore[no-any-return, no-untyped-call]


class _SketchedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, sketch: Sketch, *rest: object
    ) -> Tensor:
        return _linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.sketch, u, ctx.memory, ctx.accumulate, ctx.layout = inputs
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        # A frozen weight needs no input, a frozen input no weight. The parameter itself is
        # saved, never a copy: FSDP2 frees and refills it in between.
        needs_weight = wants_x or ctx.sketch.needs_weight or ctx.accumulate
        needs_input = wants_weight or ctx.sketch.needs_input
        ctx.save_for_backward(x if needs_input else None, weight if needs_weight else None, u)
        ctx.input_shape = x.shape
        ctx.stack = weight.shape[:-2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, u = ctx.saved_tensors
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return (*_gradients(ctx, grad, x, weight, u), None, None, None, None, None)
        with torch.no_grad():
            grads = _gradients(ctx, grad, x, weight, u)
        return (*refuse_second_backward(grads, grad, x, weight), None, None, None, None, None)


def _gradients(
    ctx: Any, grad: Tensor, x: Tensor | None, weight: Tensor | None, u: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    wants_x, wants_weight, wants_bias = now = asked(ctx)
    sketch: Sketch = ctx.sketch
    G = as_rows(grad, ctx.stack)
    dX = dW = db = None
    if wants_bias and sketch.exact_bias:
        db = column_sums(G)
        db = db if db.dtype == grad.dtype else db.to(grad.dtype)
    if wants_x or wants_weight or (wants_bias and db is None):
        compact = one_draw(ctx, grad, now, lambda: _draw(ctx, G, x, weight, u))
        if wants_x:
            assert weight is not None
            dX = compact.input_grad(weight)
            dX = dX if dX.dim() == len(ctx.input_shape) else dX.view(ctx.input_shape)
        if wants_weight:
            assert x is not None
            X = as_rows(x, ctx.stack)
            if not (ctx.accumulate and _accumulated(compact, X, weight)):
                dW = compact.weight_grad(X)
        if wants_bias and db is None:
            db = compact.bias_grad()
    return dX, dW, db


def _draw(
    ctx: Any, G: Tensor, x: Tensor | None, weight: Tensor | None, u: Tensor | None
) -> CompactGradient:
    sketch: Sketch = ctx.sketch
    if ctx.memory is not None and isinstance(sketch, AmortisedSketch):
        memory: PlanMemory = ctx.memory
        return memory.compact(sketch, G, weight, u)
    if not sketch.by_rows:
        return sketch(G, weight, u)
    X = as_rows(x, ctx.stack) if x is not None and sketch.needs_input else None
    return sketch(G, weight, u, X=X, layout=ctx.layout)


def _accumulated(compact: CompactGradient, X: Tensor, weight: Tensor | None) -> bool:
    """Adds dW to ``weight.grad`` in place, if it can be."""
    if weight is None or not weight.is_leaf or weight.grad is None:
        return False
    if not isinstance(compact, KeptColumns) or weight.grad.dtype != X.dtype:
        return False
    compact.add_weight_grad_(X, weight.grad)
    return True


def as_rows(x: Tensor, stack: tuple[int, ...] = ()) -> Tensor:
    """``[*stack, *, d]`` as ``[*stack, B, d]``."""
    return x.reshape(*stack, -1, x.shape[-1]) if x.dim() != len(stack) + 2 else x


def refuse_second_backward(
    grads: tuple[Tensor | None, ...], *inputs: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The same gradients, tied to ``inputs`` so that differentiating them raises."""
    present = [g for g in grads if g is not None]
    tied = iter(_Once.apply(len(present), *present, *inputs))  # type: ignore[no-untyped-call]
    return tuple(None if g is None else next(tied) for g in grads)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(count: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[:count] if t is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "a sketched gradient cannot be differentiated again: its random draw has no "
            "derivative. Run the forward pass inside `with sketchprop.exact(model):`"
        )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    stack = weight.shape[:-2]
    X = as_rows(x, stack)
    out = X @ weight.mT if bias is None else X @ weight.mT + bias.unsqueeze(-2)
    # A view could not be changed in place by what follows, an in-place ReLU for example.
    return out if out.dim() == x.dim() else out.view(*x.shape[:-1], weight.shape[-2])


def _autocast(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What autocast would do to F.linear's arguments, done outside of the Function."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
