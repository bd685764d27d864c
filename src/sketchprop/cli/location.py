"""Where noise hurts: V when only the first, only the last, or every layer is sketched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.table import Column, Table, words
from ..layers.select import sketchable_layers
from ..meters import Estimate
from ..meters.noise.estimate import divide
from ..meters.noise.variance import measure_variance
from ..meters.restore import restored
from ..sketches import AnySketch
from .specs import Task, UsageError, train

PLACES = ("first", "last", "all")


@dataclass(frozen=True)
class LocationPoint:
    """One method at one budget in one place at one age of training."""

    method: str
    budget: float
    place: str
    steps: int
    relative: Estimate
    """V/σ²."""
    added: Estimate
    sigma2: Estimate
    injected: dict[str, float]
    """V by the layer that injected it."""
    reliable: bool
    """If not, V comes from draws too rare to be met, and is larger."""


@dataclass(frozen=True)
class LocationReport:
    """All points, in the order in which they were measured."""

    first: str
    last: str
    batches: int
    batch_size: int
    points: tuple[LocationPoint, ...]

    @property
    def budgets(self) -> list[float]:
        return sorted({point.budget for point in self.points})

    def headline(self) -> str:
        return ""

    def tables(self) -> list[Table]:
        """A row for each method, budget and age; ``>`` marks a lower bound."""
        columns = (
            *(Column("step"), words("method"), Column("kept", "g")),
            *(Column(f"V/σ², {place}") for place in PLACES),
            Column("last/first", ".2f"),
        )
        here: dict[tuple[int, str, float], dict[str, LocationPoint]] = {}
        for point in self.points:
            here.setdefault((point.steps, point.method, point.budget), {})[point.place] = point
        rows = [
            (
                *key,
                *(("" if p.reliable else "> ") + str(p.relative) for p in map(at.get, PLACES) if p),
                divide(at["last"].relative.value, at["first"].relative.value),
            )
            for key, at in here.items()
        ]
        title = f"V/σ² by place: first is {self.first!r}, last is {self.last!r}"
        return [Table(title, columns, rows)]


def measure_location(
    task: Task,
    methods: Sequence[AnySketch],
    budgets: Sequence[float],
    ages: Sequence[int],
    *,
    batches: int,
    batch_size: int,
    draws: int | None,
    seed: int,
) -> LocationReport:
    """Trains exactly and stops at each of ``ages`` (steps) to measure every combination."""
    layers = list(sketchable_layers(task.model))
    if len(layers) < 2:
        raise UsageError(f"a first and a last layer are needed; the model has {layers}")
    where = {"first": layers[:1], "last": layers[-1:], "all": layers}
    torch.manual_seed(seed)
    points: list[LocationPoint] = []
    trained = 0
    for age in sorted(ages):
        train(task, age - trained)
        trained = age
        held = task.take(batches)
        for method in methods:
            for budget in budgets:
                sketch = method.with_budget(budget)
                for place in PLACES:
                    found = _measure(task, dict.fromkeys(where[place], sketch), held, draws, seed)
                    points.append(LocationPoint(_name(method), budget, place, age, **found))
    return LocationReport(layers[0], layers[-1], batches, batch_size, tuple(points))


def _measure(
    task: Task, sketch: dict[str, AnySketch | None], held: list[Any], draws: int | None, seed: int
) -> dict[str, Any]:
    with restored(task.model, sketch):
        report = measure_variance(task.model, task.loss_fn, held, draws=draws, seed=seed)
    return {
        "relative": report.relative,
        "added": report.added,
        "sigma2": report.sigma2,
        "reliable": report.reliable,
        "injected": {line.layer: line.injected.value for line in report.layers},
    }


def _name(method: AnySketch) -> str:
    """The sketch without its budget."""
    shown = repr(method).partition("(")
    options = shown[2].partition(", ")[2].rstrip(")")
    return f"{shown[0]}({options})" if options else shown[0]
