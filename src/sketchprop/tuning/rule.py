"""The rule: budgets for which time × noise is least. Plain numbers, no tensors.

A step takes T(p) = T₀ + Σ (cᵢ pᵢ + hᵢ), with hᵢ the fixed cost of a sketch, 0 where pᵢ = 1. The
steps that are needed grow with N(p) = 1 + V(p), V(p) = Σ aᵢ xᵢ^γ, xᵢ = 1/pᵢ - 1: V the variance
that sketches add over ‖g‖² + σ², g the mean gradient, σ² the minibatch's variance. For γ = 1 and
h = 0 the minimum of T·N is pᵢ = √(aᵢT/(cᵢN)). Where noise compounds over the layers γ is larger
than 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..meters.noise.pace import DROWNED

LADDER = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1)
"""Few rungs: under ``torch.compile`` each budget compiles once."""
SWEEPS = 20
WORTH = 0.002
"""A unit whose sketch gains less than that is given back to exact."""
CALM = 1 / 5
"""V over ‖g‖² + σ² that a move may lead to: noise grows between two probes."""


@dataclass(frozen=True)
class Problem:
    """Time and noise as functions of the budgets of some units.

    >>> problem = Problem(rest=1.0, slopes=(2.0,), noise=(0.1,))
    >>> problem.time([0.5]), problem.added([0.5]), round(problem.change([0.5]), 3)
    (2.0, 0.1, 0.733)
    """

    rest: float
    """T₀: what no sketch touches."""
    slopes: tuple[float, ...]
    """cᵢ."""
    noise: tuple[float, ...]
    """aᵢ."""
    power: float = 1.0
    """γ."""
    fixed: tuple[float, ...] = ()
    """hᵢ; none: all 0."""

    def time(self, p: Sequence[float]) -> float:
        """T."""
        fixed = self.fixed or (0.0,) * len(p)
        lines = zip(self.slopes, fixed, p, strict=True)
        return self.rest + math.fsum(c * q + (h if q < 1 else 0.0) for c, h, q in lines)

    def parts(self, p: Sequence[float]) -> list[float]:
        """V by unit."""
        return [a * odds(q) ** self.power for a, q in zip(self.noise, p, strict=True)]

    def added(self, p: Sequence[float]) -> float:
        """V."""
        return math.fsum(self.parts(p))

    def score(self, p: Sequence[float]) -> float:
        """T·N, to be made small."""
        return self.time(p) * (1 + self.added(p))

    def change(self, p: Sequence[float]) -> float:
        """T·N over that of exact steps: the predicted time to equal quality; below 1 it pays."""
        return self.score(p) / self.score([1.0] * len(p))


def odds(p: float) -> float:
    """1/p - 1."""
    return 1 / p - 1


def best(problem: Problem, ladder: Sequence[float], now: Sequence[float]) -> list[float]:
    """The budgets on the ladder with the least T·N: from exact, from the lowest rung and from
    where it stands, one unit at a time."""
    starts = ([1.0] * len(now), [min(ladder)] * len(now), list(now))
    return min((_descend(problem, ladder, p) for p in starts), key=problem.score)


def _descend(problem: Problem, ladder: Sequence[float], p: list[float]) -> list[float]:
    units = range(len(p))
    for _ in range(SWEEPS):
        before = list(p)
        for i in units:
            rungs = ladder if problem.slopes[i] > 0 else (1.0,)
            p[i] = min(rungs, key=lambda rung: problem.score([*p[:i], rung, *p[i + 1 :]]))
        if p == before:
            break
    for i in units:
        exact = [*p[:i], 1.0, *p[i + 1 :]]
        if problem.score(exact) <= (1 + WORTH) * problem.score(p):
            p = exact
    return p


def calmed(problem: Problem, p: Sequence[float], ladder: Sequence[float]) -> list[float]:
    """``p`` with the noisiest unit a rung higher, again and again, until V ≤ (‖g‖² + σ²)/5."""
    return _quieter(problem, p, CALM, lambda q: min(rung for rung in ladder if rung > q))


def undrowned(problem: Problem, p: Sequence[float]) -> list[float]:
    """``p`` with the noisiest units exact, until V ≤ (‖g‖² + σ²)/3; most often ``p`` itself."""
    return _quieter(problem, p, DROWNED, lambda q: 1.0)


def _quieter(
    problem: Problem, p: Sequence[float], limit: float, higher: Callable[[float], float]
) -> list[float]:
    p = list(p)
    while problem.added(p) > limit:
        parts = problem.parts(p)
        worst = parts.index(max(parts))
        p[worst] = higher(p[worst])
    return p
