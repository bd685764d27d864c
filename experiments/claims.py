"""The paper's claims as comparisons, each with an exact test over seeds.

Two series are compared seed by seed: both start from the same weights and see the same batches.
The difference of a seed is the mean over budgets; under 'no difference' each sign is as likely as
the other, so the p-value is a finite count over all sign patterns.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .methods import METHODS
from .selection import Summary

LEVEL = 0.05
LOW_BUDGET = 0.1
CLOSE = 1.0
"""Percentage points within which curves count as close."""
ENVELOPE = 0.2
"""Percentage points by which another curve may pass above an upper envelope."""
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
    def verdict(self) -> str:
        if self.p_above <= LEVEL:
            return CONFIRMED
        return NOT_CONFIRMED if self.p_below <= LEVEL else UNDECIDED


def all_layers(*names: str) -> list[Series]:
    return [(name, "all") for name in names]


def pairs(
    better: Sequence[Series], worse: Sequence[Series], margin: float = 0.0
) -> tuple[Comparison, ...]:
    both = itertools.product(better, worse)
    return tuple(Comparison(a, b, margin=margin) for a, b in both if a != b)


_PROXIES = all_layers("l1", "l1-root", "l2", "l2-root", "var", "var-root")
_LOCATED = ("element", "sample", "ds", "l1", "rcs", "gsv")
_SKETCHES = all_layers("l1", "ds", "gsv", "rcs")

CLAIMS = (
    Claim(
        "1a",
        f"Exact (correlated) sampling is above independent sampling at low budgets "
        f"(p ≤ {LOW_BUDGET:g}).",
        tuple(
            Comparison((name, "all"), (f"{name}-independent", "all"), LOW_BUDGET)
            for name in ("l1", "ds", "gsv", "rcs")
        ),
    ),
    Claim(
        "1b",
        "Data-dependent sketches are above the three uniform masks.",
        pairs(all_layers("ds", "rcs"), all_layers("element", "sample", "column")),
    ),
    Claim(
        "2a",
        f"The proxies are close to each other (within {CLOSE:g} point).",
        pairs(_PROXIES, _PROXIES, CLOSE),
    ),
    Claim(
        "2a",
        f"ℓ1 lies on the upper envelope of the proxies (none is {ENVELOPE:g} points above it).",
        pairs(all_layers("l1"), _PROXIES[1:], ENVELOPE),
    ),
    Claim(
        "2b",
        "Spectral methods are above coordinate methods.",
        pairs(all_layers("gsv", "rcs"), all_layers("ds", "l1")),
    ),
    Claim("2b", "G-SV is above its square root.", pairs(all_layers("gsv"), all_layers("gsv-root"))),
    Claim(
        "location",
        "A sketch in the last layer alone hurts more than one in the first layer alone.",
        tuple(Comparison((name, "first"), (name, "last")) for name in _LOCATED),
    ),
    Claim(
        "1b",
        "Data-dependent sketches are above uniform columns of the same, exact size.",
        pairs(_SKETCHES, all_layers("control-columns")),
        clause="control",
    ),
    Claim(
        "2b",
        "Data-dependent sketches are above one uniform sample mask for all layers, which is a "
        "smaller minibatch.",
        pairs(_SKETCHES, all_layers("control-samples")),
        clause="control",
    ),
    Claim(
        "2b",
        "Rows drawn by importance are above one uniform sample mask for all layers.",
        pairs(all_layers("rows"), all_layers("control-samples")),
        clause="ours",
    ),
)


def check(comparison: Comparison, found: Mapping[Key, Summary]) -> Outcome | None:
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
