"""One training loop for several ways to make a gradient, run in turns on one machine.

All ways spend the same honest cost (FLOPs of forward, backward, scores and draws), so a cheap way
makes more steps. They train in turns, a stretch of one after a stretch of another, so that a slow
minute of the machine meets all of them. The clock runs during steps only, not while evaluating.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sketchprop as sp
from sketchprop.layers import select
from sketchprop.meters import measure_flops

from .methods import make_sketch
from .mnist import generator

Batch = tuple[Tensor, Tensor]
WARM_UP = 0.05
"""The share of all steps in which the learning rate rises to its value; constant after it."""


@dataclass(frozen=True)
class Way:
    """How the gradient of a step is made."""

    name: str
    label: str
    colour: str
    sketch: str = ""
    """As the command line takes it; empty: exact."""
    everywhere: bool = False
    """Whether the first and last layer are sketched too, so that one draw serves all."""
    sampled: float = 0.0
    """The budget of ``sampled_backward``, if that is what makes the gradient."""
    batch: float = 1.0
    """The share of the batch: below 1 the control of a smaller one."""
    line: str = "-"


@dataclass(frozen=True)
class Task:
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

    def prepared(self, way: Way) -> nn.Module:
        """A new model, sketched as ``way`` says."""
        model = self.model()
        sketch = make_sketch(way.sketch)
        if sketch is not None:
            sp.sketch_(model, sketch, select.everything if way.everywhere else self.inner)
        return model

    def loss_of(self, model: Any, batch: Batch) -> Tensor:
        return self.loss(model(batch[0]), batch[1])

    def size(self, way: Way) -> int:
        return max(1, round(way.batch * self.batch_size))

    def step_flops(self, way: Way) -> float:
        """FLOPs of a step: forward, backward, scores and draws; the optimizer's are left out."""
        torch.manual_seed(0)
        batch = self.draw(generator("flops", 0), self.size(way))
        model = self.prepared(way)
        report = measure_flops(model, self.loss_of, batch)
        if not way.sampled:
            return report.forward + report.sketched_backward
        r = max(1, round(way.sampled * self.batch_size))
        kept = measure_flops(model, self.loss_of, (batch[0][:r], batch[1][:r]))
        return report.forward + kept.forward + kept.exact_backward


@dataclass(frozen=True)
class Moment:
    """Where a run stood when it was evaluated; accuracies in percent."""

    step: int
    cost: float
    """In steps of exact training, by FLOPs."""
    seconds: float
    loss: float
    """Mean over the steps since the last moment."""
    validation: float
    test: float


class Trainer:
    """One run: a way, a learning rate and a seed. Continues from its file if there is one."""

    def __init__(
        self,
        task: Task,
        way: Way,
        rate: float,
        seed: int,
        ratio: float,
        length: float,
        points: int,
        file: Path | None = None,
    ) -> None:
        self.task, self.way, self.rate, self.seed = task, way, rate, seed
        self.ratio, self.points, self.file = ratio, points, file
        self.steps = max(points, round(length / ratio))
        torch.manual_seed(seed)
        self.model = task.prepared(way)
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer
        if task.adam:
            self.optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.05, fused=True)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=rate)
        self.batches = generator("batches", seed)
        self.random = torch.get_rng_state()
        self.step, self.seconds = 0, 0.0
        self.moments: list[Moment] = []
        if file is not None and file.is_file():
            self._restore(torch.load(file, weights_only=True))

    @property
    def dead(self) -> bool:
        return bool(self.moments) and not math.isfinite(self.moments[-1].loss)

    def run_to(self, point: int) -> None:
        """Trains up to the evaluation number ``point``, evaluates, and saves."""
        if len(self.moments) >= point:
            return
        target = round(self.steps * point / self.points)
        losses: list[float] = []
        if not self.dead:
            torch.set_rng_state(self.random)
            self.model.train()
            while self.step < target:
                batch = self.task.draw(self.batches, self.task.size(self.way))
                start = time.perf_counter()
                loss = self._one(batch)
                self.seconds += time.perf_counter() - start
                losses.append(float(loss))
            self.random = torch.get_rng_state()
        mean = sum(losses) / len(losses) if losses else math.nan
        accuracies = [0.0, 0.0]
        if math.isfinite(mean):
            accuracies = [accuracy(self.model, s()) for s in (self.task.validation, self.task.test)]
        self.step = target
        cost = self.step * self.ratio
        self.moments.append(Moment(target, cost, self.seconds, mean, *accuracies))
        if self.file is not None:
            self._save(self.file)

    def _one(self, batch: Batch) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, (self.step + 1) / max(1.0, WARM_UP * self.steps))
        self.optimizer.zero_grad()
        x, y = batch
        if self.way.sampled:
            loss = sp.sampled_backward(self.model, self.task.loss, x, y, self.way.sampled)
        else:
            loss = self.task.loss(self.model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.step += 1
        return loss.detach()

    def _save(self, file: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "batches": self.batches.get_state(),
            "random": self.random,
            "step": self.step,
            "seconds": self.seconds,
            "moments": [asdict(moment) for moment in self.moments],
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".part")
        torch.save(state, partial)
        partial.replace(file)

    def _restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches.set_state(state["batches"])
        self.random = state["random"]
        self.step, self.seconds = state["step"], state["seconds"]
        self.moments = [Moment(**moment) for moment in state["moments"]]

    def result(self) -> dict[str, Any]:
        return {
            "task": self.task.name,
            "way": self.way.name,
            "rate": self.rate,
            "seed": self.seed,
            "cost": self.ratio,
            "steps": self.steps,
            "moments": [asdict(moment) for moment in self.moments],
        }


def accuracy(model: nn.Module, batches: Sequence[Batch]) -> float:
    """In percent, of the targets that are not -100."""
    was, right, count = model.training, 0, 0
    model.eval()
    with torch.no_grad():
        for x, y in batches:
            wanted = y != -100
            right += int(((model(x).argmax(-1) == y) & wanted).sum())
            count += int(wanted.sum())
    model.train(was)
    return 100.0 * right / max(1, count)


@dataclass(frozen=True)
class Contest:
    """Which ways compete on a task, and for how long."""

    ways: tuple[Way, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    length: int
    """In steps of exact training."""
    points: int
    """Evaluations, equally far apart in cost."""


def compete(task: Task, contest: Contest, folder: Path) -> list[dict[str, Any]]:
    """Trains all ways in turns, each with every learning rate to the end.

    With the first seed each way takes its best rate on validation, which the other seeds follow.
    """
    exact = task.step_flops(contest.ways[0])
    ratios = {way.name: task.step_flops(way) / exact for way in contest.ways}
    order = random.Random(0)

    def trainer(way: Way, rate: float, seed: int) -> Trainer:
        file = folder / "checkpoints" / f"{task.name}-{way.name}-{rate:g}-{seed}.pt"
        ratio = ratios[way.name]
        return Trainer(task, way, rate, seed, ratio, contest.length, contest.points, file)

    def train(trainers: Sequence[Trainer]) -> None:
        for point in range(1, contest.points + 1):
            for one in order.sample(trainers, len(trainers)):
                one.run_to(point)

    tried = [trainer(way, rate, contest.seeds[0]) for way in contest.ways for rate in contest.rates]
    train(tried)

    def tested(one: Trainer) -> float:
        return max(moment.validation for moment in one.moments)

    best = [max((t for t in tried if t.way is way), key=tested) for way in contest.ways]
    results = [{**t.result(), "chosen": t in best} for t in tried]
    for seed in contest.seeds[1:]:
        again = [trainer(t.way, t.rate, seed) for t in best]
        train(again)
        results += [{**t.result(), "chosen": True} for t in again]
    return results
