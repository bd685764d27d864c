"""What the runs of a contest say: quality against time, and the time to equal quality."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev

from ..lab.store import Row
from .choices import CONTROL, Choice, reported
from .contest import Contest
from .ways import EXACT, TUNER, Way, find_way

LEVEL = 0.95
"""Of the confidence interval."""


@dataclass(frozen=True)
class Curve:
    """Scores on test data by share of the time, one for each seed."""

    way: Way
    batch: int
    rate: float
    points: Mapping[float, Sequence[float]]
    second: Mapping[float, Sequence[float]]
    steps: int
    """In the whole time."""

    @property
    def shares(self) -> list[float]:
        return sorted(self.points)

    def mean(self, share: float, seeds: Sequence[int]) -> float:
        return fmean(self.points[share][seed] for seed in seeds)

    def spread(self, share: float) -> float:
        own = self.points[share]
        return stdev(own) if len(own) > 1 else 0.0

    @property
    def last(self) -> float:
        return fmean(self.points[self.shares[-1]])


@dataclass(frozen=True)
class Ratio:
    """Time to equal quality over that of the best exact control, with its interval.

    ``low`` infinite: not reached in any resample; ``value`` infinite: not reached in the mean.
    """

    value: float
    low: float
    high: float
    floor: float
    """The shortest time that was run: a ratio equal to it is an upper bound."""

    def text(self) -> str:
        """
        >>> Ratio(0.61, 0.55, math.inf, 0.25).text(), Ratio(math.inf, 0.9, math.inf, 0.25).text()
        ('0.61 (0.55 to > 1)', '> 1 (0.90 to > 1)')
        >>> Ratio(math.inf, math.inf, math.inf, 0.25).text()
        '> 1'
        """
        ends = self._one(self.low), self._one(self.high)
        if ends[0] == ends[1] == self._one(self.value):
            return ends[0]  # the same in all resamples: not reached, most often
        return f"{self._one(self.value)} ({ends[0]} to {ends[1]})"

    def _one(self, value: float) -> str:
        if math.isinf(value):
            return "> 1"
        return f"{'≤ ' if value <= self.floor else ''}{value:.2f}"


class Outcome:
    """A contest, the costs of its steps, its stored runs, and what was chosen."""

    def __init__(
        self,
        contest: Contest,
        costs: Mapping[str, float],
        rows: Sequence[Row],
        choices: Sequence[Choice],
    ) -> None:
        self.contest, self.costs = contest, costs
        self.rows = {row["run"]: row for row in rows}
        self.choices = [choice for choice in choices if choice.task == contest.task]

    @cached_property
    def curves(self) -> list[Curve]:
        """Those that are complete in at least one length of time."""
        made = (self._curve(choice) for choice in self.choices if choice.lengths)
        return [curve for curve in made if curve is not None]

    def _curve(self, choice: Choice) -> Curve | None:
        if choice.rate is None:
            return None
        way, points, second, steps = find_way(choice.way), {}, {}, 0
        for share in self.contest.shares:
            rows = self._done(way, choice.batch, choice.rate, share)
            if rows:
                points[share] = [row["test_accuracy"] for row in rows]
                second[share] = [row["second"] for row in rows]
                steps = max(row["steps"] for row in rows)
        return Curve(way, choice.batch, choice.rate, points, second, steps) if points else None

    def _done(self, way: Way, batch: int, rate: float, share: float) -> list[Row]:
        """A run for each seed; none while one is missing."""
        place = self.contest.rates.index(rate)
        runs = reported(self.contest, self.costs, way, batch, share, place)
        done = all(run.identity in self.rows for run in runs)
        return [self.rows[run.identity] for run in runs] if done else []

    @cached_property
    def control(self) -> Curve | None:
        """Exact training at that one of its batch sizes which ends best on test data."""
        sizes = [choice.batch for choice in self.choices if choice.role == CONTROL]
        exact = (curve for curve in self.curves if curve.way.name == EXACT)
        return next((curve for curve in exact if curve.batch in sizes), None)

    def same_batch(self, curve: Curve) -> Curve | None:
        """Exact training at the batch size of a way: what ``advise`` compares with."""
        exact = [c for c in self.curves if c.way.name == EXACT and c.batch == curve.batch]
        return exact[0] if exact else None

    def ratio(
        self, curve: Curve, control: Curve | None = None, *, beyond: bool = False
    ) -> Ratio | None:
        """Over all resamples of the seeds, way and control by the same seeds.

        ``control``: another than exact training at its best. ``beyond``: where a way does not get
        there in the whole time, how much sooner the control has what the way has then.
        """
        control = control or self.control
        if control is None or 1.0 not in control.points:
            return None
        every = range(len(self.contest.seeds))

        def one(seeds: Sequence[int]) -> float:
            found = reached(_means(curve, seeds), control.mean(1.0, seeds))
            if math.isfinite(found) or not beyond or 1.0 not in curve.points:
                return found
            sooner = reached(_means(control, seeds), curve.mean(1.0, seeds))
            return 1 / sooner if sooner > control.shares[0] else math.inf

        resampled = sorted(map(one, itertools.product(every, repeat=len(every))))
        edge = (1 - LEVEL) / 2
        low, high = (resampled[round(q * (len(resampled) - 1))] for q in (edge, 1 - edge))
        return Ratio(one(every), low, high, curve.shares[0])

    def stories(self, curve: Curve) -> list[list[list[float]]]:
        """What its controller decided in the whole time, one list for each seed."""
        rows = self._done(curve.way, curve.batch, curve.rate, 1.0)
        return [row["story"] for row in rows]

    def ends_as(self, curve: Curve) -> Way:
        """The way with a budget that stays which a tuner has become with all seeds; itself, where
        there is none."""
        ends = set(map(kept_in_the_end, self.stories(curve))) if curve.way.control == TUNER else ()
        if len(ends) != 1:
            return curve.way
        (budget,) = ends
        return find_way(EXACT) if budget == 1 else curve.way.fixed(budget)

    def cost(self, curve: Curve) -> float:
        """Of a step, over an exact one at the same batch size; in the mean where budgets move."""
        if curve.way.control:
            return self.contest.length / curve.steps / self.costs[f"/{curve.batch}"]
        own = self.costs[f"{curve.way.sketch}/{curve.batch}"]
        return own / self.costs[f"/{curve.batch}"]


def kept_in_the_end(story: Sequence[Sequence[float]]) -> float:
    """By a controller, in the mean of its groups."""
    return story[-1][1] if story else 1.0


def _means(curve: Curve, seeds: Sequence[int]) -> list[tuple[float, float]]:
    return [(share, curve.mean(share, seeds)) for share in curve.shares]


def reached(points: Sequence[tuple[float, float]], target: float) -> float:
    """The time at which a curve first meets the target, in a line between its points.

    >>> reached([(0.5, 40.0), (1.0, 60.0)], 50.0), reached([(0.5, 40.0)], 50.0)
    (0.75, inf)
    """
    before: tuple[float, float] | None = None
    for now in points:
        if now[1] >= target:
            if before is None:
                return now[0]
            share = (target - before[1]) / (now[1] - before[1])
            return before[0] + share * (now[0] - before[0])
        before = now
    return math.inf
