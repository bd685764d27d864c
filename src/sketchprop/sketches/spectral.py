"""Spectral sketches: directions of G, drawn by what they carry.

Any orthonormal basis P that spans the columns of G gives atoms pᵢ(pᵢᵀG) that sum to G to machine
precision, however inexact the eigen-solver was. So bases come from the Gram matrix of the shorter
side, and unbiasedness needs no more than a positive probability for each atom. The same holds for
a basis of the rows: G = Σ (G aᵢ) bᵢᵀ whenever Σ aᵢbᵢᵀ = I; it fits any G with n columns, so it is
the one that may be remembered.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core import importance
from ..core.compact import LowRank, scaled, take_columns
from ..core.cost import Cost, Size, drawing_flops
from ..core.probabilities import solve_dtype, water_fill
from ..core.sampling import Atoms
from ..core.vjp import Vjp
from .base import Sketch

EIGEN_FLOPS = 9
"""FLOPs of a symmetric eigen-decomposition with vectors, over m³ (Golub & Van Loan, §8.3)."""


@dataclass(frozen=True)
class ColumnSpace(Atoms):
    """G = Σ pᵢ (pᵢᵀ G), P orthonormal: ``[..., B, B]``."""

    P: Tensor = field(kw_only=True)

    def keep(self, vjp: Vjp, index: Tensor, scale: Tensor) -> LowRank:
        left = take_columns(self.P, index).to(vjp.G.dtype)
        return LowRank(scaled(left, scale.unsqueeze(-2)), left.mT @ vjp.G)


@dataclass(frozen=True)
class RowSpace(Atoms):
    """G = Σ (G aᵢ) bᵢᵀ with A Bᵀ = I: ``[..., n, n]`` each."""

    A: Tensor = field(kw_only=True)
    B: Tensor = field(kw_only=True)

    def keep(self, vjp: Vjp, index: Tensor, scale: Tensor) -> LowRank:
        dtype = vjp.G.dtype
        left = vjp.G @ take_columns(self.A, index).to(dtype)
        right = take_columns(self.B, index).to(dtype)
        return LowRank(scaled(left, scale.unsqueeze(-2)), right.mT)


@dataclass(frozen=True)
class Factored(Atoms):
    """G = Q R = Σ (Q uᵢ)(uᵢᵀ R), Q and U orthonormal, U ``[..., n, n]``.

    Q stays a product of reflectors, as LAPACK stores it beside R: forming it would cost as much
    as finding it, and only r of the Q uᵢ are wanted.
    """

    U: Tensor = field(kw_only=True)
    R: Tensor = field(kw_only=True)
    packed: Tensor = field(kw_only=True)
    tau: Tensor = field(kw_only=True)

    def keep(self, vjp: Vjp, index: Tensor, scale: Tensor) -> LowRank:
        kept = take_columns(self.U, index)
        B, n = self.packed.shape[-2:]
        left = torch.ormqr(self.packed, self.tau, pad(kept, (0, 0, 0, B - n)))
        dtype = vjp.G.dtype
        return LowRank(scaled(left, scale.unsqueeze(-2)).to(dtype), (kept.mT @ self.R).to(dtype))


@dataclass(frozen=True, repr=False)
class SpectralSketch(Sketch):
    """Atoms are rank-one: Ĝ = Σ (1/pᵢ)·leftᵢ rightᵢᵀ over the kept directions.

    The budget is the paper's r/n: r = budget · n directions, and at most the min(B, n) there are.
    """

    def atom_count(self, B: int, n: int, d: int) -> int:
        return min(B, n)

    def rank_of(self, B: int, n: int, d: int) -> float | int:
        return min(self.rank(n), self.atom_count(B, n, d))

    def probabilities_of(self, w: Tensor, n: int) -> tuple[Tensor, float, str]:
        """What every kind of atoms begins with, from the importance w of each."""
        rank = self.rank_of(w.shape[-1], n, 0)
        return water_fill(w.sqrt(), rank), rank, self.sampling

    def cost(self, size: Size, *, lasting: bool = False) -> Cost:
        if not size.sides:
            return Cost(0)
        B, n, d, *_ = size
        m = n if lasting else min(B, n)
        r = self.rank_of(m, n, d)
        products = 2 * r * d * (B + n) * size.sides  # dX = left (right W), dW = rightᵀ (leftᵀ X)
        drawing = drawing_flops(m, r, self.sampling) + r * B
        return Cost(products, drawing=drawing).plus(self.solving(size, m, lasting))

    @abstractmethod
    def solving(self, size: Size, m: int, lasting: bool) -> Cost:
        """FLOPs to make the ``m`` atoms, and Ĝ of those that are kept."""


@dataclass(frozen=True, repr=False)
class GradientSVD(SpectralSketch):
    """G-SV: p ∝ the singular values of G (``root=True``: ∝ their roots).

    The best unbiased rank-r approximation of G itself. Costs an eigen-decomposition of
    min(B, n)³ and its Gram matrix each time; with ``planner=Every(k)`` one of n³ every k steps.
    """

    _: KW_ONLY
    root: bool = False

    def atoms(self, vjp: Vjp) -> Atoms:
        G = vjp.G.to(solve_dtype(vjp.G))
        if G.shape[-2] > G.shape[-1]:
            return self.lasting_atoms(vjp)
        w, P = descending_eigen(G @ G.mT)
        return ColumnSpace(*self.probabilities_of(self._importance(w), G.shape[-1]), P=P)

    def lasting_atoms(self, vjp: Vjp) -> RowSpace:
        G = vjp.G.to(solve_dtype(vjp.G))
        w, V = descending_eigen(G.mT @ G)
        return RowSpace(*self.probabilities_of(self._importance(w), G.shape[-1]), A=V, B=V)

    def _importance(self, w: Tensor) -> Tensor:
        w = positive(w)
        return w.sqrt() if self.root else w

    def solving(self, size: Size, m: int, lasting: bool) -> Cost:
        Bn, r = size.B * size.n, self.rank_of(m, size.n, size.d)
        products = {"scoring_products": 2 * m * Bn, "drawing_products": 2 * r * Bn}
        return Cost(0, EIGEN_FLOPS * m**3, **products)


@dataclass(frozen=True, repr=False)
class RankConstrained(SpectralSketch):
    """RCS: the unbiased rank-r sketch of least distortion (Prop. 3.3), Ĝ = P D Pᵀ G.

    P are the left singular vectors of G·W̃ and p ∝ its singular values, with W̃W̃ᵀ = WWᵀ + αI: it
    minimises E‖(Ĝ - G)W‖² + α·E‖Ĝ - G‖² over all unbiased sketches of rank r, and no direction
    of G is invisible. Costs G·W, as much as the exact dX, and an eigen-decomposition; with
    ``planner=Every(k)`` two of n³ every k steps, in the paper's form Ĝ = G Γ^{-1/2} U D Uᵀ Γ^{1/2}
    with a ridge on Γ.
    ``paper=True`` is α = 0, optimal for dX alone: where rank(G·W) < rank(G), as in every layer
    with n > d, the directions that W cannot see get p = 0 and dW is **biased**.
    """

    _: KW_ONLY
    paper: bool = False

    sees: ClassVar[str] = "GW"

    def atoms(self, vjp: Vjp) -> Atoms:
        G = vjp.G.to(solve_dtype(vjp.G))
        W = vjp.weight(self).to(G.dtype)
        if G.shape[-2] <= G.shape[-1]:
            w, P = self._solve(G, W)
            return ColumnSpace(*self.probabilities_of(w, G.shape[-1]), P=P)
        packed, tau = torch.geqrf(G)
        R = packed[..., : G.shape[-1], :].triu()
        w, U = self._solve(R, W)  # the same problem for the small square R
        return Factored(*self.probabilities_of(w, G.shape[-1]), U=U, R=R, packed=packed, tau=tau)

    def lasting_atoms(self, vjp: Vjp) -> RowSpace:
        G = vjp.G.to(solve_dtype(vjp.G))
        energies, V = descending_eigen(G.mT @ G)
        # A ridge: the basis must also fit a later G, whose directions this one may not have.
        top = energies.nan_to_num().amax(-1, keepdim=True)
        ridge = torch.where(top > 0, RIDGE * top, 1.0)
        roots = (energies.nan_to_num().clamp(min=0) + ridge).sqrt().unsqueeze(-2)
        half, inverse = (V * roots) @ V.mT, (V / roots) @ V.mT
        w, U = self._solve(half, vjp.weight(self).to(G.dtype))
        return RowSpace(
            *self.probabilities_of(w + 0 * energies, G.shape[-1]), A=inverse @ U, B=half @ U
        )

    def _solve(self, A: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of A(WWᵀ + αI)Aᵀ."""
        M = A @ W
        gram = M @ M.mT
        if self.paper:
            w, P = descending_eigen(gram)
            noise = w[..., :1] * (w.shape[-1] * torch.finfo(w.dtype).eps)
            return w.masked_fill(w <= noise, 0), P
        alpha = importance.FLOOR * importance.row_energies(W).mean(-1)[..., None, None]
        w, P = descending_eigen(gram + alpha * (A @ A.mT))
        return positive(w), P

    def solving(self, size: Size, m: int, lasting: bool) -> Cost:
        B, n, d, *_ = size
        r = self.rank_of(m, n, d)
        qr = 2 * B * n * n + 4 * B * n * r if n < B and not lasting else 0
        eigen = (2 if lasting else 1) * EIGEN_FLOPS * m**3
        ridge, ridge_products = (0, 0) if self.paper else (2 * n * d, 2 * m * m * n)
        inner = 2 * m * n * d + 2 * m * m * d + ridge_products
        return Cost(
            products=0,
            scoring=eigen + qr + ridge,
            scoring_products=inner + (2 * n * n * B + 8 * n**3 if lasting else 0),
            drawing_products=2 * r * n * (B if lasting else m),
        )


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
