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
        y = norm.forward(a.reshape(-1, a.shape[-1]), P[: norm.count], Tape(False), True)
        z = added(y, f.forward(y, P[norm.count :], tape, False), f)
        remember(ctx, a, index, settings, P)
        ctx.chains, ctx.kept = chains, len(tape.kept)
        ctx.dtype = None if correction is None else correction.dtype
        ctx.save_for_backward(a, *tape.kept, *P)
        return z.view(*a.shape[:-1], z.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        a, *rest = ctx.saved_tensors
        tensors, P = rest[: ctx.kept], tuple(rest[ctx.kept :])
        norm, f = ctx.chains
        first, last = P[: norm.count], P[norm.count :]
        with torch.no_grad(), autocast_as(ctx.autocast):
            needs = asked(ctx, ctx.tensors)
            below = (needs[0], *needs[5 : 5 + norm.count])
            A, G = (t.reshape(-1, t.shape[-1]) for t in (a, grad))
            kept, carried = drawn(ctx, G, one_source(ctx, grad, needs, ctx.settings.uniforms))
            few = [t.index_select(0, kept.rows) for t in (A, *tensors)]
            tape = KeptTape(ctx.settings.save == "activations", iter(few[1:]))
            _, pull = f.again(norm.forward(few[0], first, Tape(False), True), last, tape, False)
            dY, grads = pull(kept.values, (any(below), *needs[5 + norm.count :]))
            dX: Tensor | None = None
            above: Grads = (None,) * norm.count
            if dY is not None:
                dense = G.index_add(0, kept.rows, dY.to(G.dtype))
                dX, above = _through(norm, A, first, dense, below)
            correction, rows = carried
            if correction is not None and rows is not None and needs[1]:
                X = A.index_select(0, rows.to(torch.int64))
                only = (True,) + (False,) * norm.count
                correction, _ = _through(norm, X, first, correction, only)
                assert correction is not None
                correction = correction.to(ctx.dtype)
            dx = None if dX is None else dX.view(a.shape)
            grads = as_wanted((*above, *grads), P, needs[5:])
        return returned((dx, correction, rows, None, None, *grads), grad, a)


def _through(norm: Chain, X: Tensor, P: Parameters, g: Tensor, wants: Wants) -> Pulled:
    _, pull = norm.again(X, P, KeptTape(False, iter(())), True)
    return pull(g, wants)
