"""Which rows of a batch of tokens are kept: draws over the batch, over each sample, and among kept.

A row is a token of a sample; rows are numbered as they lie in memory, samples in turn. A draw that
is made can be *carried* from one part of a block to the one before it. Above, g is the gradient
of y = x + f(x) and S was drawn for f; below, the gradient of x is g + j, j = f's share, zero off S.
Then g_S/p_S + j_S has the mean g + j, and no second draw is made. ((g + j)_S/p_S has not.) What
travels is S and the correction g_S(1/p_S - 1), to be added to (g + j)_S: as the gradients of two
small tensors, so that autograd, compilers and checkpoints carry them as they carry any other.
"""

from __future__ import annotations

import math
import numbers
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.checks import check_budget, solve_dtype, wide_dtype
from ..core.compact import scaled
from ..core.probabilities import capped_fill, water_fill
from ..core.samples import Samples
from ..core.sampling import Uniforms, draw


class Kept(NamedTuple):
    """The kept ``rows[r]`` and the compact gradient ``values[r, n]`` at them, 1/p included."""

    rows: Tensor
    values: Tensor


class Carry(NamedTuple):
    """Two tensors whose gradients are a draw: ``correction[R, n]`` and, as floats, ``rows[R]``.

    ``attention_branch`` makes one, ``branch`` above it takes it. ``capacity``: most of one sample.
    """

    correction: Tensor
    rows: Tensor
    capacity: int


def empty_carry(rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors for a carry of ``rows``: without memory, their gradients are all that matters."""
    place = torch.zeros(1, dtype=wide_dtype(like), device=like.device)
    return like.new_zeros(1).expand(rows, like.shape[-1]), place.expand(rows)


def kept_count(budget: float | int, size: int) -> int:
    """How many of ``size`` a budget keeps: at least one, at most all."""
    value = check_budget(budget)
    if isinstance(value, numbers.Integral):
        return min(int(value), size)
    return min(size, max(1, round(value * size)))


def slot_count(capacity: float, count: int, tokens: int) -> int:
    """The most queries of one sample, where ``count`` is the even share."""
    if not capacity >= 1:
        raise ValueError(
            f"capacity={capacity!r} is below the even share; give 1.0 (the same number of queries "
            "in each sample) or more, for example 1.5"
        )
    return min(tokens, math.ceil(capacity * count))


def row_norms(G: Tensor) -> Tensor:
    """‖g_b‖ for each row, in float32 or better: O(Bn)."""
    norms: Tensor = torch.linalg.vector_norm(G, dim=-1, dtype=solve_dtype(G))
    return norms


Drawn = tuple[Tensor, Tensor]
"""Rows, and 1/p of each."""


def draw_batch(norms: Tensor, rank: int, uniforms: Uniforms, samples: Samples) -> Drawn:
    """``rank`` of all rows, p ∝ ``norms[B]``: their index and 1/p. O(B log B)."""
    p = water_fill(samples.by_sample(norms).flatten(), rank)
    index, scale = draw(p, rank, uniforms=uniforms)
    return _rows(samples, index), scale


def draw_queries(
    norms: Tensor, rank: int, capacity: int, uniforms: Uniforms, samples: Samples
) -> Drawn:
    """``rank`` of all rows, at most ``capacity`` of a sample, p ∝ ``norms[B]``: ascending.

    Where rank = samples · capacity each sample draws for itself; else one draw runs through the
    batch, and samples that matter more get more queries. O(B log B), shapes are static.
    """
    parts = samples.by_sample(norms)
    if rank < samples.samples * capacity:
        rows, scale = draw(capped_fill(parts, rank, capacity).flatten(), rank, uniforms=uniforms)
        return _rows(samples, rows), scale
    index, scale = draw(water_fill(parts, capacity), capacity, uniforms=uniforms)
    first = torch.arange(samples.samples, device=norms.device).unsqueeze(-1) * samples.tokens
    return _rows(samples, (index + first).flatten()), scale.flatten()


def _rows(samples: Samples, index: Tensor) -> Tensor:
    """The rows at places in sample-major order."""
    units = samples.units(False, index.device)
    return index if units is None else units[index].flatten()


def keep(G: Tensor, index: Tensor, scale: Tensor) -> Kept:
    """The rows ``index`` of G, each divided by its p."""
    few, scale = G.index_select(0, index), scale.unsqueeze(-1)
    narrow = solve_dtype(G) != G.dtype  # then 1/p itself may not fit
    return Kept(index, scaled(few, scale) if narrow else few.mul_(scale.to(G.dtype)))


def keep_among(kept: Kept, rank: int, uniforms: Uniforms) -> Kept:
    """``rank`` of the kept rows, drawn once more, p ∝ the norms of what they hold now."""
    if rank >= kept.rows.shape[0]:
        return kept
    p = water_fill(row_norms(kept.values), rank)
    place, scale = draw(p, rank, uniforms=uniforms)
    values = scaled(kept.values.index_select(0, place), scale.unsqueeze(-1))
    return Kept(kept.rows.index_select(0, place), values)
