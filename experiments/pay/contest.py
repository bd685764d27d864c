"""What a preset says of a task, and runs that last a given time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from ..lab import ExperimentError
from ..lab.checkpoints import Checkpoints
from ..lab.problem import Problem
from ..lab.sweep import Cell, Findings, Run
from ..lab.trainer import Trainer, outputs
from ..tasks.table import TASKS, Task
from .ways import CONTROLS, EXACT, KEPT, MEASURING, Way, find_way


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
        if way.control and way.control not in CONTROLS:
            raise ExperimentError(f"{way.label} is archived: the page of pay names the commit")
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

    def stretches(self, runs: int) -> list[tuple[float, int]]:
        return [(self.time, runs)]


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
    """Sizes that exact training tries."""
    unit: int = 0
    """The one whose exact steps are the unit of time; 0: the middle one."""
    published: int = 0
    """The one of the published setting, where what ``advise`` says is held against exact training
    too; 0: none of them."""
    rates: tuple[float, ...] = ()
    ways: tuple[str, ...] = (EXACT, "tokens-0.3", "tokens-0.2", "rows-0.3", "tuner")
    lead: str = KEPT
    """The way that tries batch sizes as exact training does."""
    tried_sizes: int = 0
    """How many of them, those that are best for exact training; 0: all."""
    best_budget: bool = False
    """Whether of kept tokens at budgets that stay only the best on validation data is reported."""
    ended_sizes: int = 3
    """Batch sizes of exact training that are reported."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    tuning_seeds: tuple[int, ...] = (100,)
    """They choose rates and batch sizes and are not reported: the first tries all rates, the others
    the best two of those."""
    tuned_at: float = 0.5
    """The share of the time at which rates are chosen."""
    near: bool = False
    """Whether only exact training at ``unit`` tries all rates, and the others those that are near
    to what is best there: where whole runs choose them."""
    finals: bool = False
    """Whether the best two rates are run in the whole time before one is chosen: where what does
    well early may fail later."""
    shares: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    clocked: tuple[int, ...] = (0,)
    """Seeds with which the winner is run by the clock."""
    thin: int = 1
    trained: bool = True
    """Whether there are runs; else steps are timed and no more: where gradients are exact."""
    goal: float = 1.0
    """The time to equal quality that was wanted; where nothing is trained, of a step."""
    shown: str = ""
    """The way that the task is there for; empty: the best one is shown first."""

    @property
    def middle(self) -> int:
        return self.unit or self.batches[len(self.batches) // 2]

    def check(self, where: str) -> Contest:
        _task(self.task)
        for name in (*self.ways, self.lead):
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
        # A tuner's probes measure, and are paid for one by one.
        once = MEASURING * costs[f"/{batch}"] if way.measures and not way.control else 0.0
        return TimedCell(
            sketch=way.sketch, task=self.task, size=self.size, way=way.name, batch=batch,
            time=share * self.length - once, costs=tuple(costs[f"{s}/{batch}"] for s in way.timed),
            rates=self.rates, tested=tested, thin=self.thin,
        )  # fmt: skip
