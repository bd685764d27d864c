"""The one backward of every sketched layer: draw Ĝ, then only the products that are kept.

A layer says how its tensors are matrices (``Form``); everything else is the same for linear
layers, convolutions and rows drawn in forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.checks import check_local
from ..core.compact import TwoSided, Whole, rows_for_weight
from ..core.importance import column_sums
from ..core.samples import Samples
from ..core.sampling import Uniforms, draw_uniforms
from ..core.vjp import CompactGradient, Vjp
from ..sketches import LayerSketch, Planner, Sketch
from .passes import Asked, asked, one_draw


class Method(NamedTuple):
    """What a layer does in backward: ``draw`` without a planner makes new atoms in each step."""

    sketch: LayerSketch
    planner: Planner | None = None
    uniforms: Uniforms = draw_uniforms


@dataclass(frozen=True)
class Form:
    """How the tensors of a layer are matrices; here those of a linear layer.

    Leading dimensions of x are rows, but for those of a ``stack`` of layers. Other kinds of
    layers say otherwise in a class of their own.
    """

    input_shape: tuple[int, ...]
    stack: tuple[int, ...] = ()
    samples: Samples | None = None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if weight.dim() == 2:
            return F.linear(x, weight, bias)
        X = as_rows(x, self.stack)
        out = X @ weight.mT if bias is None else X @ weight.mT + bias.unsqueeze(-2)
        # A view could not be changed in place by what follows, an in-place ReLU for example.
        return out if out.dim() == x.dim() else out.view(*x.shape[:-1], weight.shape[-2])

    def facing(self, grad: Tensor, sketch: LayerSketch) -> Form:
        """The form for a gradient as it lies in memory."""
        return self

    def vjp(self, grad: Tensor, x: Tensor | None, weight: Tensor | None) -> Vjp:
        """What the products are computed from."""
        X = None if x is None else as_rows(x, self.stack)
        return Vjp(as_rows(grad, self.stack), weight, X, self.samples)

    def draw(
        self, sketch: Sketch, vjp: Vjp, planner: Planner | None, uniforms: Uniforms
    ) -> CompactGradient:
        """Ĝ from atoms that the planner makes, or from new ones."""
        atoms = sketch.atoms(vjp) if planner is None else planner.atoms(sketch, vjp)
        return atoms.draw(vjp, uniforms)

    def bias_sums(self, G: Tensor) -> Tensor:
        return column_sums(G)

    def as_input(self, dX: Tensor) -> Tensor:
        return dX if dX.dim() == len(self.input_shape) else dX.view(self.input_shape)

    def as_weight(self, dW: Tensor) -> Tensor:
        return dW


def sketched(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    form: Form,
    method: Method,
    kept: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """``form.forward(x, weight, bias)`` with the backward of ``method``.

    ``kept``: rows of x and their places, where they were drawn in forward.
    """
    check_local(weight, method.sketch)
    rows, index = kept or (None, None)
    return _Sketched.apply(x, weight, bias, rows, index, form, method)  # type: ignore[no-any-return, no-untyped-call]


class _Sketched(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, rows: Any, index: Any, form: Form, _: Any
    ) -> Tensor:
        return form.forward(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, rows, index, ctx.form, ctx.method = inputs
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        sees = ctx.method.sketch.sees
        # A frozen weight needs no input, a frozen input no weight. The parameter itself is
        # saved, never a copy: FSDP2 frees and refills it in between.
        needs_weight = wants_x or "W" in sees
        needs_input = index is None and (wants_weight or "X" in sees)
        ctx.save_for_backward(x if needs_input else rows, weight if needs_weight else None, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, index = ctx.saved_tensors
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return (*_gradients(ctx, grad, x, weight, index), None, None, None, None)
        with torch.no_grad():
            grads = _gradients(ctx, grad, x, weight, index)
        return (*refuse_second_backward(grads, grad, x, weight), None, None, None, None)


def _gradients(
    ctx: Any, grad: Tensor, x: Tensor | None, weight: Tensor | None, index: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dX, dW and db, as far as this pass asks for them."""
    now = asked(ctx, (True, True, ctx.needs_input_grad[2]))
    wants_x, wants_weight, wants_bias = now
    method: Method = ctx.method
    form: Form = ctx.form.facing(grad, method.sketch)
    vjp = form.vjp(grad, x, weight)
    dX = dW = db = None
    if wants_bias and (method.sketch.exact_bias or index is not None):
        db = form.bias_sums(vjp.G)
        db = db if db.dtype == grad.dtype else db.to(grad.dtype)
    if wants_x or wants_weight or (wants_bias and db is None):
        compact = one_draw(ctx, grad, now, lambda: _compact(form, method, vjp, index, now))
        if wants_x:
            assert vjp.W is not None
            dX = form.as_input(compact.input_grad(vjp.W))
        if wants_weight:
            assert vjp.X is not None
            dW = form.as_weight(compact.weight_grad(vjp.X))
        if wants_bias and db is None:
            db = compact.bias_grad()
    return dX, dW, db


def _compact(
    form: Form, method: Method, vjp: Vjp, index: Tensor | None, asks: Asked
) -> CompactGradient:
    sketch, planner, uniforms = method
    if isinstance(sketch, Sketch):
        return form.draw(sketch, vjp, planner, uniforms)
    if index is not None:  # X is not whole; its rows belong to the side that drew them
        vjp = vjp._replace(X=None)
    sides: list[CompactGradient] = []
    for side in (sketch.input, sketch.weight):
        if side is None or side.keeps_all(*_sizes(vjp)):
            sides.append(Whole(vjp.G))
        elif side is sketch.forward:
            # The rows of X were drawn in forward, with 1/p in them.
            assert index is not None or not asks[1]
            rows = vjp.G if index is None else rows_for_weight(vjp.G, index)
            sides.append(Whole(rows))
        else:
            sides.append(form.draw(side, vjp, serving(planner, side), uniforms))
    return TwoSided(sides[0], sides[1])


def serving(planner: Planner | None, side: Sketch) -> Planner | None:
    """The planner, where it can serve this side of a pair."""
    return None if planner is None or planner.refusal(side) else planner


def _sizes(vjp: Vjp) -> tuple[int, int, int]:
    d = 0 if vjp.W is None else vjp.W.shape[-1]
    return vjp.G.shape[-2], vjp.G.shape[-1], d


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


def autocast(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What autocast would do to a layer's arguments, done outside of the Function."""
    device = x.device.type
    cast = None if bias is None else as_autocast(bias, device)
    return as_autocast(x, device), as_autocast(weight, device), cast


def as_autocast(t: Tensor, device: str) -> Tensor:
    """``t`` as autocast would hand it to a product on ``device``: it leaves float64 alone."""
    if device == "meta" or not torch.is_autocast_enabled(device):  # which meta does not know
        return t
    if t.dtype == torch.float64 or not t.is_floating_point():
        return t
    return t.to(torch.get_autocast_dtype(device))


def records(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether autograd will want a gradient of one of them that can be sketched."""
    if not torch.is_grad_enabled() or not drawable(x, weight):
        return False
    return x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)


def drawable(x: Tensor, weight: Tensor) -> bool:
    """Complex and nested tensors are left exact, and those on the meta device, which have no
    numbers to draw by."""
    return not (x.is_complex() or weight.is_complex() or x.is_nested or x.is_meta)
