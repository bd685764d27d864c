"""Attention whose backward runs on kept queries."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.samples import Samples
from ..core.sampling import Uniforms, draw_uniforms
from .attend import Attended, Attending, attend, attend_back, check_mask, mask_rows
from .backward import as_autocast
from .branch import returned
from .kept import draw_queries, keep, kept_count, row_norms, slot_count
from .passes import asked, one_source


def kept_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    queries: float | int = 0.4,
    capacity: float = 1.25,
    uniforms: Uniforms = draw_uniforms,
) -> Tensor:
    """``F.scaled_dot_product_attention``, with a backward that runs on ``queries`` of the tokens.

    ``q: [N, H, T, d]``, ``k, v: [N, H, S, d]``, fewer heads with ``enable_gqa``. In backward
    tokens are drawn over the batch, p_t ∝ ‖g_t‖ over all heads together, at most ``capacity``
    times the even share of a sample; dQ has only their rows, dK and dV are dense, from those
    queries times 1/p: the means are the exact gradients. ``capacity=1.0``: the same number in each
    sample, a little faster and noisier, because samples differ more than their tokens do.
    Where no more tokens have a gradient than are drawn (because the layer behind drew them, or
    the others are padding) they are all kept with p = 1 and nothing is added.
    Cost of backward: ``queries · capacity`` times that of attention. ``attn_mask``, ``dropout_p``,
    ``is_causal``, ``scale`` and ``enable_gqa`` are those of torch's function; a mask that wants a
    gradient itself makes this the exact one. ``uniforms``: where the draw's random numbers come
    from, torch's default generator.

    >>> q, k, v = (torch.randn(2, 4, 10, 8, requires_grad=True) for _ in range(3))
    >>> kept_attention(q, k, v, queries=0.3).sum().backward()
    >>> int((q.grad.abs().sum((1, 3)) > 0).sum())  # kept queries of 20
    6
    """
    how = Attending(dropout_p, is_causal, scale)
    check_heads(q, k, v, enable_gqa)
    check_mask(attn_mask, (*q.shape[:-1], k.shape[-2]), how)
    count = kept_count(queries, max(1, q.shape[-2]))
    slots = slot_count(capacity, count, q.shape[-2])
    wanted = q.requires_grad or k.requires_grad or v.requires_grad
    own = attn_mask is not None and attn_mask.requires_grad
    exact = own or count >= q.shape[-2] or not q.numel() or q.is_meta
    if exact or not wanted or not torch.is_grad_enabled():
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    # Autocast itself casts for torch's own function alone.
    q, k, v = (as_autocast(t, q.device.type) for t in (q, k, v))
    size = (q.shape[0] * count, slots)
    return _KeptAttention.apply(q, k, v, attn_mask, how, size, uniforms)  # type: ignore[no-any-return, no-untyped-call]


def check_heads(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> None:
    """Shapes that attention takes, or an error that says which."""
    if q.is_nested or k.is_nested or v.is_nested:
        raise TypeError(
            "nested tensors have no rows to draw; pad them, and give attn_mask for the padding"
        )
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"q, k, v have shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; give "
            "[samples, heads, tokens, head size], with heads of size 1 by q.unsqueeze(1)"
        )
    H, few = q.shape[1], k.shape[1]
    fits = few == v.shape[1] and (few == H or (grouped and few and H % few == 0))
    if not fits:
        raise ValueError(
            f"{H} query heads do not fit {few} key and {v.shape[1]} value heads; give equal "
            "numbers, or with enable_gqa=True a multiple of those of k and v"
        )


class _KeptAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        how: Attending,
        count: tuple[int, int],
        uniforms: Uniforms,
    ) -> Tensor:
        attended = attend(q, k, v, mask, how)
        ctx.how, ctx.count, ctx.uniforms = how, count, uniforms
        ctx.tensors = (True, True, True, mask is not None, False, False, False)
        ctx.save_for_backward(q, k, v, mask, *attended)
        return attended.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, *rest = ctx.saved_tensors
        with torch.no_grad():
            N, _, T, _ = q.shape
            G = token_rows(grad)
            samples = Samples(1, N, T)
            rank, capacity = ctx.count
            uniforms = one_source(ctx, grad, asked(ctx, ctx.tensors), ctx.uniforms)
            rows, scale = draw_queries(row_norms(G), rank, capacity, uniforms, samples)
            slots = Slots.of(rows, capacity, samples)
            g = keep(G, rows, scale).values
            few = attended_rows(Attended(*rest), slots)
            some = mask_rows(mask, slots.token, k.shape[-2], ctx.how)
            heads = q.shape[1]
            dq, dk, dv = attend_back(
                slots.put(g, heads), slots.gather(q), k, v, few, some, ctx.how
            )  # fmt: skip
            dQ = torch.zeros(N * T, heads * q.shape[-1], dtype=dq.dtype, device=dq.device)
            dQ.index_copy_(0, rows, slots.take(dq))
            dQ = dQ.view(N, T, heads, -1).transpose(1, 2)
        return returned((dQ, dk, dv, None, None, None, None), grad, q, k, v)


class Slots(NamedTuple):
    """Places for kept queries, ``capacity`` of each sample: shapes that no draw changes.

    ``rows[R]`` are the kept rows, ascending; ``slot[R]`` says where each goes in the slots of its
    sample, ``None``: they fill all slots in order. A slot that is left over holds the first token
    of its sample, with no gradient: ``source[N · capacity]`` are the rows in all slots, and
    ``token[N, capacity]`` their places in the sample.
    """

    rows: Tensor
    source: Tensor
    token: Tensor
    slot: Tensor | None

    @classmethod
    def of(cls, rows: Tensor, capacity: int, samples: Samples) -> Slots:
        N, T = samples.samples, samples.tokens
        if rows.shape[0] == N * capacity:
            return cls(rows, rows, rows.view(N, capacity) % T, None)
        starts = torch.arange(0, N * T, T, device=rows.device)
        sample = rows // T
        first = torch.searchsorted(rows, starts).index_select(0, sample)
        place = torch.arange(rows.shape[0], device=rows.device) - first
        # The clamp only matters for NaN probabilities: they must not index out of range.
        slot = sample * capacity + place.clamp(max=capacity - 1)
        source = starts.repeat_interleave(capacity, output_size=N * capacity)
        source = source.index_copy_(0, slot, rows)
        return cls(rows, source, source.view(N, capacity) % T, slot)

    def gather(self, x: Tensor) -> Tensor:
        """The slots of ``x: [N, H, T, d]``: ``[N, H, capacity, d]``."""
        return self.split(token_rows(x).index_select(0, self.source), x.shape[1])

    def put(self, values: Tensor, heads: int) -> Tensor:
        """``[R, H·d]`` as ``[N, H, capacity, d]``, zero in slots that are left over."""
        if self.slot is not None:
            zeros = values.new_zeros(self.source.shape[0], values.shape[-1])
            values = zeros.index_copy_(0, self.slot, values)
        return self.split(values, heads)

    def take(self, values: Tensor) -> Tensor:
        """``[N, H, capacity, d]`` as ``[R, H·d]``."""
        rows = token_rows(values)
        return rows if self.slot is None else rows.index_select(0, self.slot)

    def split(self, values: Tensor, heads: int) -> Tensor:
        """``[N · capacity, H·d]`` as ``[N, H, capacity, d]``."""
        return values.view(*self.token.shape, heads, -1).transpose(1, 2)


def token_rows(x: Tensor) -> Tensor:
    """``[N, H, T, d]`` as rows ``[N·T, H·d]``: a view where tokens lie outside heads."""
    N, H, T, d = x.shape
    return x.transpose(1, 2).reshape(N * T, H * d)


def attended_rows(attended: Attended, slots: Slots) -> Attended:
    """What was attended, for the kept queries alone."""
    out, logsumexp, dropped = attended
    if logsumexp is not None:
        logsumexp = slots.gather(logsumexp.unsqueeze(-1)).squeeze(-1)
    return Attended(slots.gather(out), logsumexp, dropped_rows(dropped, slots))


def dropped_rows(dropped: Tensor | None, slots: Slots) -> Tensor | None:
    """The kept queries' rows of a mask ``[N, H, T, S]``."""
    if dropped is None:
        return None
    place = slots.token[:, None, :, None]
    return dropped.gather(2, place.expand(-1, dropped.shape[1], -1, dropped.shape[-1]))
