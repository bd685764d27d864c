"""Runs that last a given time, and which of them there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from torch import nn

from ..lab import ExperimentError
from ..lab.checkpoints import Checkpoints
from ..lab.engine import Job
from ..lab.problem import Problem
from ..lab.store import Row
from ..lab.sweep import Cell, Findings, Run
from ..lab.trainer import Trainer, outputs
from ..tasks.table import TASKS, Task
from .ways import CONTROLS, EXACT, KEPT, PUBLISHED, Way, find_way

FIRST = (1, 2, 3)
"""The places of the rates that are tried first; of the two beside them one may follow."""
SHOWN = 3
"""Batch sizes of exact training that are reported."""
FINALISTS = 2
"""Rates that all seeds try which choose them; the first of these seeds tries more."""
TWO = (0.5, 1.0)
"""Lengths of time that say how soon exact training has what a way has."""


@dataclass(frozen=True, kw_only=True)
class TimedCell(Cell):
    """A way on a task, and how much time it has."""

    task: str = ""
    size: str = "full"
    """``small``: seconds instead of minutes, to see that all parts work."""
    way: str = EXACT
    batch: int = 0
    time: float = 0.0
    """In exact steps at the middle batch size; the rate decays to zero over it."""
    costs: tuple[float, ...] = (1.0,)
    """Of a step, in the same unit; of one at each rung of the ladder, where budgets move."""
    rates: tuple[float, ...] = ()
    """From the largest; ``rate_index`` counts through them."""
    tested: int = 1
    """1: scored on test data; 0: on validation data, to choose a rate."""
    thin: int = 1
    """Of so many batches of test data one is taken."""

    @property
    def network(self) -> str:
        return self.task

    @property
    def steps(self) -> int:
        return max(1, round(self.time / self.costs[0]))

    def learning_rate(self, index: int) -> float:
        return self.rates[index]

    def problem_of(self) -> Problem:
        return replace(_task(self.task).problem(self.size == "small"), batch_size=self.batch)

    def train(self, runs: Sequence[Run], checkpoints: Checkpoints | None) -> list[Findings]:
        return [self._train(run, checkpoints) for run in runs]

    def _train(self, run: Run, checkpoints: Checkpoints | None) -> Findings:
        trainer, second = self.trainer(run)
        found = trainer.train(checkpoints.of(run.identity) if checkpoints else None)
        story = getattr(trainer.control, "story", [])
        return {**found, "steps": trainer.steps, "second": second[0], "story": story}

    def trainer(self, run: Run) -> tuple[Trainer, list[float]]:
        """The run, and where its second score will be."""
        problem, task, second = self.problem_of(), _task(self.task), [0.0]

        def evaluate(model: nn.Module) -> tuple[float, float]:
            if not self.tested:
                return problem.score(*outputs(model, problem.validation())), 0.0
            found = outputs(model, problem.test()[:: self.thin])
            second[0] = task.second(*found) if task.second else 0.0
            return 0.0, problem.score(*found)

        way, control = find_way(self.way), None
        if way.control:
            control = partial(
                CONTROLS[way.control], problem=problem, costs=self.costs, steps=self.steps
            )
        end = round(self.time) if way.control else self.steps
        made = problem.trainer(
            run.learning_rate, run.seed, [end], self.sketch, decay=True, evaluate=evaluate,
            control=control,
        )  # fmt: skip
        return made, second

    def cost(self, runs: int) -> float:
        return runs * self.time


FINDINGS: dict[str, type] = {
    "diverged_epoch": int, "steps": int, "second": float, "loss_curve": list,
    "seconds_curve": list, "story": list,
}  # fmt: skip


def _task(name: str) -> Task:
    if name not in TASKS:
        raise ExperimentError(f"task {name!r} is unknown; use one of {', '.join(sorted(TASKS))}")
    return TASKS[name]


@dataclass(frozen=True)
class Contest:
    """A task, its ways and the time they have: what a preset says."""

    task: str = ""
    size: str = "full"
    length: int = 0
    """The whole time, in exact steps at the middle batch size."""
    batches: tuple[int, ...] = ()
    """Sizes that exact training and ``Tokens(0.3)`` try."""
    unit: int = 0
    """The one whose exact steps are the unit of time; 0: the middle one."""
    published: int = 0
    """The one of the published setting, where what ``advise`` says is held against exact training
    too; 0: none of them."""
    rates: tuple[float, ...] = ()
    ways: tuple[str, ...] = (EXACT, "tokens-0.3", "tokens-0.2", "rows-0.3", "tuner")
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    tuning_seeds: tuple[int, ...] = (100,)
    """They choose rates and batch sizes and are not reported: the first tries all rates, the others
    the best two of those."""
    tuned_at: float = 0.5
    """The share of the time at which rates are chosen."""
    finals: bool = False
    """Whether the best two rates are run in the whole time before one is chosen: where what does
    well early may fail later."""
    shares: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    clocked: tuple[int, ...] = (0,)
    """Seeds with which the winner is run by the clock."""
    thin: int = 1
    trained: bool = True
    """Whether there are runs; else steps are timed and no more: where gradients are exact."""

    @property
    def middle(self) -> int:
        return self.unit or self.batches[len(self.batches) // 2]

    def check(self, where: str) -> Contest:
        _task(self.task)
        for name in self.ways:
            find_way(name)
        if self.trained and (
            len(self.rates) != 5 or sorted(self.rates, reverse=True) != list(self.rates)
        ):
            raise ExperimentError(f"{where}: rates = {list(self.rates)}; give five, falling")
        if EXACT not in self.ways or not self.batches or not self.length:
            raise ExperimentError(f"{where}: length, batches and the way {EXACT!r} are needed")
        if self.middle not in self.batches:
            raise ExperimentError(f"{where}: unit = {self.unit} is none of {list(self.batches)}")
        if self.published and self.published not in self.batches:
            raise ExperimentError(
                f"{where}: published = {self.published} is none of {list(self.batches)}"
            )
        return self

    @property
    def kinds(self) -> list[tuple[str, int]]:
        """Sketches and batch sizes whose steps are to be timed."""
        sketches = [sketch for name in self.ways for sketch in find_way(name).timed]
        return [(sketch, size) for sketch in dict.fromkeys(sketches) for size in self.batches]

    def cell(
        self, way: Way, batch: int, share: float, costs: Mapping[str, float], tested: int
    ) -> TimedCell:
        return TimedCell(
            sketch=way.sketch, task=self.task, size=self.size, way=way.name, batch=batch,
            time=share * self.length, costs=tuple(costs[f"{s}/{batch}"] for s in way.timed),
            rates=self.rates, tested=tested, thin=self.thin,
        )  # fmt: skip


class Choice(NamedTuple):
    """A rate that was chosen."""

    rate_index: int
    score: float
    """On validation data, in the mean over the seeds that chose it."""


@dataclass(frozen=True)
class Plan:
    """The runs of a contest, knowing what steps cost and the scores of runs that are done."""

    contest: Contest
    costs: Mapping[str, float]
    """Of a step of a sketch at a batch size, over an exact one at the middle size."""
    scores: Mapping[str, float]
    """By the identity of runs: on validation data of those that choose, on test data of others."""

    @property
    def sides(self) -> list[tuple[Way, int]]:
        """Each way with each batch size it has, as far as these are known."""
        if not self.contest.trained:
            return []
        found = []
        for way in map(find_way, self.contest.ways):
            sizes = self.contest.batches if way.sizes else self.best_batches(way)
            found += [(way, size) for size in sizes]
        return found

    def tried(self, way: Way, batch: int) -> list[Run]:
        """Those that choose the rate: three, one more where the best is at an edge, and the best
        two again with each further seed."""
        first, *others = self.contest.tuning_seeds
        cell = self.contest.cell(way, batch, self.contest.tuned_at, self.costs, tested=0)
        runs = [Run(cell, place, first) for place in FIRST]
        if not self._known(runs):
            return runs
        beside = {FIRST[0]: FIRST[0] - 1, FIRST[-1]: FIRST[-1] + 1}
        best = max(runs, key=self._score).rate_index
        if best in beside:
            runs.append(Run(cell, beside[best], first))
        if not self._known(runs):
            return runs
        finalists = sorted(runs, key=self._score, reverse=True)[:FINALISTS]
        return runs + [Run(cell, run.rate_index, seed) for seed in others for run in finalists]

    def _known(self, runs: Sequence[Run]) -> bool:
        return all(run.identity in self.scores for run in runs)

    def _score(self, run: Run) -> float:
        return self.scores[run.identity]

    def chosen(self, way: Way, batch: int) -> Choice | None:
        """The best in the mean of those that all seeds tried; ``None`` while a run is missing."""
        return max(self.finalists(way, batch), key=lambda choice: choice.score, default=None)

    def finalists(self, way: Way, batch: int) -> list[Choice]:
        """The rates that all seeds tried; none while a run is missing."""
        runs = self.tried(way, batch)
        if not self._known(runs):
            return []
        last = self.contest.tuning_seeds[-1]
        return [self._mean(run, runs) for run in runs if run.seed == last]

    def _mean(self, run: Run, runs: Sequence[Run]) -> Choice:
        scores = (self._score(r) for r in runs if r.rate_index == run.rate_index)
        return Choice(run.rate_index, fmean(scores))

    def finals(self, way: Way, batch: int) -> list[Run]:
        """Its best two rates in the whole time, by the seeds that choose; none of exact training,
        whose best two are run to the end with the seeds that are reported."""
        if way.name == EXACT or not self.contest.finals or batch not in self.best_batches(way):
            return []
        cell = self.contest.cell(way, batch, 1.0, self.costs, tested=0)
        rates = [choice.rate_index for choice in self._best_two(way, batch)]
        return [Run(cell, index, seed) for seed in self.contest.tuning_seeds for index in rates]

    def _best_two(self, way: Way, batch: int) -> list[Choice]:
        found = sorted(self.finalists(way, batch), key=lambda choice: -choice.score)
        return found[:FINALISTS]

    def best_batch(self, way: Way) -> int | None:
        """The size that did best on validation data; ``None`` while it is not known."""
        return next(iter(self.ranked(way)), None)

    def best_batches(self, way: Way) -> list[int]:
        """The size that is best for it, or for those that it follows; empty: not known yet."""
        leaders = (way.name,) if way.sizes else way.follows
        found = dict.fromkeys(map(self._leading, leaders))
        return [size for size in found if size]

    def _leading(self, name: str) -> int | None:
        if name == PUBLISHED:
            return self.contest.published
        return self.best_batch(find_way(name if name in self.contest.ways else EXACT))

    def ranked(self, way: Way) -> list[int]:
        """Its batch sizes, the one that did best on validation data first; empty: not known yet."""
        found = {size: self.chosen(way, size) for size in self.contest.batches}
        known = {size: choice.score for size, choice in found.items() if choice}
        return sorted(known, key=lambda size: -known[size]) if len(known) == len(found) else []

    def rate_index(self, way: Way, batch: int) -> int | None:
        """Of its reported runs: what was chosen, ``None`` while it is not; with ``finals`` the one
        that did better there. Exact training keeps that one of its ``rivals`` which ends best on
        test data."""
        finals, rivals = self.finals(way, batch), self.rivals(way, batch)
        if finals and self._known(finals):
            return max((self._mean(run, finals) for run in finals), key=lambda c: c.score)[0]
        ended = {index: runs for index, runs in rivals.items() if self._known(runs)}
        if way.name == EXACT and ended:
            return max(ended, key=lambda index: fmean(map(self._score, ended[index])))
        return next(iter(rivals), None)

    def rivals(self, way: Way, batch: int) -> dict[int, list[Run]]:
        """Runs of exact training in the whole time by rate, the chosen one first; none while it is
        not known; of another way what was chosen.

        Exact training has those rates too that others chose at its size, and with ``finals`` its
        own second one: a gain over it must not come from a rate that was chosen early and does not
        fit the whole time.
        """
        indices = [choice.rate_index for choice in self._best_two(way, batch)]
        if way.name != EXACT or not self.contest.finals:
            indices = indices[:1]
        if way.name == EXACT and indices:
            others = [find_way(name) for name in self.contest.ways if name != EXACT]
            found = [self.rate_index(w, batch) for w in others if batch in self.best_batches(w)]
            indices += [index for index in found if index is not None]
        return {index: self._reported(way, batch, 1.0, index) for index in dict.fromkeys(indices)}

    def reported(self, way: Way, batch: int, share: float) -> list[Run]:
        """One for each seed; none while the rate is not chosen."""
        index = self.rate_index(way, batch)
        return [] if index is None else self._reported(way, batch, share, index)

    def _reported(self, way: Way, batch: int, share: float, rate_index: int) -> list[Run]:
        cell = self.contest.cell(way, batch, share, self.costs, tested=1)
        return [Run(cell, rate_index, seed) for seed in self.contest.seeds]

    def shares(self, way: Way, batch: int) -> tuple[float, ...]:
        """The lengths at which it is run: at its best size all it has, at others none.

        Exact training runs to the end at several sizes. All lengths it has at the one that ends
        best, the control; two at its best one on validation data, which most ways follow, at that
        of kept tokens and at the published one: enough to say what these gain or lose at their own
        size.
        """
        every = way.shares or self.contest.shares
        if way.name != EXACT:
            return every if batch in self.best_batches(way) else ()
        if batch == self.control:
            return every
        if batch in (self.best_batch(way), self.kept_batch, self.contest.published):
            return TWO
        return (1.0,) if batch in self._ends else ()

    @property
    def kept_batch(self) -> int | None:
        """The batch size of kept tokens; ``None`` while it is not known."""
        return self.best_batch(find_way(KEPT)) if KEPT in self.contest.ways else None

    @property
    def _ends(self) -> list[int]:
        """The sizes at which exact training runs to the end."""
        found = {*self.ranked(find_way(EXACT))[:SHOWN], self.kept_batch}
        return [size for size in self.contest.batches if size in found]

    @property
    def control(self) -> int | None:
        """That one of them which ends best on test data: the hardest to beat; None: not known."""
        way, best = find_way(EXACT), {}
        for size in self._ends:
            runs = self.reported(way, size, 1.0)
            if not runs or not self._known(runs):
                return None
            best[size] = fmean(map(self._score, runs))
        return max(best, key=lambda size: best[size]) if best else None

    def runs(self) -> Iterator[Run]:
        """All that can be told by now: the whole time first, seed by seed, so that what is known is
        balanced."""
        for way, batch in self.sides:
            yield from self.tried(way, batch)
        for way, batch in self.sides:
            yield from self.finals(way, batch)
        reported = [
            runs[place]
            for place in range(len(self.contest.seeds))
            for way, batch in self.sides
            for runs in self._lengths(way, batch)
            if runs
        ]
        yield from sorted(reported, key=lambda run: -run.cell.time)  # type: ignore[attr-defined]

    def _lengths(self, way: Way, batch: int) -> Iterator[list[Run]]:
        """The whole time first, at each rate that might be the one; the others at that one."""
        shares = sorted(self.shares(way, batch), reverse=True)
        if way.name == EXACT and 1.0 in shares:
            rivals = self.rivals(way, batch).values()
            yield from rivals
            if not (self.settled and all(map(self._known, rivals))):
                return
        if self._known(self.finals(way, batch)):
            for share in shares:
                yield self.reported(way, batch, share)

    @property
    def settled(self) -> bool:
        """Whether all ways have their sizes and rates."""
        ways = map(find_way, self.contest.ways)
        return all(
            (sizes := self.best_batches(way))
            and all(self.chosen(way, n) and self._known(self.finals(way, n)) for n in sizes)
            for way in ways
        )


def scores_of(rows: Sequence[Row]) -> dict[str, float]:
    """What ``Plan`` looks at."""
    names = ("validation_accuracy", "test_accuracy")
    return {row["run"]: row[names[row["tested"]]] for row in rows}


def missing_jobs(
    contest: Contest, costs: Mapping[str, float], rows: Sequence[Row], checkpoints: Path
) -> list[Job]:
    scores = scores_of(rows)
    kept = Checkpoints(checkpoints)
    missing = (run for run in Plan(contest, costs, scores).runs() if run.identity not in scores)
    return [Job((run,), kept) for run in missing]
