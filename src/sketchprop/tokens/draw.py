"""Which rows of a batch of tokens are kept: draws over the batch, over each sample, and among kept.

A row is a token of a sample; rows are numbered as they lie in memory, samples in turn. A draw that
is made can be *carried* from one part of a block to the one before it. Above, g is the gradient
of y = x + f(x) and S was drawn for f; below, the gradient of x is g + j, j = f's share, zero off S.
Then g_S/p_S + j_S has the mean g + j, and no second draw is made. ((g + j)_S/p_S has not.) Both
parts of a block are one Function, so that S and the sum never leave it. Through a norm between the
parts the sum travels by the norm's vjp, which is linear and takes each row by itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.compact import scaled
from ..core.probabilities import capped_fill, solve_dtype, water_fill
from ..core.sampling import Uniforms, draw


class Draw(NamedTuple):
    """The drawn ``rows[r]`` and ``scale[r]``, 1/p of each."""

    rows: Tensor
    scale: Tensor

    @classmethod
    def of(cls, p: Tensor, rank: int, norms: Tensor, uniforms: Uniforms) -> Draw:
        """From probabilities; 1/p as wide as the norms are."""
        rows, scale = draw(p, rank, uniforms=uniforms)
        return cls(rows, scale.to(norms.dtype))


class KeptRows(NamedTuple):
    """The kept ``rows[r]`` and the compact gradient ``values[r, n]`` at them, 1/p included."""

    rows: Tensor
    values: Tensor


def kept_count(budget: float | int, size: int) -> int:
    """How many of ``size`` a budget keeps: at least one, at most all."""
    count = budget if isinstance(budget, int) else max(1, round(budget * size))
    return min(count, size)


def row_norms(G: Tensor) -> Tensor:
    """‖g_b‖ for each row, in float32 or better: O(Bn)."""
    norms: Tensor = torch.linalg.vector_norm(G, dim=-1, dtype=solve_dtype(G))
    return norms


def draw_rows(norms: Tensor, rank: int, uniforms: Uniforms) -> Draw:
    """``rank`` of all rows, p ∝ ``norms[B]``: ascending. O(B log B)."""
    return Draw.of(water_fill(norms, rank), rank, norms, uniforms)


def draw_queries(norms: Tensor, rank: int, capacity: int, uniforms: Uniforms) -> Draw:
    """``rank`` of all rows, at most ``capacity`` of a sample, p ∝ ``norms[N, T]``: ascending.

    Where rank = N · capacity each sample draws for itself; else one draw runs through the batch,
    and samples that matter more get more queries. O(B log B), shapes are static.
    """
    N, T = norms.shape
    if rank < N * capacity:
        return Draw.of(capped_fill(norms, rank, capacity).flatten(), rank, norms, uniforms)
    index, scale = Draw.of(water_fill(norms, capacity), capacity, norms, uniforms)
    first = torch.arange(0, N * T, T, device=norms.device).unsqueeze(-1)
    return Draw((index + first).flatten(), scale.flatten())


def keep(G: Tensor, draw: Draw) -> KeptRows:
    """The drawn rows of G, each divided by its p."""
    values, scale = G.index_select(0, draw.rows), draw.scale.unsqueeze(-1)
    narrow = solve_dtype(G) != G.dtype  # then 1/p itself may not fit
    return KeptRows(draw.rows, scaled(values, scale) if narrow else values.mul_(scale.to(G.dtype)))


class QueryCount(NamedTuple):
    """How many queries are kept: in the batch, and at most of one sample."""

    rank: int
    capacity: int

    @classmethod
    def of(cls, queries: float | int, capacity: float, samples: int, tokens: int) -> QueryCount:
        if not capacity >= 1:
            raise ValueError(
                f"capacity={capacity!r} is below the even share; give 1.0 (the same number of "
                "queries in each sample) or more, for example 1.5"
            )
        count = kept_count(queries, max(1, tokens))
        return cls(samples * count, min(tokens, math.ceil(capacity * count)))


def keep_queries(G: Tensor, samples: int, count: QueryCount, uniforms: Uniforms) -> KeptRows:
    """Rows for attention, p ∝ ‖g_b‖; all of them where ``count`` says so."""
    if count.rank >= G.shape[0]:
        return KeptRows(torch.arange(G.shape[0], device=G.device), G)
    return keep(G, draw_queries(row_norms(G).view(samples, -1), *count, uniforms))


class Among(NamedTuple):
    """Rows drawn among kept ones, and their ``places`` there; ``None``: all, in order."""

    kept: KeptRows
    places: Tensor | None

    def add(self, queries: KeptRows, values: Tensor) -> KeptRows:
        """``queries`` with ``values`` added at the rows drawn among them: g_S/p_S + j_S."""
        values = values.to(queries.values.dtype)
        if self.places is None:
            return KeptRows(queries.rows, queries.values + values)
        return KeptRows(queries.rows, queries.values.index_add(0, self.places, values))


def draw_among(queries: KeptRows, rank: int, uniforms: Uniforms) -> Among:
    """``rank`` of the kept rows, drawn once more, p ∝ the norms of what they hold now."""
    if rank >= queries.rows.shape[0]:
        return Among(queries, None)
    drawn = draw_rows(row_norms(queries.values), rank, uniforms)
    kept = keep(queries.values, drawn)
    return Among(KeptRows(queries.rows.index_select(0, drawn.rows), kept.values), drawn.rows)
