"""From runs to points: learning rate and epoch chosen on validation, accuracy from the test set."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .store import Row
from .sweep import Point, Run, best_rate, planned_runs


@dataclass(frozen=True)
class SeedResult:
    """What one seed reached at the learning rate chosen for it."""

    test: float
    best_test: float
    """The paper's 'best accuracy': the highest on the test set over all rates and epochs."""
    rate_index: int
    learning_rate: float
    epoch: int
    clipped: float
    at_edge: bool


@dataclass(frozen=True)
class PointResult:
    """A point over all of its seeds."""

    point: Point
    seeds: Mapping[int, SeedResult]
    ranks: tuple[float, ...]
    runs: int
    diverged: int

    @property
    def tests(self) -> list[float]:
        return [result.test for result in self.seeds.values()]

    @property
    def mean(self) -> float:
        return statistics.mean(self.tests)

    @property
    def median(self) -> float:
        return statistics.median(self.tests)

    @property
    def spread(self) -> float:
        """The standard deviation over seeds, as in the paper."""
        return statistics.stdev(self.tests) if len(self.tests) > 1 else 0.0

    @property
    def best_median(self) -> float:
        return statistics.median(result.best_test for result in self.seeds.values())

    @property
    def learning_rate(self) -> float:
        return statistics.median(result.learning_rate for result in self.seeds.values())

    @property
    def clipped(self) -> float:
        return statistics.mean(result.clipped for result in self.seeds.values())

    @property
    def at_edge(self) -> int:
        return sum(result.at_edge for result in self.seeds.values())


class Results:
    """Stored runs, looked up by the points that they belong to."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {row["run"]: row for row in rows}
        self.scores = {key: row["validation_accuracy"] for key, row in self._rows.items()}

    def row(self, point: Point, seed: int, rate_index: int) -> Row:
        return self._rows[Run(point.cell, rate_index, seed).identity]

    def of(self, point: Point) -> PointResult | None:
        """``None`` while runs are missing."""
        planned = planned_runs(point, self.scores)
        if any(run.identity not in self._rows for run in planned):
            return None
        found: dict[int, dict[int, Row]] = {}
        for run in planned:
            found.setdefault(run.seed, {})[run.rate_index] = self._rows[run.identity]
        seeds = {}
        for choosing, following in point.protocol.groups():
            tried = [run for run in planned if run.seed in choosing]
            best, indices = best_rate(tried, self.scores), [run.rate_index for run in tried]
            for seed in (*choosing, *following):
                row = found[seed][best]
                seeds[seed] = SeedResult(
                    test=row["test_accuracy"],
                    best_test=max(r["best_test_accuracy"] for r in found[seed].values()),
                    rate_index=best,
                    learning_rate=point.cell.learning_rate(best),
                    epoch=row["best_epoch"],
                    clipped=row.get("clipped_fraction", 0.0),
                    at_edge=best in (min(indices), max(indices)),
                )
        rows = [self._rows[run.identity] for run in planned]
        diverged = sum(row.get("diverged_epoch", 0) > 0 for row in rows)
        return PointResult(point, seeds, tuple(rows[0].get("ranks", ())), len(rows), diverged)

    def of_all(self, points: Sequence[Point]) -> list[PointResult]:
        """Of all points that are complete."""
        return [found for point in points if (found := self.of(point)) is not None]
