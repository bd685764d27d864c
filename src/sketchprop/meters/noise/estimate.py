"""Numbers with their standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance


@dataclass(frozen=True)
class Estimate:
    """A measured mean and how far it may be off.

    >>> print(Estimate(2.0, 0.25))
    2 ± 0.25
    """

    value: float
    error: float
    """Standard error over batches and draws, as if both were drawn afresh."""
    draw_error: float = 0.0
    """The part of it that more draws on the same batches would remove."""

    def __str__(self) -> str:
        finite_error = math.isfinite(self.error)
        return f"{self.value:.3g} ± {self.error:.2g}" if finite_error else f"{self.value:.3g} ± ?"


def over_draws(values: Sequence[Sequence[float]]) -> Estimate:
    """The mean of ``values[batch][draw]``; every batch counts the same.

    The batches' means are independent, so their spread already contains that of the draws.
    """
    means = [fmean(draws) for draws in values]
    within = math.fsum(_variance(draws) / len(draws) for draws in values)
    draw_error = math.sqrt(within) / len(values)
    between = math.sqrt(_variance(means) / len(values))
    return Estimate(fmean(means), max(between, draw_error), draw_error)


def jackknife(count: int, without: Callable[[int], float], value: float) -> Estimate:
    """``value`` with the jackknife error of a statistic: ``without(i)`` leaves batch i out."""
    parts = [without(i) for i in range(count)]
    mean = fmean(parts)
    spread = math.fsum((part - mean) ** 2 for part in parts)
    return Estimate(value, math.sqrt(spread * (count - 1) / count))


def minibatch_variance(deviations: Sequence[float]) -> Estimate:
    """σ² = Σ qₘ/(M - 1) from the qₘ = ‖gₘ - ḡ‖² of M batches; its error is unknown for M = 2."""
    count = len(deviations)
    value = math.fsum(deviations) / (count - 1)
    if count == 2:
        return Estimate(value, math.inf)
    return jackknife(count, lambda i: _variance_without(deviations, i), value)


def variance_ratio(added: Sequence[Sequence[float]], deviations: Sequence[float]) -> Estimate:
    """V/σ²: both come from the same batches, so the error is the jackknife's of the ratio."""
    count = len(deviations)
    means = [fmean(draws) for draws in added]
    sigma2 = math.fsum(deviations) / (count - 1)
    ratio = divide(fmean(means), sigma2)
    draw_error = divide(over_draws(added).draw_error, sigma2)
    if count == 2:
        return Estimate(ratio, math.inf, draw_error)

    def without(i: int) -> float:
        rest = fmean(means[:i] + means[i + 1 :])
        return divide(rest, _variance_without(deviations, i))

    error = jackknife(count, without, ratio).error
    return Estimate(ratio, max(error, draw_error), draw_error)


def divide(a: float, b: float) -> float:
    """a/b, infinite for a positive ``a`` over zero, and 0/0 = 0: nothing was added to nothing."""
    if b == 0:
        return math.inf if a > 0 else 0.0
    return a / b


def _variance_without(deviations: Sequence[float], i: int) -> float:
    count = len(deviations)
    rest = math.fsum(deviations) - deviations[i] * count / (count - 1)
    return max(0.0, rest / (count - 2))


def _variance(values: Sequence[float]) -> float:
    return variance(values) if len(values) > 1 else 0.0
