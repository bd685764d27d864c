"""Sketches that keep columns of G, its output coordinates: a method is its importance."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from torch import Tensor

from ..core import channels, importance
from ..core.compact import ColumnAtoms
from ..core.cost import Cost, Size, drawing_flops
from ..core.probabilities import water_fill
from ..core.vjp import Vjp
from .base import Sketch


@dataclass(frozen=True, repr=False)
class ColumnSketch(Sketch):
    """Atoms are the columns of G. A method is its ``importance(vjp)``: ``[..., n]``.

    >>> @dataclass(frozen=True, repr=False)
    ... class LInf(ColumnSketch):
    ...     def importance(self, vjp):
    ...         return vjp.G.abs().amax(-2).square()
    """

    passes: ClassVar[float] = 2
    """Operations on each element of G that the importance takes."""

    @abstractmethod
    def importance(self, vjp: Vjp) -> Tensor:
        """wᵢ of ``min Σ wᵢ/pᵢ`` for each column; zero only where the column is zero."""

    def roots(self, vjp: Vjp) -> Tensor:
        """√wᵢ, which p is proportional to; override it where it comes without a square."""
        return self.importance(vjp).sqrt()

    def fold(self, G: Tensor) -> Tensor:
        """A matrix with the importance of ``G: [B, n, L]``, a convolution's; here all of it.

        Override it where a smaller one will do: then no transposed copy of G is made.
        """
        return G.mT.reshape(-1, G.shape[1])

    def atoms(self, vjp: Vjp) -> ColumnAtoms:
        rank = self.rank(vjp.G.shape[-1])
        return ColumnAtoms(water_fill(self.roots(vjp), rank), rank, self.sampling)

    def lasting_atoms(self, vjp: Vjp) -> ColumnAtoms:
        return self.atoms(vjp)

    def atom_count(self, B: int, n: int, d: int) -> int:
        return n

    def cost(self, size: Size, *, lasting: bool = False) -> Cost:
        if not size.sides:
            return Cost(0)
        B, n, d, *_ = size
        r = self.rank(n)
        drawing = drawing_flops(n, r, self.sampling) + r * B
        return Cost(2 * B * r * d * size.sides, self.passes * B * n, drawing)


@dataclass(frozen=True, repr=False)
class ColumnMask(ColumnSketch):
    """Columns of G (output coordinates) with equal probability. Cost 4Brd + O(Bn).

    The paper's per-column mask is ``sampling="independent"``.
    """

    passes: ClassVar[float] = 1  # one sum, so that a non-finite gradient stays visible

    def importance(self, vjp: Vjp) -> Tensor:
        return importance.uniform(vjp.G)

    def fold(self, G: Tensor) -> Tensor:
        return channels.sums(G)


@dataclass(frozen=True, repr=False)
class L1(ColumnSketch):
    """p ∝ ‖gᵢ‖₁ (``root=True``: ∝ √‖gᵢ‖₁). Cost 4Brd + O(Bn): the default choice of the paper.

    Its noise compounds from layer to layer: to train faster, use ``Tokens``.

    >>> sketch = L1(0.1)
    """

    _: KW_ONLY
    root: bool = False

    def importance(self, vjp: Vjp) -> Tensor:
        return importance.l1_norms(vjp.G) if self.root else importance.l1(vjp.G)

    def roots(self, vjp: Vjp) -> Tensor:
        norms = importance.l1_norms(vjp.G)
        return norms.sqrt() if self.root else norms

    def fold(self, G: Tensor) -> Tensor:
        return channels.absolute_sums(G)


@dataclass(frozen=True, repr=False)
class L2(ColumnSketch):
    """p ∝ ‖gᵢ‖₂ (``root=True``: ∝ √‖gᵢ‖₂). Cost 4Brd + O(Bn)."""

    _: KW_ONLY
    root: bool = False

    def importance(self, vjp: Vjp) -> Tensor:
        w = importance.l2(vjp.G)
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

    passes: ClassVar[float] = 3

    def importance(self, vjp: Vjp) -> Tensor:
        return self.roots(vjp).square()

    def roots(self, vjp: Vjp) -> Tensor:
        spread = importance.variance(vjp.G, 0.0 if self.paper else importance.FLOOR)
        return spread.sqrt() if self.root else spread


@dataclass(frozen=True, repr=False)
class Diagonal(ColumnSketch):
    """DS: p ∝ ‖gᵢ‖√(‖Wᵢ‖² + α), the optimum among diagonal sketches. Cost 4Brd + O(Bn + nd).

    Minimises E‖(Ĝ - G)W‖² + α·E‖Ĝ - G‖² over independent column draws: what dX needs, and a
    share of what dW needs. ``paper=True`` is Lemma 3.4, α = 0: then a zero row of W never gets a
    gradient (a zero-initialised layer never trains) and the gradient is **biased**.
    """

    _: KW_ONLY
    paper: bool = False

    sees: ClassVar[str] = "GW"

    def importance(self, vjp: Vjp) -> Tensor:
        floor = 0.0 if self.paper else importance.FLOOR
        return importance.diagonal(vjp.G, vjp.weight(self), floor)

    def fold(self, G: Tensor) -> Tensor:
        return channels.norms(G)

    def cost(self, size: Size, *, lasting: bool = False) -> Cost:
        reads_weight = 2.0 * size.n * size.d if size.sides else 0.0
        return super().cost(size, lasting=lasting).plus(Cost(0, reads_weight))
