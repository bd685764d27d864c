"""A problem to train on: model, data, loss, and a run on it from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sketchprop as sp

from ..methods import make_sketch
from .checkpoints import FOLDER, Checkpoint, State
from .trainer import (
    Batch,
    Control,
    Recipe,
    Trainer,
    accuracy,
    generator,
    initialised,
    outputs,
)

WARM_UP = 0.05
"""The share of all steps in which the learning rate rises to its value."""
GOING = 60.0
"""Seconds of a trajectory that a kill may cost."""


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
    """Which layers a sketch takes."""
    adam: bool = True
    score: Callable[[Tensor, Tensor], float] = accuracy
    """How good outputs are for targets; higher is better."""
    worst: float = 0.0
    """The score of a run that is lost."""

    def loss_of(self, model: Any, batch: Batch) -> Tensor:
        return self.loss(model(batch[0]), batch[1])

    def prepared(self, sketch: str) -> nn.Module:
        """A new model, sketched as the expression says."""
        made, parsed = self.model(), make_sketch(sketch)
        return made if parsed is None else sp.sketch_(made, parsed, self.inner)

    def trainer(
        self,
        rate: float,
        seed: int,
        marks: Sequence[int],
        sketch: str = "",
        decay: bool = False,
        evaluate: Callable[[nn.Module], tuple[float, float]] | None = None,
        control: Callable[[nn.Module, torch.optim.Optimizer], Control] | None = None,
    ) -> Trainer:
        """A run from its seed, evaluated after each of ``marks``; the last is its end.

        The rate rises over the first steps, then stays or, with ``decay``, falls to zero.
        ``evaluate``: scores on validation and test, where both are not wanted.
        """
        options: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.0}
        if self.adam:
            options = {"optimizer": "adamw", "weight_decay": 0.05}
        warmup = round(WARM_UP * marks[-1])
        recipe = Recipe(learning_rate=rate, steps=marks[-1], warmup=warmup, decay=decay, **options)

        def both(model: nn.Module) -> tuple[float, float]:
            parts = self.validation(), self.test()
            validation, test = (self.score(*outputs(model, part)) for part in parts)
            return validation, test

        return Trainer(
            initialised(lambda: self.prepared(sketch), seed),
            ProblemFeed(self, seed),
            recipe,
            evaluate or both,
            seed,
            marks,
            loss=self.loss,
            control=control,
            worst=self.worst,
        )


class ProblemFeed:
    """Batches as the problem draws them."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem, self.source = problem, generator("batches", seed)

    def first(self) -> Batch:
        return self.problem.draw(generator("flops", 0), self.problem.batch_size)

    def next(self) -> Batch:
        return self.problem.draw(self.source, self.problem.batch_size)

    def state(self) -> State:
        return {"source": self.source.get_state()}

    def load_state(self, state: State) -> None:
        self.source.set_state(state["source"])


def trajectory(
    problem: Problem, steps: Sequence[int], rate: float, folder: Path
) -> Iterator[tuple[int, nn.Module]]:
    """The model after each of ``steps`` of exact training; continues from what is on disk.

    The run's end lies one step behind the last of them: nothing is evaluated.
    """
    if not steps:
        return
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
