"""Noisy curves of a loss against seconds, and the time that one takes over another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

Curve = Sequence[tuple[float, float]]
"""Seconds and the loss then, in order."""
GOALS = 8
"""Losses at which times are compared, over the lower half of the fall."""


def levels(curve: Curve) -> list[tuple[float, float]]:
    """The falling curve nearest to a noisy one: neighbours that rise are replaced by their mean.

    So a way gains nothing from a loss that was low by luck and rose again.

    >>> levels([(0, 5.0), (1, 3.0), (2, 4.0), (3, 2.0)])
    [(0.0, 5.0), (1.5, 3.5), (3.0, 2.0)]
    """
    pools: list[list[tuple[float, float]]] = []
    for point in curve:
        pools.append([point])
        while len(pools) > 1 and _mean(pools[-1])[1] >= _mean(pools[-2])[1]:
            last = pools.pop()
            pools[-1] += last
    return [_mean(pool) for pool in pools]


def _mean(points: Curve) -> tuple[float, float]:
    return fmean(t for t, _ in points), fmean(loss for _, loss in points)


def seconds_to(goal: float, falling: Curve) -> float:
    """When a falling curve comes to ``goal``, between its points by a straight line.

    >>> seconds_to(3.0, [(0, 5.0), (4, 1.0)])
    2.0
    """
    if falling[0][1] <= goal:
        return falling[0][0]
    for (t0, above), (t1, below) in pairwise(falling):
        if below <= goal:
            return t0 + (t1 - t0) * (above - goal) / (above - below)
    raise ValueError(f"the curve does not fall to {goal}")


def time_ratio(exact: Curve, own: Curve) -> float | None:
    """The time that ``own`` takes to a loss over that of ``exact``; None if none fell.

    The geometric mean over losses in the lower half of what both have fallen through. One loss,
    say the lowest, would be met by luck as often as by learning, more often by the slower of two.

    >>> time_ratio([(0, 5.0), (4, 1.0)], [(0, 5.0), (2, 1.0)])
    0.5
    """
    if not all(math.isfinite(loss) for _, loss in (*exact, *own)):
        return None
    both = levels(exact), levels(own)
    top, bottom = min(curve[0][1] for curve in both), max(curve[-1][1] for curve in both)
    if not bottom < top:
        return None
    goals = [top - (top - bottom) * (1 + i / (GOALS - 1)) / 2 for i in range(GOALS - 1)]
    before, after = ([seconds_to(goal, curve) for goal in (*goals, bottom)] for curve in both)
    return math.exp(fmean(math.log(b / a) for a, b in zip(before, after, strict=True)))
