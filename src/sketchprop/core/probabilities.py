"""Optimal inclusion probabilities for a budget: weights in, p* out.

Solves the convex program of the paper (eq. convex_program)

    min Σ wᵢ/pᵢ   subject to   Σ pᵢ = r,  0 < pᵢ ≤ 1

whose solution is water-filling: pᵢ = min(1, √wᵢ/√λ).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import native
from .checks import check_rank


def solve_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which weights, probabilities and draws are computed: float32 or better."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def wide_dtype(x: Tensor) -> torch.dtype:
    """float64 where the device has it: for probabilities and their cumulative sums."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def optimal_probabilities(weights: Tensor, rank: float) -> Tensor:
    """p* = argmin Σ wᵢ/pᵢ over Σ pᵢ = rank, pᵢ ≤ 1, for weights ``[..., n]``.

    ``pᵢ = min(1, √wᵢ/√λ)``. A zero weight gets p = 0, unless fewer than ``rank`` weights are
    positive: then those have p = 1 and the others share what is left, so Σ p = rank always.
    Solved in float32 or better whatever the dtype of ``weights``; a NaN weight makes all
    probabilities NaN, an infinite one is kept (``rank`` of them or more: NaN).
    O(n log n), no loop over coordinates, no host synchronisation. ``rank`` may be fractional
    (the expected size of an independent draw). A negative weight is an error on the CPU; on
    other devices, where looking would mean waiting, it gives NaN.

    >>> optimal_probabilities(torch.tensor([16.0, 1.0, 1.0]), 2)
    tensor([1.0000, 0.5000, 0.5000])
    """
    check_rank(rank)
    on_host = weights.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_host and bool((weights < 0).any()):
        raise ValueError(
            f"weights must not be negative, and the smallest is {float(weights.min()):g}; "
            "give for example squared norms: G.square().sum(-2)"
        )
    root = weights.to(wide_dtype(weights)).sqrt()
    return water_fill(root, rank).to(solve_dtype(weights))


def water_fill(roots: Tensor, rank: float) -> Tensor:
    """p* from the roots √wᵢ of the weights, unchecked, in float64, as sampling wants it."""
    n = roots.shape[-1]
    if rank < n and native.applies(roots):
        return native.fill(roots, rank)
    root = roots.to(wide_dtype(roots))
    if rank >= n:
        return torch.ones_like(root) + 0 * root  # 0·w: a non-finite weight stays visible
    # Zero roots become the smallest normal number: invisible beside any other, and where fewer
    # than ``rank`` are positive they share the rest of the budget equally, without 0/0.
    root = root.clamp(min=torch.finfo(root.dtype).tiny)
    # With the k largest clipped at 1 the level is √λ = S_k/(r - k), S_k the sum of the others.
    # It falls while the next root lies above it and rises ever after: √λ is the minimum over k.
    # The sums add from the smallest up: a difference of two totals would cancel.
    sums = root.sort(dim=-1).values.cumsum(-1)
    candidates = math.ceil(rank)
    first = 1 + rank - candidates  # r - k for the largest k; 1 unless the rank is fractional
    room = torch.arange(first, first + candidates, dtype=root.dtype, device=root.device)
    level = (sums[..., n - candidates :] / room[:candidates]).amin(-1, keepdim=True)
    return _filled(root, level)


def capped_fill(roots: Tensor, rank: int, capacity: int) -> Tensor:
    """p with Σ p = rank, at most ``capacity`` in the sum of a sample, for ``roots[N, T]``.

    Systematic sampling then keeps at most ``capacity`` rows of each sample. Where no sample asks
    for more this is the water-filling of the whole batch; else what they may not have goes to the
    others in proportion.
    """
    # Just below the capacity: rounding in the sums of p must not add one more.
    most = capacity - 1e-9
    if native.applies(roots):
        return native.capped_fill(roots, rank, most)
    share = water_fill(roots.flatten(), rank).view_as(roots).sum(-1)
    share = most * water_fill(share, rank / most)
    T = roots.shape[-1]
    wide = roots.to(share.dtype).clamp_(min=torch.finfo(share.dtype).tiny)
    sums = wide.sort(dim=-1).values.cumsum(-1)
    # As in ``water_fill``: with the k largest at 1 the level is S_k/(r - k), the least one counts.
    # Where nothing is left, r - k ≤ 0, it is infinite; a share that is NaN stays visible.
    room = torch.arange(1 - T, 1, dtype=sums.dtype, device=sums.device) + share.unsqueeze(-1)
    level = (sums / room.clamp_(min=0)).amin(-1, keepdim=True)
    return _filled(wide, level)


def _filled(root: Tensor, level: Tensor) -> Tensor:
    """min(1, √w/√λ), the stand-ins of zeros back to zero; NaN stays."""
    tiny = torch.finfo(root.dtype).tiny
    return torch.threshold_((root / level).clamp_(max=1.0), tiny**0.75, 0.0)
