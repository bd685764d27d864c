"""Which rows of a batch of tokens are kept: draws over the batch, over each sample, and among kept.

A row is a token of a sample; rows are numbered as they lie in memory, samples in turn. A draw that
is made can be *carried* from one part of a block to the one before it. Above, g is the gradient
of y = x + f(x) and S was drawn for f; below, the gradient of x is g + j, j = f's share, zero off S.
Then g_S/p_S + j_S has the mean g + j, and no second draw is made. ((g + j)_S/p_S has not.) Both
parts of a block are one Function, so that S and the sum never leave it. Through a norm between the
parts the sum travels by the norm's vjp, which is linear and takes each row by itself.
"""

from __future__ import annotations

import numbers
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.checks import check_budget, solve_dtype
from ..core.compact import scaled
from ..core.probabilities import capped_fill, water_fill
from ..core.samples import Samples
from ..core.sampling import Uniforms, draw


class Draw(NamedTuple):
    """The drawn ``rows[r]`` and ``scale[r]``, 1/p of each."""

    rows: Tensor
    scale: Tensor


class KeptRows(NamedTuple):
    """The kept ``rows[r]`` and the compact gradient ``values[r, n]`` at them, 1/p included."""

    rows: Tensor
    values: Tensor


def kept_count(budget: float | int, size: int) -> int:
    """How many of ``size`` a budget keeps: at least one, at most all."""
    value = check_budget(budget)
    if isinstance(value, numbers.Integral):
        return min(int(value), size)
    return min(size, max(1, round(value * size)))


def row_norms(G: Tensor) -> Tensor:
    """‖g_b‖ for each row, in float32 or better: O(Bn)."""
    norms: Tensor = torch.linalg.vector_norm(G, dim=-1, dtype=solve_dtype(G))
    return norms


def draw_rows(norms: Tensor, rank: int, uniforms: Uniforms, samples: Samples) -> Draw:
    """``rank`` of all rows, p ∝ ``norms[B]``. O(B log B)."""
    p = water_fill(samples.by_sample(norms).flatten(), rank)
    index, scale = draw(p, rank, uniforms=uniforms)
    return Draw(_in_memory(samples, index), scale)


def draw_queries(
    norms: Tensor, rank: int, capacity: int, uniforms: Uniforms, samples: Samples
) -> Draw:
    """``rank`` of all rows, at most ``capacity`` of a sample, p ∝ ``norms[B]``: ascending.

    Where rank = samples · capacity each sample draws for itself; else one draw runs through the
    batch, and samples that matter more get more queries. O(B log B), shapes are static.
    """
    parts = samples.by_sample(norms)
    if rank < samples.samples * capacity:
        index, scale = draw(capped_fill(parts, rank, capacity).flatten(), rank, uniforms=uniforms)
        return Draw(_in_memory(samples, index), scale)
    index, scale = draw(water_fill(parts, capacity), capacity, uniforms=uniforms)
    first = torch.arange(samples.samples, device=norms.device).unsqueeze(-1) * samples.tokens
    return Draw(_in_memory(samples, (index + first).flatten()), scale.flatten())


def _in_memory(samples: Samples, index: Tensor) -> Tensor:
    """The rows at places in sample-major order."""
    units = samples.units(False, index.device)
    return index if units is None else units[index].flatten()


def keep(G: Tensor, draw: Draw) -> KeptRows:
    """The drawn rows of G, each divided by its p."""
    values, scale = G.index_select(0, draw.rows), draw.scale.unsqueeze(-1)
    narrow = solve_dtype(G) != G.dtype  # then 1/p itself may not fit
    return KeptRows(draw.rows, scaled(values, scale) if narrow else values.mul_(scale.to(G.dtype)))


def keep_queries(
    G: Tensor, rank: int, capacity: int, uniforms: Uniforms, samples: Samples
) -> KeptRows:
    """Rows for attention, p ∝ ‖g_b‖; all of them where ``rank`` says so."""
    if rank >= G.shape[0]:
        return KeptRows(torch.arange(G.shape[0], device=G.device), G)
    return keep(G, draw_queries(row_norms(G), rank, capacity, uniforms, samples))


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
    places, scale = draw(water_fill(row_norms(queries.values), rank), rank, uniforms=uniforms)
    values = scaled(queries.values.index_select(0, places), scale.unsqueeze(-1))
    return Among(KeptRows(queries.rows.index_select(0, places), values), places)
