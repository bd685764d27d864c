"""Uniform masks: no look at the data. The paper's baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core import channels
from ..core import importance as weights
from ..core.checks import check_weight, solve_dtype
from ..core.compact import MaskedElements
from ..core.sampling import sample_exact, sample_independent
from .atoms import ColumnSketch, RowSketch
from .base import Sketch


@dataclass(frozen=True, repr=False)
class ColumnMask(ColumnSketch):
    """Columns of G (output coordinates) with equal probability. Cost 4Brd + O(Bn).

    The paper's per-column mask is ``sampling="independent"``.
    """

    def weights(self, G: Tensor, W: Tensor | None) -> Tensor:
        return weights.uniform(G)

    def scoring_flops(self, B: int, n: int, d: int) -> float:
        return B * n  # one sum, so that a non-finite gradient stays visible

    def fold(self, G: Tensor) -> Tensor:
        return channels.sums(G)


@dataclass(frozen=True, repr=False)
class SampleMask(RowSketch):
    """Rows of G (samples, tokens) with equal probability. Cost 4rnd + O(Bn).

    The paper's per-sample mask is ``sampling="independent"``.
    """

    def weights(self, G: Tensor, W: Tensor | None) -> Tensor:
        return weights.uniform_rows(G)

    def scoring_flops(self, B: int, n: int, d: int) -> float:
        return B * n  # one sum, so that a non-finite gradient stays visible


@dataclass(frozen=True, repr=False)
class ElementMask(Sketch):
    """Single elements of W (for dX) and of X (for dW) with equal probability.

    dX = G (W ∘ M_W)/p, dW = Gᵀ (X ∘ M_X)/p; db is exact. Cost 4Bnd: it saves nothing without a
    sparse product, and is here because the paper compares with it. ``"exact"`` keeps the same
    number of elements in each row of W and X, ``"independent"`` tosses a coin per element.
    """

    needs_weight: ClassVar[bool] = True

    def atom_count(self, B: int, n: int, d: int) -> int:
        return d

    def product_flops(self, B: int, n: int, d: int) -> float:
        return 4 * B * n * d

    def planning_flops(self, B: int, n: int, d: int) -> float:
        # Each row of W and X is drawn apart and then multiplied with its mask.
        return (n + B) * (d + self._solving_flops(d, self.rank(d)))

    def uniform_shape(self, G: Tensor, W: Tensor | None) -> tuple[int, ...]:
        lines = (*G.shape[:-2], G.shape[-1] + G.shape[-2])
        return lines if self.sampling == "exact" else (*lines, check_weight(W, self).shape[-1])

    def probabilities(self, G: Tensor, W: Tensor | None = None) -> Tensor:
        d = check_weight(W, self).shape[-1]
        return torch.full((d,), self.rank(d) / d, dtype=solve_dtype(G), device=G.device)

    def compact(self, G: Tensor, W: Tensor | None, u: Tensor) -> MaskedElements:
        d = check_weight(W, self).shape[-1]
        n = G.shape[-1]
        p = self.probabilities(G, W)
        if self.sampling == "exact":
            index = sample_exact(p, u, int(self.rank(d)))
            mask = torch.zeros(*u.shape, d, dtype=p.dtype, device=p.device)
            mask.scatter_(-1, index, p.reciprocal()[: index.shape[-1]].expand(index.shape))
        else:
            mask = sample_independent(p, u) / p
        mask = mask.to(G.dtype)
        return MaskedElements(G, mask[..., :n, :], mask[..., n:, :])
