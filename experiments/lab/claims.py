"""Claims as comparisons, each with an exact test over seeds.

Two series are compared seed by seed: both start from the same weights and see the same batches.
The difference of a seed is the mean over budgets; under 'no difference' each sign is as likely as
the other, so the p-value is a finite count over all sign patterns.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..methods import METHODS
from .selection import PointResult

LEVEL = 0.05
STUDENT = (12.71, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""The t of a two-sided level of 5 %, for two seeds and more."""
CONFIRMED, NOT_CONFIRMED, UNDECIDED = "confirmed", "not confirmed", "undecided"

Series = tuple[str, str]
"""Method and place."""
Key = tuple[str, str, float]
"""Method, place and budget."""


@dataclass(frozen=True)
class Comparison:
    """``better`` lies above ``worse`` minus ``margin``."""

    better: Series
    worse: Series
    highest_budget: float = 1.0
    margin: float = 0.0

    def __str__(self) -> str:
        slack = f" - {self.margin:g}" if self.margin else ""
        return f"{_label(self.better)} > {_label(self.worse)}{slack}"


@dataclass(frozen=True)
class Claim:
    figure: str
    text: str
    comparisons: tuple[Comparison, ...]
    clause: str = field(default="the paper", kw_only=True)


@dataclass(frozen=True)
class Outcome:
    """A comparison, decided or not: mean difference in points, p-values of either direction."""

    comparison: Comparison
    difference: float
    error: float
    p_above: float
    p_below: float
    seeds: int

    @property
    def interval(self) -> tuple[float, float]:
        return confidence(self.difference, self.error, self.seeds)

    @property
    def verdict(self) -> str:
        if self.p_above <= LEVEL:
            return CONFIRMED
        return NOT_CONFIRMED if self.p_below <= LEVEL else UNDECIDED


def confidence(mean: float, error: float, seeds: int) -> tuple[float, float]:
    """The interval of 95 %, by Student's t over seeds."""
    reach = STUDENT[min(seeds, len(STUDENT) + 1) - 2] * error
    return mean - reach, mean + reach


def all_layers(*names: str) -> list[Series]:
    return [(name, "all") for name in names]


def pairs(
    better: Sequence[Series], worse: Sequence[Series], margin: float = 0.0
) -> tuple[Comparison, ...]:
    both = itertools.product(better, worse)
    return tuple(Comparison(a, b, margin=margin) for a, b in both if a != b)


def check(comparison: Comparison, found: Mapping[Key, PointResult]) -> Outcome | None:
    """``None`` where a series was not run."""
    budgets = [
        budget
        for method, place, budget in found
        if (method, place) == comparison.better
        and budget <= comparison.highest_budget
        and (*comparison.worse, budget) in found
    ]
    if not budgets:
        return None
    seeds = sorted(found[(*comparison.better, budgets[0])].seeds)
    differences = [
        statistics.mean(
            found[(*comparison.better, b)].seeds[seed].test
            - found[(*comparison.worse, b)].seeds[seed].test
            for b in budgets
        )
        for seed in seeds
    ]
    moved = [d + comparison.margin for d in differences]
    error = statistics.stdev(differences) / len(seeds) ** 0.5 if len(seeds) > 1 else float("nan")
    return Outcome(
        comparison,
        statistics.mean(differences),
        error,
        sign_flip(moved),
        sign_flip([-d for d in moved]),
        len(seeds),
    )


def sign_flip(differences: Sequence[float]) -> float:
    """P(mean ≥ the observed one) when every sign is a fair coin: exact, over 2ⁿ patterns.

    >>> sign_flip([1.0, 2.0, 3.0])
    0.125
    """
    observed = sum(differences) - 1e-9
    patterns = itertools.product(*((d, -d) for d in differences))
    count = sum(sum(pattern) >= observed for pattern in patterns)
    return count / float(2 ** len(differences))


def verdict(outcomes: Sequence[Outcome | None]) -> str:
    """A claim holds if each of its comparisons does, and fails if one of them is reversed."""
    found = [outcome.verdict for outcome in outcomes if outcome is not None]
    if NOT_CONFIRMED in found:
        return NOT_CONFIRMED
    complete = len(found) == len(outcomes) and found
    return CONFIRMED if complete and set(found) == {CONFIRMED} else UNDECIDED


def _label(series: Series) -> str:
    name, place = series
    return METHODS[name].label + ("" if place == "all" else f" ({place} layer)")
