"""Does it pay? ρ(V)(‖g‖² + σ² + V) ≤ ρ(0)(‖g‖² + σ²).

The paper's criterion, ρ(V)(σ² + V) ≤ ρ(0)σ², is its limit for a mean gradient g of zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from .noise.estimate import Estimate


@dataclass(frozen=True)
class Verdict:
    """SGD needs ∝ ‖g‖² + σ² + V steps of cost ρ: the change of the cost to a given accuracy."""

    ANSWERS: ClassVar[tuple[str, ...]] = ("pays", "certain")

    basis: str
    """What ρ is: "time" or "FLOPs"."""
    cost: float
    """ρ(V)/ρ(0): a sketched step over an exact one."""
    steps: float
    """(‖g‖² + σ² + V)/(‖g‖² + σ²): how many times more steps."""
    change: float
    """Their product: below 1 sketching pays, 0.8 means a fifth less to the same accuracy."""
    error: float
    """Its standard error."""

    @property
    def pays(self) -> bool:
        return self.change <= 1

    @property
    def certain(self) -> bool:
        """Whether the change differs from 1 by more than two standard errors."""
        return abs(self.change - 1) > 2 * self.error


def criterion(
    relative: Estimate,
    cost: float,
    cost_error: float = 0.0,
    basis: str = "time",
    signal: float = 0.0,
) -> Verdict:
    """The verdict for V/σ², the cost ratio ρ(V)/ρ(0) and ``signal``, ‖g‖²/σ².

    Errors are propagated to first order; that of ``signal`` is not in them.

    >>> criterion(Estimate(0.5, 0.0), 0.6).pays
    True
    >>> criterion(Estimate(0.5, 0.0), 0.7).pays
    False
    >>> criterion(Estimate(0.5, 0.0), 0.7, signal=1.0).pays
    True
    """
    steps = 1 + relative.value / (1 + signal)
    error = math.hypot(cost * relative.error / (1 + signal), steps * cost_error)
    return Verdict(basis, cost, steps, cost * steps, error)
