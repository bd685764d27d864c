"""The second half of a block that is normalised last, through which a carried draw passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.samples import Samples
from ..core.sampling import Uniforms, draw_uniforms
from .branch import (
    RowWise,
    Settings,
    added,
    as_wanted,
    autocast_as,
    check_save,
    drawn,
    remember,
    returned,
    shaped,
)
from .kept import Carry, kept_count
from .passes import asked, one_source
from .rowwise import Chain, Grads, KeptTape, Parameters, Pulled, Tape, Wants


def norm_branch(
    a: Tensor,
    norm: RowWise,
    f: RowWise,
    budget: float | int,
    *,
    save: str = "activations",
    carry: Carry | None = None,
    uniforms: Uniforms = draw_uniforms,
) -> Tensor:
    """``y + f(y)`` with ``y = norm(a)``, a: [N, T, d], and f's backward on kept rows.

    Of the two only ``a`` is saved: y is computed again on the kept rows alone. With g the gradient
    of the result and S the rows drawn from it, that of y is g + J_fᵀ g_S/p_S, and the norm's exact
    vjp takes it to a. A norm's vjp is linear: a correction c of the gradient behind it, which a
    ``carry`` from ``attention_branch(residual=True, carry=True)`` brings to S, becomes Jᵀc.
    Cost of backward: ``budget`` times that of f, and the norm's, over all rows.
    """
    check_save(save)
    rows = a.numel() // max(1, a.shape[-1])
    rank = kept_count(budget, max(1, rows))
    P = (*norm.parameters, *f.parameters)
    wanted = a.requires_grad or any(p is not None and p.requires_grad for p in P)
    if not wanted or not torch.is_grad_enabled() or rows == 0 or rank >= rows:
        y = norm(a)
        return y + f(y)
    first, second, capacity = (None, None, 0) if carry is None else carry
    samples = Samples.of(tuple(a.shape[:-1]))
    settings = Settings(rank, save, True, samples, uniforms, capacity, False)
    return _NormBranch.apply(a, first, second, (norm.chain, f.chain), settings, *P)  # type: ignore[no-any-return, no-untyped-call]


class _NormBranch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        correction: Tensor | None,
        index: Tensor | None,
        chains: tuple[Chain, Chain],
        settings: Settings,
        *P: Tensor | None,
    ) -> Tensor:
        norm, f = chains
        tape = Tape(settings.save == "activations")
        remember(ctx, a, index, settings, P)
        # Autocast runs a norm in a precision that torch's own function alone chooses.
        moments = Tape(False, moments=ctx.autocast is None)
        y = norm.forward(a.reshape(-1, a.shape[-1]), P[: norm.count], moments, True)
        z = added(y, f.forward(y, P[norm.count :], tape, False), f)
        ctx.chains, ctx.kept = chains, (len(moments.kept), len(tape.kept))
        ctx.dtype = None if correction is None else correction.dtype
        ctx.save_for_backward(a, *moments.kept, *tape.kept, *P)
        return shaped(z, a, f)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        a, *rest = ctx.saved_tensors
        few, count = ctx.kept
        moments, tensors, P = rest[:few], rest[few : few + count], tuple(rest[few + count :])
        norm, f = ctx.chains
        first, last = P[: norm.count], P[norm.count :]
        with torch.no_grad(), autocast_as(ctx.autocast):
            needs = asked(ctx, ctx.tensors)
            below = (needs[0], *needs[5 : 5 + norm.count])
            A, G = (t.reshape(-1, t.shape[-1]) for t in (a, grad))
            kept, carried = drawn(ctx, G, one_source(ctx, grad, needs, ctx.settings.uniforms))
            Y = norm.forward(A.index_select(0, kept.rows), first, Tape(False), True)
            some = iter([t.index_select(0, kept.rows) for t in tensors])
            _, pull = f.again(Y, last, KeptTape(ctx.settings.save == "activations", some), False)
            dY, grads = pull(kept.values, (any(below), *needs[5 + norm.count :]))
            dX: Tensor | None = None
            above: Grads = (None,) * norm.count
            if dY is not None:
                dense = G.index_add(0, kept.rows, dY.to(G.dtype))
                dX, above = _through(norm, A, first, moments, dense, below)
            correction, rows = carried
            if correction is not None and rows is not None and needs[1]:
                X, *own = (t.index_select(0, rows.to(torch.int64)) for t in (A, *moments))
                only = (True,) + (False,) * norm.count
                correction, _ = _through(norm, X, first, own, correction, only)
                assert correction is not None
                correction = correction.to(ctx.dtype)
            dx = None if dX is None else dX.view(a.shape)
            grads = as_wanted((*above, *grads), P, needs[5:])
        return returned((dx, correction, rows, None, None, *grads), grad, a)


def _through(
    norm: Chain, X: Tensor, P: Parameters, moments: list[Tensor], g: Tensor, wants: Wants
) -> Pulled:
    _, pull = norm.again(X, P, KeptTape(False, iter(moments), bool(moments)), False)
    return pull(g, wants)
