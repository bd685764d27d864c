"""FLOPs of a backward: how large it is, what a sketch makes of it."""

from __future__ import annotations

import math
from typing import NamedTuple


class Size(NamedTuple):
    """A weight matrix in backward: ``B`` rows, ``n`` outputs, ``d`` inputs, and what it owes."""

    B: int
    n: int
    d: int
    input_grad: bool = True
    weight_grad: bool = True
    part: str = "rows"
    """In a block: "rows" of a branch, "queries", "keys", or "exact"."""

    @property
    def sides(self) -> int:
        """How many of dX and dW are asked for."""
        return self.input_grad + self.weight_grad

    @property
    def exact_flops(self) -> float:
        """2Bnd for each of dX and dW."""
        return 2.0 * self.B * self.n * self.d * self.sides


class Cost(NamedTuple):
    """FLOPs of a sketched backward, by what they are for."""

    products: float
    """Matrix products with W and X."""
    scoring: float = 0.0
    """To make the atoms, but for matrix products; a planner may spread it over steps."""
    drawing: float = 0.0
    """In each step: probabilities, the draw, gathers; but for matrix products."""
    scoring_products: float = 0.0
    """Matrix products to make the atoms."""
    drawing_products: float = 0.0
    """Matrix products to make Ĝ of the kept atoms."""

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def overhead(self) -> float:
        """What is not a matrix product: torch's flop counter does not see it."""
        return self.scoring + self.drawing

    def plus(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


def drawing_flops(atoms: int, rank: float, sampling: str) -> float:
    """Probabilities and draw: a sort and six operations for each atom, then the sampler.

    A draw of a fixed size takes three operations for each atom and a search for each kept one;
    independent coins take one comparison for each atom and a sort of the mask.
    """
    log = math.log2(max(2, atoms))
    if sampling == "fixed":
        return atoms * (log + 9) + rank * (log + 4)
    return atoms * (2 * log + 7) + 3 * rank
