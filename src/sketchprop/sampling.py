"""Samplers: probabilities and uniforms in, kept atoms out. Pure: no random state in here."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import check_rank


def draw_uniforms(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Uniforms in [0, 1) from the default generator of ``device``, as fine as it can make them.

    float64, because an atom with p below 2⁻²⁴ would never be met by float32 uniforms.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.rand(shape, dtype=dtype, device=device)


def sample_exact(probabilities: Tensor, u: Tensor, rank: int) -> Tensor:
    """Exactly ``rank`` distinct indices, ascending, index i with probability pᵢ: ``[..., rank]``.

    Systematic sampling (the paper's correlated sampling): atom i is kept when one of the points
    u, u+1, u+2, … falls into ``[P₍ᵢ₋₁₎, Pᵢ)``, P the cumulative sum of p. One uniform ``u`` in
    [0, 1) for each set: ``probabilities: [..., n]``, ``u: [...]``; they broadcast.
    Needs Σ p = rank, as ``optimal_probabilities`` returns it. O(n), no host synchronisation.

    An atom with p = 1 is never skipped and never drawn twice, and one with p = 0 never drawn,
    whatever the rounding: sure atoms are counted in integers, apart from the cumulative sum of
    the others, which runs in float64 and is scaled to end at an integer exactly.

    >>> sample_exact(torch.tensor([1.0, 0.5, 0.5]), torch.tensor(0.7), 2)
    tensor([0, 2])
    """
    check_rank(rank)
    n = probabilities.shape[-1]
    if int(rank) != rank or rank > n:
        raise ValueError(
            f"rank={rank!r} of {n} atoms cannot be drawn exactly; give an integer from 1 to {n}"
        )
    rank = int(rank)
    batch = probabilities.dim() > 1 or u.dim() > 0
    if rank == n:
        whole = torch.arange(n, device=probabilities.device)
        return whole.expand_as(probabilities + u.unsqueeze(-1)) if batch else whole
    wide = torch.float32 if probabilities.device.type == "mps" else torch.float64
    # Within this of 1 an atom is sure: wider than the rounding of a sum of up to ``rank``.
    slack = max(4 * torch.finfo(probabilities.dtype).eps, 4 * rank * torch.finfo(wide).eps)
    sure = probabilities >= 1 - slack
    certain = sure.cumsum(-1)
    points = probabilities.masked_fill(sure, 0).cumsum(-1, dtype=wide)
    # The last of these is total/total = 1 times an integer: exact.
    total = points[..., -1:].clamp(min=torch.finfo(wide).tiny)
    points = points / total * (rank - certain[..., -1:])
    # How many of u, u+1, … lie below each point: ⌈point - u⌉, free of the rounding of point - u.
    taken = points.floor() + (points.frac() > (u.unsqueeze(-1) if batch else u))
    taken += certain
    order = torch.arange(1, rank + 1, dtype=wide, device=taken.device)
    if batch:
        order = order.expand(*taken.shape[:-1], rank).contiguous()
    # The clamp only matters for NaN probabilities: they must not index out of range.
    return torch.searchsorted(taken, order).clamp_(max=n - 1)


def sample_independent(probabilities: Tensor, u: Tensor) -> Tensor:
    """One Bernoulli(pᵢ) for each atom, as a mask: ``u`` in [0, 1) of the shape ``[..., n]``.

    An atom with p = 1 is always kept, one with p = 0 never; a NaN probability is kept, so that
    it reaches the gradient. O(n), no host synchronisation.

    >>> sample_independent(torch.tensor([1.0, 0.5, 0.0]), torch.tensor([0.9, 0.6, 0.0]))
    tensor([ True, False, False])
    """
    return ~(u >= probabilities)
