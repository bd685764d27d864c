"""Which rows of a batch of tokens are kept: draws over the batch, over each sample, and among kept.

A row is a token of a sample; rows are numbered as they lie in memory, samples in turn. A draw that
is made can be *carried* from one part of a block to the one before it. Above, g is the gradient
of y = x + f(x) and S was drawn for f; below, the gradient of x is g + j, j = f's share, zero off S.
Then g_S/p_S + j_S has the mean g + j, and no second draw is made. ((g + j)_S/p_S has not.) What
travels is S and the correction g_S(1/p_S - 1), to be added to (g + j)_S: as the gradients of two
small tensors, so that autograd, compilers and checkpoints carry them as they carry any other.
"""

from __future__ import annotations

import numbers
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.checks import check_budget, solve_dtype
from ..core.compact import scaled
from ..core.probabilities import water_fill
from ..core.samples import Samples
from ..core.sampling import Uniforms, draw


class Kept(NamedTuple):
    """The kept ``rows[r]`` and the compact gradient ``values[r, n]`` at them, 1/p included."""

    rows: Tensor
    values: Tensor


class Carry(NamedTuple):
    """Two tensors whose gradients are a draw: ``correction[R, n]`` and, in float64, ``rows[R]``.

    ``attention_branch`` makes one, ``branch`` above it takes it.
    """

    correction: Tensor
    rows: Tensor

    @classmethod
    def empty(cls, rows: int, like: Tensor) -> Carry:
        return cls(
            like.new_zeros(1).expand(rows, like.shape[-1]),
            torch.zeros(1, dtype=torch.float64, device=like.device).expand(rows),
        )


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


Drawn = tuple[Tensor, Tensor]
"""Rows, and 1/p of each."""


def draw_batch(norms: Tensor, rank: int, uniforms: Uniforms, samples: Samples) -> Drawn:
    """``rank`` of all rows, p ∝ ``norms[B]``: their index and 1/p. O(B log B)."""
    p = water_fill(samples.sample_major(norms), rank)
    index, scale = draw(p, rank, uniforms=uniforms)
    return samples.row_of(index), scale


def draw_each(norms: Tensor, rank: int, uniforms: Uniforms, samples: Samples) -> Drawn:
    """``rank`` rows of each sample, p ∝ ``norms[B]`` within it: ``[samples · rank]``."""
    parts = samples.sample_major(norms).view(samples.samples, samples.tokens)
    index, scale = draw(water_fill(parts, rank), rank, uniforms=uniforms)
    first = torch.arange(samples.samples, device=norms.device).unsqueeze(-1) * samples.tokens
    return samples.row_of((index + first).flatten()), scale.flatten()


def keep(G: Tensor, index: Tensor, scale: Tensor) -> Kept:
    """The rows ``index`` of G, each divided by its p."""
    return Kept(index, scaled(G.index_select(0, index), scale.unsqueeze(-1)))


def keep_among(kept: Kept, rank: int, uniforms: Uniforms) -> Kept:
    """``rank`` of the kept rows, drawn once more, p ∝ the norms of what they hold now."""
    if rank >= kept.rows.shape[0]:
        return kept
    p = water_fill(row_norms(kept.values), rank)
    place, scale = draw(p, rank, uniforms=uniforms)
    values = scaled(kept.values.index_select(0, place), scale.unsqueeze(-1))
    return Kept(kept.rows.index_select(0, place), values)
