"""The attention part of a transformer block as one function: its backward runs on kept tokens.

Norm, projections to q, k, v, attention, output projection and what follows it up to the residual.
In backward the kept tokens are drawn once, or come from the branch above (``Carry``): on them run
the output projection, attention and the projection to q. The rows of K and V all have a gradient,
and a draw of their own (``keys``), on which their two projections run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.samples import Samples
from ..core.sampling import Uniforms, draw_uniforms
from .attend import Attended, Attending, attend, attend_back, check_mask, mask_rows
from .attention import Slots, attended_rows, dropped_rows, token_rows
from .branch import (
    RowWise,
    added,
    as_wanted,
    autocast_as,
    autocast_now,
    check_save,
    returned,
    shaped,
)
from .kept import (
    Carry,
    Kept,
    draw_batch,
    draw_queries,
    empty_carry,
    keep,
    kept_count,
    row_norms,
    slot_count,
)
from .passes import asked, one_source
from .rowwise import Chain, Grads, KeptTape, Parameters, Pulled, Tape, Wants

Projection = tuple[Tensor, Tensor | None]
"""Weight and bias of a linear map."""
Weights = tuple[Projection, Projection, Projection]
Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of the angles of each place."""
Products = tuple[tuple[Tensor, Tensor], ...]
"""For q, k and v the rows of the gradient and of the input that make dW."""

IDENTITY = RowWise(Chain(), ())


class Heads(NamedTuple):
    """Numbers of heads; ``packed``: one weight [(heads + 2 keys) · d, ·] makes q, k and v."""

    queries: int
    keys: int
    packed: bool


class Plan(NamedTuple):
    """All of a sub-layer that is not a tensor."""

    before: Chain
    after: Chain
    heads: Heads
    how: Attending
    queries: int
    capacity: int
    keys: int
    products: bool
    residual: bool
    samples: Samples
    uniforms: Uniforms
    carries: bool = True


def attention_branch(
    x: Tensor,
    projections: Projection | tuple[Projection, Projection, Projection],
    out: RowWise,
    *,
    heads: int,
    kv_heads: int | None = None,
    norm: RowWise = IDENTITY,
    rotary: Rotary | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    queries: float | int = 0.4,
    keys: float | int = 1.0,
    capacity: float = 1.25,
    save: str = "activations",
    residual: bool = False,
    carry: bool = False,
    uniforms: Uniforms = draw_uniforms,
) -> tuple[Tensor, Carry | None]:
    """Self-attention of ``x: [N, T, d]``, out(attention(q, k, v of norm(x))), and a ``Carry``.

    ``projections``: weight and bias of a packed projection, or three pairs for q, k and v;
    ``out`` and ``norm``: row-wise steps behind and before. ``queries``: tokens kept for ``out``,
    attention and q, p ∝ ‖g‖, at most ``capacity`` times the even share of a sample; ``keys``: rows
    kept for k and v, p from the norms of their own gradients; 1.0: all. The means are exact.
    ``rotary``: cosines and sines, ``[T, ·]`` or ``[N, T, ·]`` each, that rotate q and k by halves.
    ``residual``: x + attention. ``carry=True`` promises that the second result is given to the
    ``branch`` that follows in the block, so that one draw serves both; it is ``None`` where all
    queries are kept.
    Cost of backward: ``queries`` of out and q, ``capacity`` times that of attention, ``keys`` of k
    and v. ``save="input"``: attention and k and v are computed again, from x.
    """
    check_save(save)
    if x.is_nested or x.dim() != 3:
        raise ValueError(
            f"x has shape {tuple(x.shape) if not x.is_nested else 'nested'}; give [samples, "
            "tokens, features], nested tensors padded and with attn_mask for the padding"
        )
    packed = isinstance(projections[0], Tensor)
    flat: Parameters = projections if packed else tuple(t for pair in projections for t in pair)  # type: ignore[assignment, union-attr]
    N, T, _ = x.shape
    kept = kept_count(queries, max(1, T))
    rows = kept_count(keys, max(1, N * T))
    how = Attending(dropout_p, is_causal, scale)
    plan = Plan(
        norm.chain, out.chain, Heads(heads, kv_heads or heads, packed), how,
        kept, slot_count(capacity, kept, T), rows, save == "activations", residual,
        Samples(1, N, T), uniforms,
    )  # fmt: skip
    _check_projections(flat, plan.heads)
    P = (*norm.parameters, *flat, *out.parameters)
    wanted = x.requires_grad or any(p is not None and p.requires_grad for p in P)
    learned = attn_mask is not None and attn_mask.requires_grad
    everything = (kept >= T and rows >= N * T) or x.is_meta
    if not wanted or not torch.is_grad_enabled() or not x.numel() or everything or learned:
        return _exact(x, attn_mask, rotary, plan, P), None
    check_mask(attn_mask, (N, heads, T, T), how)
    turns = rotary or (None, None)
    if not carry or kept >= T:
        plan = plan._replace(carries=False)
        return _AttentionBranch.apply(x, attn_mask, *turns, plan, *P), None  # type: ignore[no-untyped-call]
    y, correction, places = _AttentionBranch.apply(x, attn_mask, *turns, plan, *P)  # type: ignore[no-untyped-call]
    return y, Carry(correction, places, plan.capacity)


def _exact(
    x: Tensor, mask: Tensor | None, rotary: Rotary | None, plan: Plan, P: Parameters
) -> Tensor:
    before, _, after = _split(plan, P)
    tape = Tape(False)
    q, k, v = _project(plan.before.forward(x, before, tape, True), P, plan, rotary)
    mixed = F.scaled_dot_product_attention(
        q, k, v, mask, *plan.how[:2], scale=plan.how.scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    y = plan.after.forward(mixed.transpose(1, 2).flatten(2), after, tape, True)
    return x + y if plan.residual else y


class _AttentionBranch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mask: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        plan: Plan,
        *P: Tensor | None,
    ) -> Any:
        before, _, after = _split(plan, P)
        tape = Tape(True)
        rotary = None if cos is None or sin is None else (cos, sin)
        q, k, v = _project(plan.before.forward(x, before, tape, True), P, plan, rotary)
        attended = attend(q, k, v, mask, plan.how)
        y = plan.after.forward(token_rows(attended.out), after, tape, False)
        y = shaped(y, x, plan.after)
        ctx.plan, ctx.autocast = plan, autocast_now(x.device.type)
        ctx.tensors = tuple(isinstance(t, Tensor) for t in (x, mask, cos, sin, plan, *P))
        saved = (q, k, v, *attended[:2]) if plan.products else (None,) * 5
        ctx.save_for_backward(x, mask, cos, sin, *saved, attended.dropped, *P, *tape.kept)
        y = added(x, y, plan.after) if plan.residual else y
        if not plan.carries:
            return y
        ctx.set_materialize_grads(False)
        return (y, *empty_carry(x.shape[0] * plan.queries, y))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *carried: Tensor | None) -> Grads:
        if grad is None:
            return (None,) * len(ctx.tensors)
        needs = asked(ctx, ctx.tensors)
        plan = ctx.plan._replace(uniforms=one_source(ctx, grad, needs, ctx.plan.uniforms))
        count = len(needs) - 5
        x, mask, cos, sin, *rest = ctx.saved_tensors
        P = tuple(rest[6 : 6 + count])
        with torch.no_grad(), autocast_as(ctx.autocast):
            G = grad.reshape(-1, grad.shape[-1])
            kept = _kept(plan, G, carried)
            turns = None if cos is None else (cos, sin)
            back = Back(plan, G, x.reshape(-1, x.shape[-1]), kept.rows, P, turns)
            dX, grads = _gradients(
                back, kept.values, mask, rest[:6], rest[6 + count :], (needs[0], *needs[5:])
            )
            dx = None if dX is None else dX.to(x.dtype).view(x.shape)
            grads = as_wanted(grads, P, needs[5:])
        return returned((dx, None, None, None, None, *grads), grad, x)


def _kept(plan: Plan, G: Tensor, carried: tuple[Tensor | None, ...]) -> Kept:
    """The tokens that the branch above drew, with g/p + j; or those of a draw made here."""
    if carried and carried[0] is not None and carried[1] is not None:
        rows = carried[1].to(torch.int64)
        return Kept(rows, G.index_select(0, rows) + carried[0])
    if plan.queries >= plan.samples.tokens:
        return Kept(torch.arange(G.shape[0], device=G.device), G)
    rank = plan.queries * plan.samples.samples
    return keep(G, *draw_queries(row_norms(G), rank, plan.capacity, plan.uniforms, plan.samples))


class Back(NamedTuple):
    """What every part of a backward pass looks at; ``kept``: the rows of the kept queries."""

    plan: Plan
    G: Tensor
    X: Tensor
    kept: Tensor
    P: Parameters
    rotary: Rotary | None


class Few(NamedTuple):
    """What attention's backward looks at: kept queries, all keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor
    attended: Attended
    mask: Tensor | None


def _gradients(
    back: Back,
    values: Tensor,
    mask: Tensor | None,
    saved: list[Any],
    tape: list[Tensor],
    wants: Wants,
) -> Pulled:
    """dX and the gradients of all parameters from the compact gradient ``values``."""
    plan, _, _, kept, P, rotary = back
    _, _, after = _split(plan, P)
    last = len(P) - plan.after.count
    slots = Slots.of(kept, plan.capacity, plan.samples)
    few = _few(back, slots, mask, saved)
    rows = KeptTape(True, iter([t.index_select(0, kept) for t in tape]))
    _, pull = plan.after.again(slots.take(few.attended.out), after, rows, False)
    dO, after_grads = pull(values, (any(wants[: 1 + last]), *wants[1 + last :]))
    if dO is None:
        return None, ((None,) * last + after_grads)
    dO = slots.put(dO.to(few.q.dtype), plan.heads.queries)
    grads = attend_back(dO, few.q, few.k, few.v, few.attended, few.mask, plan.how)
    dq, dk, dv = grads
    if rotary is not None:
        dq = _turned_back(dq, _at_slots(rotary, slots, plan.samples))
        dk = _turned_back(dk, rotary)
    dq, dk, dv = slots.take(dq), token_rows(dk), token_rows(dv)
    first = plan.before.count
    through = _through_drawn if plan.keys < back.X.shape[0] else _through_all
    dX, before_grads, products = through(back, dq, dk, dv, wants[: 1 + first])
    return dX, (*before_grads, *_weight_grads(plan, products, wants[1 + first :]), *after_grads)


def _few(back: Back, slots: Slots, mask: Tensor | None, saved: list[Any]) -> Few:
    """Kept queries and what they attended to: gathered, or computed again from x."""
    plan, _, X, _, P, rotary = back
    samples, heads = plan.samples, plan.heads
    some = mask_rows(mask, slots.token, samples.tokens, plan.how)
    q, k, v, out, logsumexp, dropped = saved
    if plan.products:
        attended = attended_rows(Attended(out, logsumexp, dropped), slots)
        return Few(slots.gather(q), k, v, attended, some)
    before, weights, _ = _split(plan, P)
    normed = plan.before.forward(X, before, Tape(False), True)
    k, v = (
        F.linear(normed, *pair).view(*samples[1:3], heads.keys, -1).transpose(1, 2)
        for pair in weights[1:]
    )
    q = slots.split(F.linear(normed.index_select(0, slots.source), *weights[0]), heads.queries)
    if rotary is not None:
        q, k = _turned(q, _at_slots(rotary, slots, samples)), _turned(k, rotary)
    how = plan.how._replace(is_causal=False)  # it is in the mask's rows
    return Few(q, k, v, attend(q, k, v, some, how, dropped_rows(dropped, slots)), some)


def _through_all(
    back: Back, dq: Tensor, dk: Tensor, dv: Tensor, wants: Wants
) -> tuple[Tensor | None, Grads, Products]:
    """Through the projections and the norm, with all rows of k and v."""
    plan, G, X, kept, P, _ = back
    before, ((Wq, _), (Wk, _), (Wv, _)), _ = _split(plan, P)
    normed, pull = plan.before.again(X, before, KeptTape(True, iter(())), True)
    assert normed is not None
    few = normed.index_select(0, kept)
    products = ((dq, few), (dk, normed), (dv, normed))
    if not any(wants):
        return None, (None,) * (len(wants) - 1), products
    dn = torch.addmm(dk @ Wk, dv, Wv).index_add_(0, kept, dq @ Wq)
    dX, before_grads = pull(dn, wants)
    return (dX + G if dX is not None and plan.residual else dX), before_grads, products


def _through_drawn(
    back: Back, dq: Tensor, dk: Tensor, dv: Tensor, wants: Wants
) -> tuple[Tensor | None, Grads, Products]:
    """The same with a draw of the rows of k and v: the norm too runs on kept rows alone."""
    plan, G, X, kept, P, _ = back
    before, ((Wq, _), (Wk, _), (Wv, _)), _ = _split(plan, P)
    norms = torch.hypot(row_norms(dk), row_norms(dv))
    place, scale = draw_batch(norms, plan.keys, plan.uniforms, plan.samples)
    dk, dv = keep(dk, place, scale).values, keep(dv, place, scale).values
    rows = torch.cat([kept, place])
    normed, pull = plan.before.again(
        X.index_select(0, rows), before, KeptTape(True, iter(())), True
    )
    assert normed is not None
    few, some = torch.split(normed, [kept.shape[0], place.shape[0]])
    products = ((dq, few), (dk, some), (dv, some))
    if not any(wants):
        return None, (None,) * (len(wants) - 1), products
    parts = [dq @ Wq, torch.addmm(dk @ Wk, dv, Wv)]
    dX = G.clone() if plan.residual else torch.zeros_like(X)
    if not plan.before.steps:  # nothing to pull through: two sums spare a copy of the parts
        for place_of, part in zip((kept, place), parts, strict=True):
            dX.index_add_(0, place_of, part.to(dX.dtype))
        return dX, (), products
    through, before_grads = pull(torch.cat(parts), wants)
    if through is None:
        return None, before_grads, products
    return dX.index_add_(0, rows, through.to(dX.dtype)), before_grads, products


def _weight_grads(plan: Plan, products: Products, wants: Wants) -> Grads:
    """dW = dYᵀX and db = 1ᵀdY of the three projections; one above the other if they are packed."""
    packed = plan.heads.packed
    weights: list[Tensor | None] = []
    biases: list[Tensor | None] = []
    for i, (d, normed) in enumerate(products):
        place = 0 if packed else 2 * i
        weights.append(d.mT @ normed if wants[place] else None)
        biases.append(d.sum(0) if wants[place + 1] else None)
    if not packed:
        return tuple(g for pair in zip(weights, biases, strict=True) for g in pair)
    return _stacked(weights), _stacked(biases)


def _stacked(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def _split(plan: Plan, P: Parameters) -> tuple[Parameters, Weights, Parameters]:
    """Parameters before, weights and biases of q, k and v, parameters behind."""
    first, last = plan.before.count, len(P) - plan.after.count
    middle = P[first:last]
    if not plan.heads.packed:
        Wq, bq, Wk, bk, Wv, bv = middle
        return P[:first], ((Wq, bq), (Wk, bk), (Wv, bv)), P[last:]  # type: ignore[return-value]
    W, b = middle
    assert W is not None
    sizes = _sizes(plan.heads, W.shape[0])
    biases = (None,) * 3 if b is None else torch.split(b, sizes)
    pairs = tuple(zip(torch.split(W, sizes), biases, strict=True))
    return P[:first], pairs, P[last:]  # type: ignore[return-value]


def _sizes(heads: Heads, rows: int) -> list[int]:
    one = rows // (heads.queries + 2 * heads.keys)
    return [heads.queries * one, heads.keys * one, heads.keys * one]


def _turned(q: Tensor, rotary: Rotary) -> Tensor:
    """Each pair of the two halves of ``q: [N, H, T, d]`` rotated: q cos + (-q₂, q₁) sin."""
    cos, sin = (t.unsqueeze(-3).to(q.dtype) for t in rotary)
    first, second = q.chunk(2, -1)
    return q * cos + torch.cat([-second, first], -1) * sin


def _turned_back(g: Tensor, rotary: Rotary) -> Tensor:
    """The vjp of ``_turned``: g cos + (h₂, -h₁), h = g sin."""
    cos, sin = (t.unsqueeze(-3).to(g.dtype) for t in rotary)
    first, second = (g * sin).chunk(2, -1)
    return g * cos + torch.cat([second, -first], -1)


def _at_slots(rotary: Rotary, slots: Slots, samples: Samples) -> Rotary:
    cos, sin = (
        t.expand(samples.samples, *t.shape[-2:]).flatten(0, 1).index_select(0, slots.source)
        for t in rotary
    )
    shape = (*slots.token.shape, -1)
    return cos.view(shape), sin.view(shape)


def _project(
    normed: Tensor, P: Parameters, plan: Plan, rotary: Rotary | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v: ``[N, heads, T, ·]`` each; one product where they are packed."""
    middle = P[plan.before.count : len(P) - plan.after.count]
    heads = plan.heads
    if heads.packed:
        W, b = middle
        assert W is not None
        parts = torch.split(F.linear(normed, W, b), _sizes(heads, W.shape[0]), -1)
    else:
        parts = tuple(F.linear(normed, middle[i], middle[i + 1]) for i in (0, 2, 4))  # type: ignore[arg-type]
    counts = (heads.queries, heads.keys, heads.keys)
    shape = normed.shape[:2]
    q, k, v = (t.view(*shape, h, -1).transpose(1, 2) for t, h in zip(parts, counts, strict=True))
    return (q, k, v) if rotary is None else (_turned(q, rotary), _turned(k, rotary), v)


def _check_projections(flat: Parameters, heads: Heads) -> None:
    total = heads.queries + 2 * heads.keys
    W = flat[0]
    assert W is not None
    rows = [W.shape[0]] if heads.packed else [flat[i].shape[0] for i in (0, 2, 4)]  # type: ignore[union-attr]
    fits = (
        rows[0] % total == 0
        if heads.packed
        else (
            rows[0] % heads.queries == 0 and rows[1] % heads.keys == 0 and rows[2] % heads.keys == 0
        )
    )
    if not fits or heads.queries % heads.keys:
        raise ValueError(
            f"heads={heads.queries}, kv_heads={heads.keys} do not divide projections of {rows} "
            "outputs; give the numbers of heads that the weights were made for"
        )
