"""Spectral sketches: directions of G, drawn by what they carry.

Any orthonormal basis P that spans the columns of G gives atoms pᵢ(pᵢᵀG) that sum to G to machine
precision, however inexact the eigen-solver was. So bases come from the Gram matrix of the shorter
side, and unbiasedness needs no more than a positive probability for each atom. The same holds for
a basis of the rows: G = Σ (G aᵢ) bᵢᵀ whenever Σ aᵢbᵢᵀ = I; it fits any G with n columns, so it is
the one that may be remembered.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core import importance as weights
from ..core.checks import check_weight, solve_dtype
from ..core.compact import LowRank, scaled, take_columns
from ..core.probabilities import water_fill
from .amortised import AmortisedSketch
from .base import Plan

EIGEN_FLOPS = 9
"""FLOPs of a symmetric eigen-decomposition with vectors, over m³ (Golub & Van Loan, §8.3)."""


class ColumnSpace(NamedTuple):
    """G = Σ pᵢ (pᵢᵀ G), P orthonormal: ``[..., B, B]``."""

    P: Tensor

    def keep(self, G: Tensor, index: Tensor, scale: Tensor) -> LowRank:
        left = take_columns(self.P, index).to(G.dtype)
        return LowRank(scaled(left, scale), left.mT @ G)


class RowSpace(NamedTuple):
    """G = Σ (G aᵢ) bᵢᵀ with A Bᵀ = I: ``[..., n, n]`` each."""

    A: Tensor
    B: Tensor

    def keep(self, G: Tensor, index: Tensor, scale: Tensor) -> LowRank:
        left = G @ take_columns(self.A, index).to(G.dtype)
        return LowRank(scaled(left, scale), take_columns(self.B, index).to(G.dtype).mT)


class Factored(NamedTuple):
    """G = Q R = Σ (Q uᵢ)(uᵢᵀ R), Q and U orthonormal, U ``[..., n, n]``.

    Q stays a product of reflectors, as LAPACK stores it beside R: forming it would cost as much
    as finding it, and only r of the Q uᵢ are wanted.
    """

    U: Tensor
    R: Tensor
    packed: Tensor
    tau: Tensor

    def keep(self, G: Tensor, index: Tensor, scale: Tensor) -> LowRank:
        kept = take_columns(self.U, index)
        B, n = self.packed.shape[-2:]
        left = torch.ormqr(self.packed, self.tau, pad(kept, (0, 0, 0, B - n)))
        return LowRank(scaled(left, scale).to(G.dtype), (kept.mT @ self.R).to(G.dtype))


Basis = ColumnSpace | RowSpace | Factored


@dataclass(frozen=True, repr=False)
class SpectralSketch(AmortisedSketch):
    """Atoms are rank-one: Ĝ = Σ (1/pᵢ)·leftᵢ rightᵢᵀ over the kept directions."""

    @abstractmethod
    def directions(self, G: Tensor, W: Tensor | None) -> tuple[Tensor, Basis]:
        """Weights ``[..., min(B, n)]``, largest first, and the basis they belong to."""

    @abstractmethod
    def row_directions(self, G: Tensor, W: Tensor | None) -> tuple[Tensor, RowSpace]:
        """Weights ``[..., n]``, largest first, and a basis that fits any G with n columns."""

    def atom_count(self, B: int, n: int, d: int) -> int:
        return n if self.partial else min(B, n)

    def full_plan(self, G: Tensor, W: Tensor | None) -> Plan:
        return self._plan(*self.directions(G.to(solve_dtype(G)), W))

    def partial_plan(self, G: Tensor, W: Tensor | None) -> Plan:
        return self._plan(*self.row_directions(G.to(solve_dtype(G)), W))

    def _plan(self, w: Tensor, basis: Basis) -> Plan:
        return Plan(water_fill(w.sqrt(), self.rank(w.shape[-1])), basis)

    def keep(self, G: Tensor, plan: Plan, index: Tensor, scale: Tensor) -> LowRank:
        basis: Basis = plan.basis
        return basis.keep(G, index, scale.unsqueeze(-2))

    def product_flops(self, B: int, n: int, d: int) -> float:
        # dX = left (right W) and dW = rightᵀ (leftᵀ X).
        return 4 * self.rank(self.atom_count(B, n, d)) * d * (B + n)

    def planning_flops(self, B: int, n: int, d: int) -> float:
        m = self.atom_count(B, n, d)
        eigen = self.eigen_count() * EIGEN_FLOPS * m**3 / self.refresh_every
        solving = self._solving_flops(m, self.rank(m)) + self.rank(m) * B
        return self.planning_product_flops(B, n, d) + eigen + solving

    def eigen_count(self) -> int:
        """How many eigen-decompositions a plan takes."""
        return 1


@dataclass(frozen=True, repr=False)
class GradientSVD(SpectralSketch):
    """G-SV: p ∝ the singular values of G (``root=True``: ∝ their roots).

    The best unbiased rank-r approximation of G itself. Costs an eigen-decomposition of
    min(B, n)³ and its Gram matrix each time; with ``refresh_every=k`` one of n³ every k steps.
    """

    _: KW_ONLY
    root: bool = False

    def directions(self, G: Tensor, W: Tensor | None) -> tuple[Tensor, Basis]:
        if G.shape[-2] > G.shape[-1]:
            return self.row_directions(G, W)
        w, P = descending_eigen(G @ G.mT)
        return self._weights(w), ColumnSpace(P)

    def row_directions(self, G: Tensor, W: Tensor | None) -> tuple[Tensor, RowSpace]:
        w, V = descending_eigen(G.mT @ G)
        return self._weights(w), RowSpace(V, V)

    def _weights(self, w: Tensor) -> Tensor:
        w = positive(w)
        return w.sqrt() if self.root else w

    def planning_product_flops(self, B: int, n: int, d: int) -> float:
        m = self.atom_count(B, n, d)
        factor = 2 * self.rank(m) * B * n
        gram = 2 * m * n * (self.scored_rows(B) if m == n else B)
        return gram / self.refresh_every + factor


@dataclass(frozen=True, repr=False)
class RankConstrained(SpectralSketch):
    """RCS: the unbiased rank-r sketch of least distortion (Prop. 3.3), Ĝ = P D Pᵀ G.

    P are the left singular vectors of G·W̃ and p ∝ its singular values, with W̃W̃ᵀ = WWᵀ + αI: it
    minimises E‖(Ĝ - G)W‖² + α·E‖Ĝ - G‖² over all unbiased sketches of rank r, and no direction
    of G is invisible. Costs G·W, as much as the exact dX, and an eigen-decomposition; with
    ``refresh_every=k`` two of n³ every k steps, in the paper's form Ĝ = G Γ^{-1/2} U D Uᵀ Γ^{1/2}
    with a ridge on Γ.
    ``paper=True`` is α = 0, optimal for dX alone: where rank(G·W) < rank(G), as in every layer
    with n > d, the directions that W cannot see get p = 0 and dW is **biased**.
    """

    _: KW_ONLY
    paper: bool = False

    needs_weight: ClassVar[bool] = True

    def directions(self, G: Tensor, W: Tensor | None) -> tuple[Tensor, Basis]:
        V = check_weight(W, self).to(G.dtype)
        if G.shape[-2] <= G.shape[-1]:
            w, P = self._solve(G, V)
            return w, ColumnSpace(P)
        packed, tau = torch.geqrf(G)
        R = packed[..., : G.shape[-1], :].triu()
        w, U = self._solve(R, V)  # the same problem for the small square R
        return w, Factored(U, R, packed, tau)

    def row_directions(self, G: Tensor, W: Tensor | None) -> tuple[Tensor, RowSpace]:
        energies, V = descending_eigen(G.mT @ G)
        # A ridge: the basis must also fit a later G, whose directions this one may not have.
        top = energies.nan_to_num().amax(-1, keepdim=True)
        ridge = torch.where(top > 0, RIDGE * top, 1.0)
        roots = (energies.nan_to_num().clamp(min=0) + ridge).sqrt().unsqueeze(-2)
        half, inverse = (V * roots) @ V.mT, (V / roots) @ V.mT
        w, U = self._solve(half, check_weight(W, self).to(G.dtype))
        return w + 0 * energies, RowSpace(inverse @ U, half @ U)

    def _solve(self, A: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of A(WWᵀ + αI)Aᵀ."""
        M = A @ W
        gram = M @ M.mT
        if self.paper:
            w, P = descending_eigen(gram)
            noise = w[..., :1] * (w.shape[-1] * torch.finfo(w.dtype).eps)
            return w.masked_fill(w <= noise, 0), P
        alpha = weights.FLOOR * weights.row_energies(W).mean(-1)[..., None, None]
        w, P = descending_eigen(gram + alpha * (A @ A.mT))
        return positive(w), P

    def eigen_count(self) -> int:
        return 2 if self.partial else 1

    def planning_flops(self, B: int, n: int, d: int) -> float:
        tall = n < B and not self.partial
        qr = 2 * B * n * n + 4 * B * n * self.rank(n) if tall else 0
        alpha = 0 if self.paper else 2 * n * d / self.refresh_every
        return super().planning_flops(B, n, d) + qr + alpha

    def planning_product_flops(self, B: int, n: int, d: int) -> float:
        m = self.atom_count(B, n, d)
        inner = 2 * m * n * d + 2 * m * m * d + (0 if self.paper else 2 * m * m * n)
        if not self.partial:
            return inner + 2 * self.rank(m) * n * min(B, n)
        gram = 2 * n * n * self.scored_rows(B) + 8 * n**3
        return (inner + gram) / self.refresh_every + 2 * self.rank(m) * B * n


RIDGE = 1e-3
"""Added to the energies of a remembered Γ, as a share of the largest."""


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
