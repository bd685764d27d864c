"""A problem to train on, the runs on it that spend equal cost, and where they got to."""

from __future__ import annotations

import argparse
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import sketchprop as sp
from sketchprop.layers import select

from ..methods import BATCH, EXACT, METHODS, SAMPLED, colour, make_sketch, share_of
from . import ExperimentError
from .checkpoints import FOLDER, Checkpoint, Checkpoints, State
from .engine import one_thread
from .pages import made_on, read_json, write_json
from .selection import PointResult, Results
from .store import Row
from .study import Reading, SweepStudy
from .sweep import Cell, Findings, Point, Run, Sweep, planned_runs
from .trainer import Batch, Recipe, Trainer, accuracy, generator, initialised, step_flops

EVERYWHERE = "everywhere"
"""The first and last layer are sketched too, so that one draw serves all."""
WARM_UP = 0.05
"""The share of all steps in which the learning rate rises to its value."""
GOING = 60.0
"""Seconds of a trajectory that a kill may cost."""
MEASURED = "measured.json"
LINES = {0.5: ":", 0.3: "-", 0.1: "--"}


@dataclass(frozen=True)
class Problem:
    """A model, its data and how it is trained."""

    name: str
    title: str
    model: Callable[[], nn.Module]
    draw: Callable[[torch.Generator, int], Batch]
    """A batch of so many samples, as training draws them."""
    loss: Callable[[Tensor, Tensor], Tensor]
    validation: Callable[[], Sequence[Batch]]
    test: Callable[[], Sequence[Batch]]
    batch_size: int
    inner: Callable[[nn.Module, str], bool]
    """Which layers a sketch takes that is not ``everywhere``."""
    adam: bool = True
    score: Callable[[nn.Module, Sequence[Batch]], float] = accuracy
    """How good a model is; higher is better."""

    def loss_of(self, model: Any, batch: Batch) -> Tensor:
        return self.loss(model(batch[0]), batch[1])

    def prepared(self, sketch: str, layers: str) -> nn.Module:
        """A new model, sketched as the expression says."""
        made, parsed = self.model(), make_sketch(sketch)
        rule = select.everything if layers == EVERYWHERE else self.inner
        return made if parsed is None else sp.sketch_(made, parsed, rule)

    def size(self, sketch: str) -> int:
        """Of a batch: 'batch(p)' is as costly as rows at p, a forward and two products at p."""
        p = share_of(sketch, BATCH)
        return max(1, round((1 + 2 * p) / 3 * self.batch_size)) if p else self.batch_size

    def step_flops(self, sketch: str = "", layers: str = "all") -> float:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            batch = self.draw(generator("flops", 0), self.size(sketch))
            model = self.prepared(sketch, layers)
            return step_flops(model, self.loss, batch, share_of(sketch, SAMPLED))

    def trainer(
        self,
        rate: float,
        seed: int,
        marks: Sequence[int],
        sketch: str = "",
        layers: str = "all",
        decay: bool = False,
    ) -> Trainer:
        """A run from its seed, evaluated after each of ``marks``; the last is its end.

        The rate rises over the first steps, then stays or, with ``decay``, falls to zero.
        """
        options: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.0}
        if self.adam:
            options = {"optimizer": "adamw", "weight_decay": 0.05}
        warmup = round(WARM_UP * marks[-1])
        recipe = Recipe(learning_rate=rate, steps=marks[-1], warmup=warmup, decay=decay, **options)

        def evaluate(model: nn.Module) -> tuple[float, float]:
            return self.score(model, self.validation()), self.score(model, self.test())

        model = initialised(lambda: self.prepared(sketch, layers), seed)
        feed, sampled = ProblemFeed(self, self.size(sketch), seed), share_of(sketch, SAMPLED)
        return Trainer(model, feed, recipe, evaluate, seed, marks, loss=self.loss, sampled=sampled)


class ProblemFeed:
    """Batches as the problem draws them."""

    def __init__(self, problem: Problem, size: int, seed: int) -> None:
        self.problem, self.size, self.source = problem, size, generator("batches", seed)

    def first(self) -> Batch:
        return self.problem.draw(generator("flops", 0), self.size)

    def next(self) -> Batch:
        return self.problem.draw(self.source, self.size)

    def state(self) -> State:
        return {"source": self.source.get_state()}

    def load_state(self, state: State) -> None:
        self.source.set_state(state["source"])


@lru_cache(maxsize=64)
def step_ratio(problem: Problem, sketch: str, layers: str) -> float:
    """FLOPs of a step over those of an exact one."""
    return problem.step_flops(sketch, layers) / problem.step_flops()


@dataclass(frozen=True, kw_only=True)
class ProblemCell(Cell):
    """A way to make a gradient on a problem. All ways spend the same FLOPs: cheap ones make more
    steps."""

    task: str = ""
    size: str = "full"
    """``small``: seconds instead of minutes, to see that all parts work."""
    length: int = 0
    """In steps of exact training."""
    points: int = 1
    """Evaluations, equally far apart."""
    rates: tuple[float, ...] = ()
    """From the largest; ``learning_rates`` counts through them."""

    @abstractmethod
    def make(self, folder: Path | None) -> Problem:
        """The problem; ``folder`` keeps what has to be trained before it."""

    @property
    def network(self) -> str:
        return self.task

    def learning_rate(self, index: int) -> float:
        if not 0 <= index < len(self.rates):
            raise ExperimentError(
                f"learning_rates has {index}, and rates = {list(self.rates)} has no such place; "
                f"use learning_rates = {list(range(len(self.rates)))}"
            )
        return self.rates[index]

    def problem(self) -> str:
        return "" if self.size in ("full", "small") else f"size = {self.size!r}; use full or small"

    def marks(self, steps: int) -> list[int]:
        return [round(steps * point / self.points) for point in range(1, self.points + 1)]

    def step_cost(self, problem: Problem) -> float:
        """What a step costs over an exact one: by FLOPs, where a study does not measure times."""
        return step_ratio(problem, self.sketch, self.layers)

    def trainer(self, problem: Problem, run: Run) -> tuple[Trainer, float]:
        """The run, and what its step costs over an exact one."""
        ratio = self.step_cost(problem)
        marks = self.marks(max(self.points, round(self.length / ratio)))
        made = problem.trainer(run.learning_rate, run.seed, marks, self.sketch, self.layers)
        return made, ratio

    def stretches(
        self, runs: Sequence[Run], checkpoints: Checkpoints | None
    ) -> Generator[None, None, list[Findings]]:
        found: list[Findings] = []
        for run in runs:
            problem = self.make(checkpoints.folder if checkpoints else None)
            trainer, ratio = self.trainer(problem, run)
            kept = checkpoints.of(run.identity) if checkpoints else None
            yield from trainer.stretches(kept)
            found.append({**trainer.found(), "cost": ratio, "steps": trainer.recipe.steps})
        return found

    def train(self, runs: Sequence[Run], checkpoints: Checkpoints | None) -> list[Findings]:
        going = self.stretches(runs, checkpoints)
        while True:
            try:
                next(going)
            except StopIteration as end:
                found: list[Findings] = end.value
                return found

    def cost(self, runs: int) -> float:
        return float(runs * self.length)


PROBLEM_FINDINGS = {
    "diverged_epoch": int, "steps": int, "cost": float, "loss_curve": list, "seconds_curve": list,
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """A method at a budget, as the pages about cost name it: stored word, label and look."""

    word: str
    label: str
    colour: str
    line: str = "-"

    @property
    def look(self) -> dict[str, Any]:
        return {"color": colour(self.colour), "ls": self.line, "label": self.label}


WORDS = {"samples-one": ("sample", "Rows by sample"), "tokens": ("token", "Rows by token"),
         "default-l1": ("l1", "ℓ1"), "sampled": ("sampled", "sampled_backward")}  # fmt: skip


def way_of(point: Point) -> Way:
    method, p = METHODS[point.method], point.budget
    if method.name == EXACT:
        return Way("exact", "exact", method.colour)
    line = LINES.get(p, "-.")
    if method.name == "batch":
        share = f"{(1 + 2 * p) / 3:.2f}"
        return Way(f"batch-{share}", f"batch × {share}", method.colour, line)
    word, label = WORDS.get(method.name, (method.name, method.label))
    look = "rcs" if method.name == "sampled" else method.colour
    return Way(f"{word}-{p:g}", f"{label}, {p:g}", look, line)


@dataclass(frozen=True)
class Track:
    """A stored run and where it was at each evaluation."""

    way: Way
    row: Row
    chosen: bool

    @property
    def moments(self) -> list[dict[str, float]]:
        """Step, cost (in exact steps), seconds, loss since the last one, accuracies in percent."""
        row = self.row
        count = len(row["test_curve"])
        steps = [round(row["steps"] * point / count) for point in range(1, count + 1)]
        seconds = accumulate(row["seconds_curve"])
        names = ("step", "cost", "seconds", "loss", "validation", "test")
        curves = (row["loss_curve"], row["validation_curve"], row["test_curve"])
        lines = zip(steps, (s * row["cost"] for s in steps), seconds, *curves, strict=True)
        return [dict(zip(names, line, strict=True)) for line in lines]

    @property
    def step_seconds(self) -> float:
        """Median over stretches of the mean time of a step."""
        ends = [(0, 0.0), *((m["step"], m["seconds"]) for m in self.moments)]
        times = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(ends) if b[0] > a[0]]
        return float(median(times))

    @property
    def final(self) -> float:
        """Test accuracy at the moment that is best on validation."""
        return float(max(self.moments, key=lambda m: m["validation"])["test"])


@dataclass(frozen=True)
class Contest:
    """All runs on one task: ways in the order of the preset."""

    tracks: tuple[Track, ...]

    def of(self, way: Way) -> list[Track]:
        """The runs of a way at the rate that was chosen for it, by seed."""
        return [track for track in self.tracks if track.way == way and track.chosen]

    @property
    def ways(self) -> list[Way]:
        return list(dict.fromkeys(track.way for track in self.tracks))

    @property
    def exact(self) -> list[Track]:
        return self.of(self.ways[0])

    def table(self, name: str) -> list[dict[str, Any]]:
        """All moments of all runs."""
        return [
            {
                "task": name,
                "way": track.way.word,
                "rate": track.row["learning_rate"],
                "seed": track.row["seed"],
                "cost": moment["cost"],
                "steps": track.row["steps"],
                "chosen": track.chosen,
                **moment,
            }
            for track in self.tracks
            for moment in track.moments
        ]


def contest_of(results: Results, found: Sequence[PointResult]) -> Contest:
    """First the seed that tried all rates, then the others."""
    tracks = [
        Track(way_of(s.point), results.row(s.point, run.seed, run.rate_index),
              run.rate_index == s.seeds[run.seed].rate_index)
        for s in found
        for run in sorted(planned_runs(s.point, results.scores), key=lambda run: run.learning_rate)
    ]  # fmt: skip
    seeds = list(dict.fromkeys(track.row["seed"] for track in tracks))
    return Contest(tuple(sorted(tracks, key=lambda track: seeds.index(track.row["seed"]))))


@dataclass(frozen=True, kw_only=True)
class CostStudy(SweepStudy):
    """Ways on several tasks at equal cost, trained in rotation; each task has a part of the page.

    ``measured.json`` has for each task its title, the machine, and what else was measured.
    """

    tasks: tuple[str, ...]
    engine: str = "rotation"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--task", choices=self.tasks, help="only this one")

    def select(self, sweep: Sweep, options: argparse.Namespace) -> tuple[list[str], list[Point]]:
        points = sweep.select([], extras=True)
        return [], [p for p in points if options.task in (None, task_of(p))]

    def measure(self, sweep: Sweep, points: Sequence[Point], out: Path) -> None:
        known = read_json(out / MEASURED) if (out / MEASURED).is_file() else {}
        for task in dict.fromkeys(map(task_of, points)):
            own = [p for p in points if task_of(p) == task]
            with one_thread():
                known[task] = {"machine": made_on(), **self.measure_task(own, out)}
        write_json(out / MEASURED, {task: known[task] for task in self.tasks if task in known})

    def measure_task(self, points: Sequence[Point], out: Path) -> dict[str, Any]:
        """What the page says of a task beside its runs."""
        cell = points[0].cell
        assert isinstance(cell, ProblemCell)
        return {"title": cell.make(out / FOLDER).title}

    def contests(self, reading: Reading) -> dict[str, tuple[dict[str, Any], Contest]]:
        """What was measured and what was trained, by task."""
        known = read_json(reading.out / MEASURED)
        return {
            task: (known[task], contest_of(reading.results, found))
            for task in known
            if (found := [s for s in reading.extras if task_of(s.point) == task])
        }


def task_of(point: Point) -> str:
    assert isinstance(point.cell, ProblemCell)
    return point.cell.task


def trajectory(
    problem: Problem, steps: Sequence[int], rate: float, folder: Path
) -> Iterator[tuple[int, nn.Module]]:
    """The model after each of ``steps`` of exact training; continues from what is on disk.

    The run's end lies one step behind the last of them: nothing is evaluated.
    """
    trainer = problem.trainer(rate, 0, [max(steps) + 1])
    going = Checkpoint(folder / FOLDER / f"{problem.name}-going.pt", GOING)
    for step in steps:
        kept = Checkpoint(folder / FOLDER / f"{problem.name}-{step}.pt", every=0.0)
        if state := kept.load():
            trainer.load_state(state)
        elif step:
            state = going.load()
            if state and trainer.steps < state["numbers"]["steps"] <= step:
                trainer.load_state(state)
            trainer.run_to(step, going)
            kept.offer(trainer.state)
        yield step, trainer.model
    going.path.unlink(missing_ok=True)
