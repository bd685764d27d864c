"""The residual and norm behind a branch, through which a carried draw passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .branch import RowWise, autocast_as, autocast_now, returned
from .kept import Carry, empty_carry
from .rowwise import Chain, KeptTape, Tape


def residual_norm(x: Tensor, a: Tensor, norm: RowWise, carry: Carry) -> tuple[Tensor, Carry]:
    """``norm(x + a)`` for a block that is normalised last, exact, and the carry for what follows.

    ``carry`` comes from ``attention_branch`` with a. Backward is that of the norm over all rows,
    and once more over the kept ones: a norm's vjp is linear, so the correction c of the gradient
    g + c at the norm's output becomes Jᵀc before it.
    """
    y, correction, rows = _ResidualNorm.apply(x, a, *carry[:2], norm.chain, *norm.parameters)  # type: ignore[no-untyped-call]
    return y, Carry(correction, rows, carry.capacity)


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        correction: Tensor,
        index: Tensor,
        chain: Chain,
        *P: Tensor | None,
    ) -> Any:
        s = x + a
        ctx.chain, ctx.autocast = chain, autocast_now(x.device.type)
        ctx.types = x.dtype, a.dtype, correction.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(s, *P)
        y = chain.forward(s, P, Tape(False), True)
        return (y, *empty_carry(index.shape[0], y))

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, correction: Tensor | None, index: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        s, *P = ctx.saved_tensors
        count = len(P)
        if grad is None:
            return (None,) * (5 + count)
        first, second, third = ctx.types
        with torch.no_grad(), autocast_as(ctx.autocast):
            S = s.reshape(-1, s.shape[-1])
            _, pull = ctx.chain.again(S, tuple(P), KeptTape(False, iter(())), True)
            wants = (True, *ctx.needs_input_grad[5:])
            dS, grads = pull(grad.reshape(-1, grad.shape[-1]), wants)
            assert dS is not None
            ds = dS.view(s.shape)
            if correction is not None and index is not None:
                rows = S.index_select(0, index.to(torch.int64))
                _, pull = ctx.chain.again(rows, tuple(P), KeptTape(False, iter(())), True)
                correction, _ = pull(correction, (True,) + (False,) * count)
                assert correction is not None
                correction = correction.to(third)
        return returned((ds.to(first), ds.to(second), correction, index, None, *grads), grad, s)
