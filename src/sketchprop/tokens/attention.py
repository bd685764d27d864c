"""Attention whose backward runs on kept queries: alone, and with all of its part of a block.

``SelfAttention`` is a norm, projections to q, k, v, attention, the output projection and what
follows it up to the residual. On the kept tokens run the output projection, attention and the
projection to q. The rows of K and V all have a gradient, and a draw of their own (``keys``), on
which their two projections run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.checks import check_budget
from ..core.sampling import Uniforms, draw_uniforms
from ..ops.attend import (
    Attended,
    Attending,
    Heads,
    Rotary,
    attend,
    attend_back,
    check_heads,
    check_mask,
    rotated,
    rotated_back,
    with_four_axes,
)
from ..ops.backward import as_autocast
from .draw import KeptRows, QueryCount, draw_rows, keep, keep_queries, row_norms
from .function import Tree, Walk, any_of, nothing_like, run, wanted
from .rowwise import NOTHING, Chain, Parameters, as_rows, rows_of, with_residual


class Slots(NamedTuple):
    """Places for kept queries, ``capacity`` of each sample: shapes that no draw changes.

    ``rows[R]`` are the kept rows, ascending; ``slot[R]`` says where each goes in the slots of its
    sample, ``None``: they fill all slots in order. A slot that stays empty holds the first token
    of its sample, with no gradient: ``source[N · capacity]`` are the rows in all slots, and
    ``token[N, capacity]`` their places in the sample.
    """

    rows: Tensor
    source: Tensor
    token: Tensor
    slot: Tensor | None

    @classmethod
    def of(cls, rows: Tensor, capacity: int, N: int, T: int) -> Slots:
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
        """``[R, H·d]`` as ``[N, H, capacity, d]``, zero in slots that stay empty."""
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

    def at(self, x: Tensor) -> Tensor:
        """The same of ``x: [N, ·, T, ·]`` whose tokens lie inside its heads."""
        place = self.token[:, None, :, None]
        return x.gather(2, place.expand(-1, x.shape[1], -1, x.shape[-1]))

    def attended(self, attended: Attended) -> Attended:
        """What was attended, for the kept queries alone."""
        out, logsumexp, dropout = attended
        if logsumexp is not None:
            logsumexp = self.at(logsumexp.unsqueeze(-1)).squeeze(-1)
        return Attended(self.gather(out), logsumexp, None if dropout is None else self.at(dropout))

    def mask(self, mask: Tensor | None, keys: int, is_causal: bool) -> Tensor | None:
        """The rows of the mask that the kept queries look at: ``[N, ·, capacity, keys]``."""
        if is_causal:
            last = self.token[:, None, :, None]
            return last >= torch.arange(keys, device=last.device)
        if mask is None:
            return None
        mask = with_four_axes(mask)
        N, capacity = self.token.shape
        if mask.shape[-2] == 1:
            return mask.expand(-1, -1, capacity, -1)
        return self.at(mask.expand(N, -1, -1, -1))

    def rotary(self, rotary: Rotary) -> Rotary:
        """Cosines and sines of the kept queries."""
        N = self.token.shape[0]
        cos, sin = (self.at(t.expand(N, -1, -1).unsqueeze(1)).squeeze(1) for t in rotary)
        return cos, sin


def token_rows(x: Tensor) -> Tensor:
    """``[N, H, T, d]`` as rows ``[N·T, H·d]``: a view where tokens lie outside heads."""
    N, H, T, d = x.shape
    return x.transpose(1, 2).reshape(N * T, H * d)


class HeadInputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None


class Attention(NamedTuple):
    """Attention by itself, as a part."""

    how: Attending
    queries: QueryCount

    def forward(self, inputs: HeadInputs) -> tuple[Tensor, Attended]:
        attended = attend(*inputs, self.how)
        return attended.out, attended

    def backward(self, walk: Walk) -> HeadInputs:
        q, k, v, mask = walk.inputs
        N, H, T, _ = q.shape
        kept = keep_queries(token_rows(walk.grad), N, self.queries, walk.uniforms)
        slots = Slots.of(kept.rows, self.queries.capacity, N, T)
        dq, dk, dv = attend_back(
            slots.put(kept.values, H),
            (slots.gather(q), k, v),
            slots.attended(walk.saved),
            slots.mask(mask, k.shape[-2], self.how.is_causal),
            self.how,
        )
        dQ = torch.zeros(N * T, H * q.shape[-1], dtype=dq.dtype, device=dq.device)
        dQ.index_copy_(0, kept.rows, slots.take(dq))
        return HeadInputs(dQ.view(N, T, H, -1).transpose(1, 2), dk, dv, None)


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
    tokens are drawn over the batch, p_t ∝ ‖g_t‖ over all heads together. A sample gets at most
    ``capacity`` times the even share. dQ has only their rows; dK and dV are dense and come from
    those queries times 1/p. The means are the exact gradients. If no more tokens have a gradient
    than are drawn (padding, or a draw in a later layer), all of them are kept.
    Cost of backward: ``queries · capacity`` times that of attention. The other arguments are those
    of torch's function. A mask that requires a gradient makes this the exact function.
    ``uniforms``: where the random numbers come from, torch's default generator.

    >>> q, k, v = (torch.randn(2, 4, 10, 8, requires_grad=True) for _ in range(3))
    >>> kept_attention(q, k, v, queries=0.3).sum().backward()
    >>> int((q.grad.abs().sum((1, 3)) > 0).sum())  # kept queries of 20
    6
    """
    how = Attending(dropout_p, is_causal, scale)
    check_heads(q, k, v, enable_gqa)
    check_mask(attn_mask, (*q.shape[:-1], k.shape[-2]), how)
    N, _, T, _ = q.shape
    count = QueryCount.of(check_budget(queries), capacity, N, T)
    learned = attn_mask is not None and attn_mask.requires_grad
    exact = learned or count.rank >= N * T or not q.numel() or q.is_meta
    if exact or not wanted((q, k, v)):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    # Autocast itself casts for torch's own function alone.
    q, k, v = (as_autocast(t, q.device.type) for t in (q, k, v))
    return run(Attention(how, count), HeadInputs(q, k, v, attn_mask), uniforms)


class AttentionTensors(NamedTuple):
    """Those of a ``SelfAttention`` beside its input."""

    mask: Tensor | None
    rotary: Rotary | None
    before: Parameters
    projections: tuple[Parameters, ...]
    after: Parameters


class Made(NamedTuple):
    """What the forward pass made: q, k, v and what was attended, of which without ``save`` only
    the mask of dropout is there; and of the projections masks alone."""

    heads: Heads | None
    attended: Attended
    projections: Tree
    after: Tree


class SelfAttention(NamedTuple):
    """x + after(attention(q, k, v of before(x))) for ``x: [N, T, d]``.

    ``projections``: one linear map that makes q, k and v, packed, or three row-wise ones.
    ``heads``, ``kv_heads``: their numbers. ``keys``: rows kept for k and v, p from the norms of
    their own gradients. ``save``: whether q, k, v and the result are kept, or computed again.
    Cost of backward: the share of queries of after and q, ``capacity`` times that of attention, the
    share of keys of k and v.
    """

    before: Chain
    projections: tuple[Chain, ...]
    after: Chain
    heads: int
    kv_heads: int
    how: Attending
    queries: QueryCount
    keys: int
    save: bool
    samples: int
    tokens: int

    def forward(self, x: Tensor, tensors: AttentionTensors) -> tuple[Tensor, Made]:
        normed, _ = self.before.forward(x, tensors.before, False)
        pairs = zip(self.projections, tensors.projections, strict=True)
        made = [chain.forward(normed, P, False) for chain, P in pairs]
        products = [product for product, _ in made]
        self._check_heads([t.shape[-1] for t in products])
        if len(products) == 1:
            products = list(torch.split(products[0], self._sizes(products[0].shape[-1]), -1))
        heads = self._heads(products, tensors.rotary, tensors.rotary)
        attended = attend(*heads, tensors.mask, self.how)
        merged = attended.out.transpose(1, 2).flatten(2)
        y, saved = self.after.forward(merged, tensors.after, self.save)
        all_saved = Made(heads, attended, tuple(own for _, own in made), saved)
        if not self.save:
            all_saved = all_saved._replace(
                heads=None, attended=attended._replace(out=None, logsumexp=None)
            )
        return with_residual(x, y, self.after), all_saved

    def draw(self, G: Tensor, uniforms: Uniforms) -> KeptRows:
        return keep_queries(G, self.samples, self.queries, uniforms)

    def back(self, kept: KeptRows, dX: Tensor, walk: Walk) -> tuple[Tensor, AttentionTensors]:
        """The gradients of x and of the tensors, from that of the result at the kept queries.

        ``dX[B, d]``: the residual's, to which that of x is added in place. ``walk``: the block's.
        """
        X, made = as_rows(walk.inputs.x), walk.saved.attention
        tensors, wants = walk.inputs.attention, walk.wants.attention
        below = walk.wants.x or any_of(wants.before)
        slots = Slots.of(kept.rows, self.queries.capacity, self.samples, self.tokens)
        heads, attended, mask = self._at_slots(slots, X, tensors, made)
        dO, after = self.after.back(
            kept.values, slots.take(attended.out), tensors.after,
            rows_of(made.after, kept.rows), below or any_of(wants.projections), wants.after,
        )  # fmt: skip
        grads: AttentionTensors = nothing_like(tensors)._replace(after=after)
        if dO is None:
            return dX, grads
        dO = slots.put(dO.to(heads[0].dtype), self.heads)
        dq, dk, dv = attend_back(dO, heads, attended, mask, self.how)
        if tensors.rotary is not None:
            dq = rotated_back(dq, slots.rotary(tensors.rotary))
            dk = rotated_back(dk, tensors.rotary)
        keys, dk, dv = self._draw_keys(token_rows(dk), token_rows(dv), walk.uniforms)
        rows = torch.cat([kept.rows, keys])
        normed, pull = self.before.again(X.index_select(0, rows), tensors.before, (), True)
        at_queries, at_keys = torch.split(normed, [kept.rows.shape[0], keys.shape[0]])
        given = zip(
            self._maps(tensors, made.projections),
            self._each(wants.projections),
            ((kept.rows, at_queries, slots.take(dq)), (keys, at_keys, dk), (keys, at_keys, dv)),
            strict=True,
        )
        through, own_grads = [], []
        for (chain, P, masks), flags, (index, x, g) in given:
            part, own = chain.back(g, x, P, rows_of(masks, index), below, flags)
            through.append(part)
            own_grads.append(own)
        grads = grads._replace(projections=self._joined(own_grads))
        if below:
            dN = torch.cat([through[0], through[1].add_(through[2])])
            part, before = pull(dN, walk.wants.x, wants.before)
            grads = grads._replace(before=before)
            if part is not None:
                dX.index_add_(0, rows, part.to(dX.dtype))
        return dX, grads

    def _draw_keys(
        self, dk: Tensor, dv: Tensor, uniforms: Uniforms
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The kept rows of k and v, and their gradients there."""
        if self.keys >= dk.shape[0]:
            return torch.arange(dk.shape[0], device=dk.device), dk, dv
        norms = torch.hypot(row_norms(dk), row_norms(dv))
        draw = draw_rows(norms, self.keys, uniforms)
        return draw.rows, keep(dk, draw).values, keep(dv, draw).values

    def _at_slots(
        self, slots: Slots, X: Tensor, tensors: AttentionTensors, made: Made
    ) -> tuple[Heads, Attended, Tensor | None]:
        """Kept queries, all keys and values, what was attended and the mask: gathered, or computed
        again from x."""
        mask = slots.mask(tensors.mask, self.tokens, self.how.is_causal)
        if made.heads is not None:
            q, k, v = made.heads
            return (slots.gather(q), k, v), slots.attended(made.attended), mask
        normed, _ = self.before.forward(X, tensors.before, False)
        products = []
        maps = self._maps(tensors, made.projections)
        for (chain, P, masks), rows in zip(maps, (slots.source, None, None), strict=True):
            x = normed if rows is None else normed.index_select(0, rows)
            y, _ = chain.again(x, P, rows_of(masks, rows), True)
            products.append(y.view(self.samples, -1, y.shape[-1]))
        rotary = tensors.rotary
        heads = self._heads(products, rotary and slots.rotary(rotary), rotary)
        mask_of_dropout = made.attended.dropout
        dropout = None if mask_of_dropout is None else slots.at(mask_of_dropout)
        how = self.how._replace(is_causal=False)  # it is in the mask's rows
        return heads, attend(*heads, mask, how, dropout), mask

    def _heads(
        self, products: list[Tensor], of_queries: Rotary | None, of_keys: Rotary | None
    ) -> Heads:
        """q, k and v of ``[N, tokens, ·]``, rotated: ``[N, heads, tokens, size]`` each."""
        numbers = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = (
            t.view(*t.shape[:-1], heads, -1).transpose(1, 2)
            for t, heads in zip(products, numbers, strict=True)
        )
        if of_queries is None or of_keys is None:
            return q, k, v
        return rotated(q, of_queries), rotated(k, of_keys), v

    def _check_heads(self, sizes: list[int]) -> None:
        numbers = (self.heads, self.kv_heads, self.kv_heads)
        wanted = [sum(numbers)] if len(sizes) == 1 else numbers
        if self.heads % self.kv_heads or any(n % h for n, h in zip(sizes, wanted, strict=True)):
            raise ValueError(
                f"heads={self.heads}, kv_heads={self.kv_heads} do not divide projections of "
                f"{sizes} outputs; give the numbers of heads that the weights were made for"
            )

    def _sizes(self, rows: int) -> list[int]:
        """Rows of a packed weight that make q, k and v."""
        size = rows // (self.heads + 2 * self.kv_heads)
        return [self.heads * size, self.kv_heads * size, self.kv_heads * size]

    def _maps(self, tensors: AttentionTensors, masks: Tree) -> list[tuple[Chain, Tree, Tree]]:
        """The maps to q, k and v, their parameters and their masks of dropout."""
        if len(self.projections) == 3:
            return list(zip(self.projections, tensors.projections, masks, strict=True))
        (((W, b),),) = tensors.projections
        sizes = self._sizes(W.shape[self._packed])
        biases = (None,) * 3 if b is None else torch.split(b, sizes)
        pairs = zip(torch.split(W, sizes, self._packed), biases, strict=True)
        return [(self.projections[0], (pair,), NOTHING) for pair in pairs]

    @property
    def _packed(self) -> int:
        """The axis along which a packed weight holds those of q, k and v."""
        return int(self.projections[0].steps[0].transposed)

    def _each(self, tree: Tree) -> Tree:
        """What belongs to the maps to q, k and v."""
        return tree if len(self.projections) == 3 else tree * 3

    def _joined(self, grads: list[Tree]) -> Tree:
        """Gradients of the projections; one above the other where these are packed."""
        if len(self.projections) == 3:
            return tuple(grads)
        weights, biases = zip(*(pair for (pair,) in grads), strict=True)
        weight = None if weights[0] is None else torch.cat(weights, self._packed)
        return (((weight, None if biases[0] is None else torch.cat(biases)),),)
