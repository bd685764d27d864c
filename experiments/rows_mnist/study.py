"""Rows by importance and ``sampled_backward`` beside the paper's methods: MNIST, 5 epochs.

Accuracy against the budget and against the honest cost of a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import sketchprop as sp
from sketchprop.core.stopwatch import in_turns
from sketchprop.layers import select
from sketchprop.zoo import mlp

from ..lab.engine import one_thread
from ..lab.figures import budget_axis, label_axes, picture
from ..lab.pages import made_on, read_json, write_csv, write_json
from ..lab.selection import PointResult
from ..lab.study import Reading
from ..lab.sweep import Point, Protocol, Sweep
from ..lab.trainer import Batch, step_flops
from ..methods import EXACT, METHODS, SAMPLED, colour, make_sketch, share_of
from ..mnist.study import FINDINGS, MnistCell, MnistStudy

CRITERIA = (("rows", 0.1, 0.3), ("rows", 0.05, 1.2), ("sampled", 0.1, 0.3), ("sampled", 0.05, 1.2))
"""Method, budget, and by how many points it may stay below exact training."""
COSTS = "costs.json"
ROUNDS = 200
"""In which the time of a step is taken; two in the smoke preset."""
Costs = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class RowsMnistStudy(MnistStudy):
    def figures_asked(self, options: Any) -> list[str]:
        return []

    def measure(self, sweep: Sweep, points: Sequence[Point], out: Path) -> None:
        with one_thread():
            cells = step_costs(sweep.extras, 2 if sweep.name == "smoke" else ROUNDS)
            write_json(out / COSTS, {"machine": made_on(), "cells": cells})

    def draw(self, reading: Reading) -> list[Path]:
        results, costs = reading.extras, read_json(reading.out / COSTS)["cells"]
        written = [write_csv(reading.out / "summary.csv", [_line(s, costs) for s in results])]
        title = self.describe(reading.sweep.protocol)

        def draw(axes: Sequence[Any]) -> None:
            _draw(axes, results, costs, title)

        return [*written, *picture(reading.out, "rows-mnist", 3, draw)]

    def facts(self, reading: Reading) -> dict[str, Any]:
        results, known = reading.extras, read_json(reading.out / COSTS)
        costs = known["cells"]
        exact = next(s for s in results if s.point.method == EXACT)
        drawn = [k for k in costs if not METHODS[k.split("/")[0]].control and k[:5] != EXACT]
        return {
            "about": self.describe(reading.sweep.protocol),
            "machine": known["machine"],
            "faster": [k for k in drawn if costs[k]["time"] < 1],
            "results": [(s, costs[name_of(s.point)]) for s in results],
            "exact": exact,
            "criteria": [
                {
                    "method": METHODS[name],
                    "budget": p,
                    "allowed": allowed,
                    "lost": exact.mean - s.mean,
                }
                for name, p, allowed in CRITERIA
                for s in results
                if (s.point.method, s.point.budget) == (name, p)
            ],
        }


def step_costs(points: Sequence[Point], rounds: int) -> dict[str, dict[str, float]]:
    """For each point the FLOPs and the time of a step over those of an exact one.

    One step alone, with the library's own layers and functions and no optimizer. A shared sample
    mask is a smaller minibatch, and costs what that costs.
    """
    steps = {name_of(point): _Step(point) for point in points}
    flops = {key: step.flops() for key, step in steps.items()}
    actions: list[Callable[[], object]] = list(steps.values())
    seconds = in_turns(actions, rounds, torch.device("cpu"))
    taken = dict(zip(steps, map(statistics.median, seconds), strict=True))
    exact = next(name_of(p) for p in points if p.method == EXACT)
    return {
        key: {
            "flops": flops[key] / flops[exact],
            "time": taken[key] / taken[exact],
            "ms": 1e3 * taken[key],
        }
        for key in steps
    }


class _Step:
    """Forward and backward of a point's model on a batch."""

    def __init__(self, point: Point) -> None:
        cell = point.cell
        assert isinstance(cell, MnistCell)
        count, sketch = cell.batch_size, make_sketch(cell.sketch)
        self.model, self.share = mlp(*cell.widths), share_of(cell.sketch, SAMPLED)
        if METHODS[point.method].control:
            count = max(1, round(point.budget * count))
        elif sketch is not None:
            sp.sketch_(self.model, sketch, select.everything)
        self.batch: Batch = torch.rand(count, cell.widths[0]), torch.randint(0, 10, (count,))

    def flops(self) -> float:
        return step_flops(self.model, F.cross_entropy, self.batch, self.share)

    def __call__(self) -> None:
        self.model.zero_grad()
        x, y = self.batch
        if self.share:
            sp.sampled_backward(self.model, F.cross_entropy, x, y, self.share)
        else:
            F.cross_entropy(self.model(x), y).backward()  # type: ignore[no-untyped-call]


def name_of(point: Point) -> str:
    return f"{point.method}/{point.budget:g}"


def _line(s: PointResult, costs: Costs) -> dict[str, Any]:
    return {
        "method": s.point.method,
        "budget": s.point.budget,
        "test_median": s.median,
        "test_std": s.spread,
        "test_by_seed": " ".join(f"{test:.2f}" for test in s.tests),
        "learning_rate_median": s.learning_rate,
        "rates_at_edge": s.at_edge,
        "clipped_fraction": s.clipped,
        "runs": s.runs,
        **{f"step_{k}": v for k, v in costs[name_of(s.point)].items()},
    }


def _draw(axes: Sequence[Any], results: Sequence[PointResult], costs: Costs, title: str) -> None:
    exact = next(s for s in results if s.point.method == EXACT)
    texts = ("budget", "FLOPs of a step over exact", "time of a step over exact")
    for panel, text, kind in zip(axes, texts, ("", "flops", "time"), strict=True):
        for name, method in METHODS.items():
            own = [s for s in results if s.point.method == name and name != EXACT]
            own.sort(key=lambda s: s.point.budget)
            if own:
                at = [costs[name_of(s.point)][kind] if kind else s.point.budget for s in own]
                look = {"color": colour(method.colour), "ls": method.line, "label": method.label}
                means, spreads = [s.mean for s in own], [s.spread for s in own]
                panel.errorbar(at, means, spreads, marker="o", ms=3, lw=1.2, **look)
        panel.axhline(exact.mean, color="k", lw=1, label="exact")
        label_axes(panel, title, text, "test accuracy (%)")
    budget_axis(axes[0], sorted({s.point.budget for s in results if s is not exact}))
    axes[0].legend(fontsize=6, loc="lower right")


ROWS_MNIST = RowsMnistStudy(
    name="rows-mnist",
    help="rows by importance beside the paper's methods, on MNIST",
    out="docs/results/rows-mnist",
    title="Rows by importance on MNIST",
    protocol=Protocol(MnistCell(), stack=20),
    findings=FINDINGS,
    sort_by=("widths", "epochs", "clip"),
)
