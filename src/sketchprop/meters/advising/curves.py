"""Noisy curves of a loss against seconds, and the time that one takes over another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

Curve = Sequence[tuple[float, float]]
"""Seconds and the loss then, in order."""
MOMENTS, FIRST = 8, 0.3
"""So many moments of the slower curve are compared, from this share of its time on."""


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


def loss_at(moment: float, falling: Curve) -> float:
    """Between the points of a falling curve by a straight line, its last loss behind them.

    >>> loss_at(1.0, [(0, 5.0), (4, 1.0)]), loss_at(9.0, [(0, 5.0), (4, 1.0)])
    (4.0, 1.0)
    """
    if moment <= falling[0][0]:
        return falling[0][1]
    for (t0, above), (t1, below) in pairwise(falling):
        if moment < t1:
            return above + (below - above) * (moment - t0) / (t1 - t0)
    return falling[-1][1]


def time_ratio(exact: Curve, other: Curve) -> float | None:
    """The time that ``other`` takes to a loss over that of ``exact``; None if none fell.

    The geometric mean over moments of the slower one: when had the faster one its loss? One loss,
    say the lowest, would be met by luck as often as by learning, more often by the slower of two.

    >>> round(time_ratio([(0, 5.0), (4, 1.0)], [(0, 5.0), (2, 3.5), (4, 2.0)]), 6)
    1.333333
    """
    if not all(math.isfinite(loss) for _, loss in (*exact, *other)):
        return None
    slow, fast = levels(other), levels(exact)
    behind = slow[-1][1] >= fast[-1][1]
    if not behind:
        slow, fast = fast, slow
    end = slow[-1][0]
    moments = [end * (FIRST + (1 - FIRST) * i / (MOMENTS - 1)) for i in range(MOMENTS)]
    logs = []
    for moment in moments:
        loss = loss_at(moment, slow)
        if loss < min(slow[0][1], fast[0][1]):
            logs.append(math.log(moment / seconds_to(loss, fast)))
    if not logs:
        return None
    ratio = math.exp(fmean(logs))
    return ratio if behind else 1 / ratio
