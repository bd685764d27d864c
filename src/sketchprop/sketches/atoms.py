"""Sketches that keep columns or rows of G: a method is its weights."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from ..core.compact import CompactGradient, KeptColumns, KeptRows, scaled, take_columns, take_rows
from ..core.importance import column_sums
from ..core.probabilities import water_fill
from .amortised import AmortisedSketch
from .base import AtomSketch, Plan


@dataclass(frozen=True, repr=False)
class ColumnSketch(AmortisedSketch):
    """Atoms are the columns of G. A method is its ``weights(G, W)``: ``[..., n]``.

    >>> @dataclass(frozen=True, repr=False)
    ... class LInf(ColumnSketch):
    ...     def weights(self, G, W):
    ...         return G.abs().amax(-2).square()
    """

    @abstractmethod
    def weights(self, G: Tensor, W: Tensor | None) -> Tensor:
        """wᵢ for each column; zero only where the column is zero."""

    def roots(self, G: Tensor, W: Tensor | None) -> Tensor:
        """√wᵢ; to be overridden where it comes without a square."""
        return self.weights(G, W).sqrt()

    def fold(self, G: Tensor) -> Tensor:
        """A matrix with the column weights of ``G: [B, n, L]``, a convolution's; here all of it.

        Override it where a smaller one will do: then no transposed copy of G is made.
        """
        return G.mT.reshape(-1, G.shape[1])

    def atom_count(self, B: int, n: int, d: int) -> int:
        return n

    def product_flops(self, B: int, n: int, d: int) -> float:
        return 4 * B * self.rank(n) * d

    def planning_flops(self, B: int, n: int, d: int) -> float:
        if not self.partial:
            return super().planning_flops(B, n, d)
        scoring = self.scoring_flops(self.scored_rows(B), n, d) / self.refresh_every
        return scoring + self._solving_flops(n, self.rank(n)) + B * (n + self.rank(n))

    def full_plan(self, G: Tensor, W: Tensor | None) -> Plan:
        return Plan(water_fill(self.roots(G, W), self.rank(G.shape[-1])))

    partial_plan = full_plan

    def follow(self, plan: Plan, G: Tensor, u: Tensor) -> CompactGradient:
        if self.partial:
            # Columns that are not kept are not looked at; a non-finite one must be seen.
            plan = Plan(plan.probabilities + (0 * column_sums(G)).sum(-1, keepdim=True))
        return super().follow(plan, G, u)

    def keep(self, G: Tensor, plan: Plan, index: Tensor, scale: Tensor) -> KeptColumns:
        return KeptColumns(index, scaled(take_columns(G, index), scale.unsqueeze(-2)), G.shape[-1])


class RowSketch(AtomSketch):
    """Atoms are the rows of G. A method is its ``weights(G, W)``: ``[..., B]``."""

    @abstractmethod
    def weights(self, G: Tensor, W: Tensor | None) -> Tensor:
        """w_b for each row; zero only where the row is zero."""

    def atom_count(self, B: int, n: int, d: int) -> int:
        return B

    def product_flops(self, B: int, n: int, d: int) -> float:
        return 4 * self.rank(B) * n * d

    def plan(self, G: Tensor, W: Tensor | None) -> Plan:
        return Plan(water_fill(self.weights(G, W).sqrt(), self.rank(G.shape[-2])))

    def keep(self, G: Tensor, plan: Plan, index: Tensor, scale: Tensor) -> KeptRows:
        return KeptRows(index, scaled(take_rows(G, index), scale.unsqueeze(-1)), G.shape[-2])
