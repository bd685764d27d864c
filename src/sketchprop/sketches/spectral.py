"""Spectral sketches: directions of G, drawn by what they carry.

Any orthonormal basis P that spans the columns of G gives atoms pᵢ(pᵢᵀG) that sum to G to machine
precision, however inexact the eigen-solver was. So bases come from the Gram matrix of the shorter
side, and unbiasedness needs no more than a positive probability for each atom.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import weights
from .._checks import check_weight, solve_dtype
from ..compact import LowRank, scaled, take_columns
from ..probabilities import water_fill
from .base import AtomSketch, Plan

EIGEN_FLOPS = 9
"""FLOPs of a symmetric eigen-decomposition with vectors, over m³ (Golub & Van Loan, §8.3)."""


class SpectralSketch(AtomSketch):
    """Atoms are rank-one: Ĝ = Σ (1/pᵢ)·leftᵢ rightᵢᵀ over the kept directions."""

    @abstractmethod
    def directions(self, G: Tensor, W: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Weights ``[..., min(B, n)]``, largest first, and the basis they belong to."""

    def atom_count(self, B: int, n: int, d: int) -> int:
        return min(B, n)

    def product_flops(self, B: int, n: int, d: int) -> float:
        # dX = left (right W) and dW = rightᵀ (leftᵀ X).
        return 4 * self.rank(min(B, n)) * d * (B + n)

    def planning_flops(self, B: int, n: int, d: int) -> float:
        m = min(B, n)
        solving = self._solving_flops(m, self.rank(m)) + self.rank(m) * B
        return self.planning_product_flops(B, n, d) + EIGEN_FLOPS * m**3 + solving

    def plan(self, G: Tensor, W: Tensor | None) -> Plan:
        w, basis = self.directions(G, W)
        return Plan(water_fill(w.sqrt(), self.rank(w.shape[-1])), basis)


@dataclass(frozen=True, repr=False)
class GradientSVD(SpectralSketch):
    """G-SV: p ∝ the singular values of G (``root=True``: ∝ their roots).

    The best unbiased rank-r approximation of G itself. Costs an eigen-decomposition of
    min(B, n)³ and its Gram matrix each time.
    """

    _: KW_ONLY
    root: bool = False

    def directions(self, G: Tensor, W: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        A = G.to(solve_dtype(G))
        w, basis = descending_eigen(A @ A.mT if G.shape[-2] <= G.shape[-1] else A.mT @ A)
        w = positive(w)
        return (w.sqrt() if self.root else w), (basis,)

    def keep(self, G: Tensor, plan: Plan, index: Tensor, scale: Tensor) -> LowRank:
        vectors = take_columns(plan.basis[0], index)
        scale = scale.unsqueeze(-2)
        if G.shape[-2] <= G.shape[-1]:
            left = vectors.to(G.dtype)
            return LowRank(scaled(left, scale), left.mT @ G)
        right = vectors.to(G.dtype)
        return LowRank(scaled(G @ right, scale), right.mT)

    def planning_product_flops(self, B: int, n: int, d: int) -> float:
        m = min(B, n)
        return 2 * m * B * n + 2 * self.rank(m) * B * n  # Gram matrix, one factor of Ĝ


@dataclass(frozen=True, repr=False)
class RankConstrained(SpectralSketch):
    """RCS: the unbiased rank-r sketch of least distortion (Prop. 3.3), Ĝ = P D Pᵀ G.

    P are the left singular vectors of G·W̃ and p ∝ its singular values, with W̃W̃ᵀ = WWᵀ + αI: it
    minimises E‖(Ĝ - G)W‖² + α·E‖Ĝ - G‖² over all unbiased sketches of rank r, and no direction
    of G is invisible. Costs G·W, as much as the exact dX, and an eigen-decomposition.
    ``paper=True`` is α = 0, optimal for dX alone: where rank(G·W) < rank(G), as in every layer
    with n > d, the directions that W cannot see get p = 0 and dW is **biased**.
    """

    _: KW_ONLY
    paper: bool = False

    needs_weight: ClassVar[bool] = True

    def directions(self, G: Tensor, W: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        A = G.to(solve_dtype(G))
        V = check_weight(W, self).to(A.dtype)
        outer: tuple[Tensor, ...] = ()
        if G.shape[-2] > G.shape[-1]:
            Q, A = torch.linalg.qr(A)  # G = QR: the same problem for the small square R
            outer = (Q, A)
        M = A @ V
        gram = M @ M.mT
        if self.paper:
            w, basis = descending_eigen(gram)
            noise = w[..., :1] * (w.shape[-1] * torch.finfo(w.dtype).eps)
            return w.masked_fill(w <= noise, 0), (basis, *outer)
        alpha = weights.FLOOR * weights.row_energies(V).mean(-1)[..., None, None]
        w, basis = descending_eigen(gram + alpha * (A @ A.mT))
        return positive(w), (basis, *outer)

    def keep(self, G: Tensor, plan: Plan, index: Tensor, scale: Tensor) -> LowRank:
        vectors = take_columns(plan.basis[0], index)
        scale = scale.unsqueeze(-2)
        if len(plan.basis) == 1:
            left = vectors.to(G.dtype)
            return LowRank(scaled(left, scale), left.mT @ G)
        _, Q, R = plan.basis
        return LowRank(scaled(Q @ vectors, scale).to(G.dtype), (vectors.mT @ R).to(G.dtype))

    def planning_flops(self, B: int, n: int, d: int) -> float:
        qr = 4 * B * n * n if n < B else 0  # with Q formed
        alpha = 0 if self.paper else 2 * n * d
        return super().planning_flops(B, n, d) + qr + alpha

    def planning_product_flops(self, B: int, n: int, d: int) -> float:
        m = min(B, n)
        gram = 2 * m * n * d + 2 * m * m * d + (0 if self.paper else 2 * m * m * n)
        factors = B * n + (n * n if n < B else 0)
        return gram + 2 * self.rank(m) * factors


def descending_eigen(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, largest first, and orthonormal eigenvectors of a symmetric matrix.

    A non-finite matrix gives NaN eigenvalues instead of an error. When the solver fails the
    coordinate axes serve: they are orthonormal too, so the sketch stays unbiased.
    """
    marker = 0 * gram.sum((-2, -1), keepdim=True)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    safe = torch.where(marker == 0, gram, eye)
    try:
        values, vectors = torch.linalg.eigh(safe)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values, vectors = safe.diagonal(dim1=-2, dim2=-1), eye.expand_as(safe)
    return values.flip(-1) + marker.squeeze(-1), vectors.flip(-1)


def positive(w: Tensor) -> Tensor:
    """Eigenvalues with rounding's zeros and negatives lifted: no atom of G may have p = 0."""
    top = w.amax(-1, keepdim=True).clamp(min=0)
    return torch.maximum(w, top * torch.finfo(w.dtype).eps)
