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


def value_at(place: float, points: Curve) -> float:
    """Between points by a straight line; beyond them that of the nearest.

    >>> [value_at(x, [(0, 5.0), (4, 1.0)]) for x in (-1, 1, 9)]
    [5.0, 4.0, 1.0]
    """
    for (x0, y0), (x1, y1) in pairwise(points):
        if place < x1:
            return y0 + (y1 - y0) * max(0.0, place - x0) / (x1 - x0)
    return points[-1][1]


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
    when_fast = [(-loss, seconds) for seconds, loss in fast]
    logs = []
    for moment in moments:
        loss = value_at(moment, slow)
        if loss < min(slow[0][1], fast[0][1]):
            logs.append(math.log(moment / value_at(-loss, when_fast)))
    if not logs:
        return None
    ratio = math.exp(fmean(logs))
    return ratio if behind else 1 / ratio
