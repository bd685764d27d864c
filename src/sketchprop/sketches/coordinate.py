"""Coordinate sketches: columns of G drawn by importance."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from torch import Tensor

from ..core import channels
from ..core import importance as weights
from ..core.checks import check_weight
from .atoms import ColumnSketch


@dataclass(frozen=True, repr=False)
class L1(ColumnSketch):
    """p ∝ ‖gᵢ‖₁ (``root=True``: ∝ √‖gᵢ‖₁). Cost 4Brd + O(Bn): the default choice of the paper.

    >>> sketch = L1(0.1)
    """

    _: KW_ONLY
    root: bool = False

    def weights(self, G: Tensor, W: Tensor | None) -> Tensor:
        return weights.l1_norms(G) if self.root else weights.l1(G)

    def roots(self, G: Tensor, W: Tensor | None) -> Tensor:
        norms = weights.l1_norms(G)
        return norms.sqrt() if self.root else norms

    def fold(self, G: Tensor) -> Tensor:
        return channels.absolute_sums(G)


@dataclass(frozen=True, repr=False)
class L2(ColumnSketch):
    """p ∝ ‖gᵢ‖₂ (``root=True``: ∝ √‖gᵢ‖₂). Cost 4Brd + O(Bn)."""

    _: KW_ONLY
    root: bool = False

    def weights(self, G: Tensor, W: Tensor | None) -> Tensor:
        w = weights.l2(G)
        return w.sqrt() if self.root else w

    def fold(self, G: Tensor) -> Tensor:
        return channels.norms(G)


@dataclass(frozen=True, repr=False)
class Variance(ColumnSketch):
    """p ∝ Var(gᵢ) + ε·mean(gᵢ²) (``root=True``: its square root). Cost 4Brd + O(Bn).

    ``paper=True`` drops the ε-term: then a constant column that is not zero has p = 0 beside
    others that vary, and the gradient is **biased**.
    """

    _: KW_ONLY
    root: bool = False
    paper: bool = False

    def weights(self, G: Tensor, W: Tensor | None) -> Tensor:
        w = weights.variance(G, 0.0 if self.paper else weights.FLOOR)
        return w.sqrt() if self.root else w

    def scoring_flops(self, B: int, n: int, d: int) -> float:
        return 3 * B * n


@dataclass(frozen=True, repr=False)
class Diagonal(ColumnSketch):
    """DS: p ∝ ‖gᵢ‖√(‖Wᵢ‖² + α), the optimum among diagonal sketches. Cost 4Brd + O(Bn + nd).

    Minimises E‖(Ĝ - G)W‖² + α·E‖Ĝ - G‖² over independent column draws: what dX needs, and a
    share of what dW needs. ``paper=True`` is Lemma 3.4, α = 0: then a zero row of W never gets a
    gradient (a zero-initialised layer never trains) and the gradient is **biased**.
    """

    _: KW_ONLY
    paper: bool = False

    needs_weight: ClassVar[bool] = True

    def weights(self, G: Tensor, W: Tensor | None) -> Tensor:
        return weights.diagonal(G, check_weight(W, self), 0.0 if self.paper else weights.FLOOR)

    def fold(self, G: Tensor) -> Tensor:
        return channels.norms(G)

    def scoring_flops(self, B: int, n: int, d: int) -> float:
        return 2 * B * n + 2 * n * d
