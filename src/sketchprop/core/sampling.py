"""Samplers: probabilities and uniforms in, kept atoms out.

``draw_uniforms`` is the one place where the library asks a random generator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_rank
from .probabilities import in_c, systematic_in_c, wide_dtype
from .vjp import CompactGradient, Vjp

Uniforms = Callable[[Tensor, tuple[int, ...]], Tensor]
"""Where a draw takes its randomness from: ``uniforms(p, shape)``, numbers in [0, 1) for the atoms
with probabilities ``p``. ``shape`` is that of p without its last axis (one number for each draw
of a fixed size) or that of p (a coin for each atom). ``draw_uniforms`` asks the default
generator; tests and ``every_draw`` hand out numbers of their own."""


def draw_uniforms(p: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uniforms in [0, 1) from the default generator of p's device, as fine as it can make them.

    float64, because an atom with p below 2⁻²⁴ would never be met by float32 uniforms.
    """
    return torch.rand(shape, dtype=wide_dtype(p), device=p.device)


def draw(
    p: Tensor, rank: float, sampling: str = "fixed", uniforms: Uniforms = draw_uniforms
) -> tuple[Tensor, Tensor]:
    """The kept atoms ``index[..., r]`` and their ``scale[..., r]``, 1/pᵢ.

    ``p: [..., n]`` in float64, as ``water_fill`` returns it. ``"fixed"`` keeps ``rank`` atoms.
    ``"independent"`` tosses a coin for each, and waits once for the device: its size is random.
    In a stack the shorter draws are padded with atoms times 0, and a draw that keeps nothing is
    one atom times 0: an empty product would hide a gradient that is not finite.
    """
    if sampling == "fixed":
        u = uniforms(p, tuple(p.shape[:-1]))
        wide = p.dtype == u.dtype == torch.float64
        if wide and rank < p.shape[-1] and u.shape == p.shape[:-1] and in_c(p, u):
            return systematic_in_c(p, u, int(rank))
        index = systematic(p, u, int(rank))
        return index, take(p, index).reciprocal()
    kept = sample_independent(p, uniforms(p, tuple(p.shape)))
    size = max(1, int(kept.sum(-1).max())) if kept.numel() else 0
    index = kept.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :size]
    return index, torch.where(take(kept, index), take(p, index).reciprocal(), 0.0)


@dataclass(frozen=True)
class Atoms(ABC):
    """G as a sum of atoms, the probability of each and how many are drawn.

    ``probabilities: [..., n]`` in float64, as ``water_fill`` returns them; ``rank``: how many
    atoms a draw of a fixed size keeps.
    """

    probabilities: Tensor
    rank: float
    sampling: str = "fixed"

    @abstractmethod
    def keep(self, vjp: Vjp, index: Tensor, scale: Tensor) -> CompactGradient:
        """The atoms ``index[..., r]``, each times ``scale[..., r]``."""

    def choose(self, uniforms: Uniforms = draw_uniforms) -> tuple[Tensor, Tensor]:
        """Which atoms, and the 1/p of each."""
        return draw(self.probabilities, self.rank, self.sampling, uniforms)

    def draw(self, vjp: Vjp, uniforms: Uniforms = draw_uniforms) -> CompactGradient:
        """Ĝ: some of the atoms of ``vjp.G``, each divided by its probability."""
        return self.keep(vjp, *self.choose(uniforms))


def take(values: Tensor, index: Tensor) -> Tensor:
    """``values[..., index]``, with an index for each row of a stack."""
    if values.dim() == 1 and index.dim() == 1:
        return values[index]
    return values.expand(*index.shape[:-1], -1).gather(-1, index)


def sample_fixed(probabilities: Tensor, u: Tensor, rank: int) -> Tensor:
    """Exactly ``rank`` distinct indices, ascending, index i with probability pᵢ: ``[..., rank]``.

    Systematic sampling (the paper's correlated sampling): atom i is kept when one of the points
    u, u+1, u+2, … falls into ``[P₍ᵢ₋₁₎, Pᵢ)``, P the cumulative sum of p. One uniform ``u`` in
    [0, 1) for each set: ``probabilities: [..., n]``, ``u: [...]``; they broadcast.
    Needs Σ p = rank, as ``optimal_probabilities`` returns it. O(n), no host synchronisation.

    An atom with p = 1 is never skipped and never drawn twice, and one with p = 0 never drawn,
    whatever the rounding: p is rounded to a grid on which float64 sums are exact, and u moves by
    what the sum then lacks of ``rank``.

    >>> sample_fixed(torch.tensor([1.0, 0.5, 0.5]), torch.tensor(0.7), 2)
    tensor([0, 2])
    """
    check_rank(rank)
    n = probabilities.shape[-1]
    if int(rank) != rank or rank > n:
        raise ValueError(
            f"rank={rank!r} of {n} atoms cannot be drawn; give an integer from 1 to {n}"
        )
    wide = wide_dtype(probabilities)
    if probabilities.dtype != wide:
        probabilities = _renormalised(probabilities.to(wide), int(rank))
    return systematic(probabilities, u, int(rank))


def systematic(probabilities: Tensor, u: Tensor, rank: int) -> Tensor:
    """``sample_fixed`` without its checks, for probabilities in float64."""
    n = probabilities.shape[-1]
    batch = probabilities.dim() > 1 or u.dim() > 0
    if batch:
        probabilities = probabilities.expand(*(probabilities[..., 0] + u).shape, n)
        u = u.unsqueeze(-1)
    if rank == n:
        return torch.arange(n, device=probabilities.device).expand(probabilities.shape)
    # Adding and taking away a power of two above all sums leaves multiples of its last bit:
    # then P and u, u+1, … are exact, and a sure atom spans exactly 1.
    grid = 2.0 ** rank.bit_length()
    sums = (probabilities + grid).sub_(grid).cumsum(-1)
    # Only u ≥ ε = P_n - r meets a sure atom at the end, and only u < 1 + ε stays below P_n; but u
    # must not reach 1 itself: a sure atom at the beginning would be missed. |ε| ~ 1e-15 n.
    excess = sums[..., -1:] - rank
    step = grid * torch.finfo(sums.dtype).eps
    u = (u if u.dtype == sums.dtype else u.to(sums.dtype)).clamp(
        excess, excess.clamp(max=0) + (1 - step)
    )
    points = torch.arange(grid, grid + rank, dtype=sums.dtype, device=sums.device)
    points = (points + u).sub_(grid)
    # The last sum is not asked: whatever lies above all others is in the last atom, NaN too.
    return torch.searchsorted(sums[..., :-1].contiguous(), points, right=True)


def _renormalised(p: Tensor, rank: int) -> Tensor:
    """p from lower precision, the atoms that are not sure scaled so that Σ p = rank again."""
    sure = p >= 1 - 4 * torch.finfo(torch.float32).eps
    rest = p.masked_fill(sure, 0)
    left = rank - sure.sum(-1, keepdim=True)
    scale = left / rest.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    return torch.where(sure, 1.0, rest * scale)


def sample_independent(probabilities: Tensor, u: Tensor) -> Tensor:
    """One Bernoulli(pᵢ) for each atom, as a mask: ``u`` in [0, 1) of the shape ``[..., n]``.

    Of ``probabilities`` p = 1 is always kept and p = 0 never; NaN is kept, so that it reaches the
    gradient. O(n), no host synchronisation.

    >>> sample_independent(torch.tensor([1.0, 0.5, 0.0]), torch.tensor([0.9, 0.6, 0.0]))
    tensor([ True, False, False])
    """
    return ~(u >= probabilities)
