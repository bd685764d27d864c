"""The norm behind a residual, through which a carried draw passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .branch import RowWise, as_wanted, autocast_as, autocast_now, returned
from .kept import Carry, empty_carry
from .rowwise import Chain, Grads, KeptTape, Tape


def carried_norm(x: Tensor, norm: RowWise, carry: Carry) -> tuple[Tensor, Carry]:
    """``norm(x)`` between the parts of a block that is normalised last, and the carry for the next.

    ``x`` and ``carry`` come from ``attention_branch(residual=True, carry=True)``. Backward is
    exact, over all rows, and runs once more over the kept ones: a norm's vjp is linear, so the
    correction c of the gradient g + c behind the norm becomes Jᵀc before it.
    """
    y, correction, rows = _CarriedNorm.apply(x, *carry[:2], norm.chain, *norm.parameters)  # type: ignore[no-untyped-call]
    return y, Carry(correction, rows, carry.capacity)


class _CarriedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        correction: Tensor,
        rows: Tensor,
        chain: Chain,
        *P: Tensor | None,
    ) -> Any:
        ctx.chain, ctx.autocast = chain, autocast_now(x.device.type)
        ctx.dtype = correction.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *P)
        y = chain.forward(x, P, Tape(False), True)
        return (y, *empty_carry(rows.shape[0], y))

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, correction: Tensor | None, rows: Tensor | None
    ) -> Grads:
        x, *P = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(needs)
        nothing = KeptTape(False, iter(()))
        with torch.no_grad(), autocast_as(ctx.autocast):
            X = x.reshape(-1, x.shape[-1])
            _, pull = ctx.chain.again(X, tuple(P), nothing, True)
            dX, grads = pull(grad.reshape(-1, grad.shape[-1]), (needs[0], *needs[4:]))
            if correction is not None and rows is not None:
                few = X.index_select(0, rows.to(torch.int64))
                _, pull = ctx.chain.again(few, tuple(P), nothing, True)
                correction, _ = pull(correction, (True,) + (False,) * len(P))
                assert correction is not None
                correction = correction.to(ctx.dtype)
            dx = None if dX is None else dX.view(x.shape)
            grads = as_wanted(grads, tuple(P), needs[4:])
        return returned((dx, correction, rows, None, *grads), grad, x)
