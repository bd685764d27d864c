"""An iso-FLOP table: a sketch that keeps p of the backward trains 1/p times as many epochs."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import Any

from ..lab.selection import PointResult
from ..lab.store import table_path
from ..lab.study import Reading
from ..lab.sweep import Point, Protocol, Sweep
from ..methods import EXACT, METHODS
from ..mnist.study import FIGURES, FINDINGS, MnistCell, MnistStudy

LAST_RUNG = 5
"""The last halving is after a fifth of a long run: early on, rates that are too large lead."""


def longer(cell: Any, p: float) -> Any:
    """The cell with 1/p times as many epochs."""
    epochs, halving = round(cell.epochs / p), cell.halving
    last = max(halving[-2], epochs // LAST_RUNG)
    return replace(cell, epochs=epochs, halving=(*halving[:-2], last, halving[-1]))


@dataclass(frozen=True, kw_only=True)
class IsoFlopStudy(MnistStudy):
    def load(self, preset: str) -> Sweep:
        sweep = super().load(preset)
        cell: Any = sweep.protocol.base
        methods = [m.name for m in METHODS.values() if not set(FIGURES).isdisjoint(m.figures)]
        points = [
            Point(name, "all", p, replace(sweep.protocol, base=longer(cell, p)))
            for name in methods
            for p in ((1.0,) if name == EXACT else sweep.protocol.budgets)
        ]
        return replace(sweep, extras=tuple(sorted(points, key=lambda p: -p.budget)))

    def facts(self, reading: Reading) -> dict[str, Any]:
        return {
            "about": self.describe(reading.sweep.protocol),
            "lines": [_line(s, reading) for s in reading.extras],
            "missing": len(reading.sweep.extras) - len(reading.extras),
            "table_name": table_path(reading.out).name,
        }


def _line(s: PointResult, reading: Reading) -> dict[str, Any]:
    """A point: the mean train loss of its last epoch, at the rate that each seed chose."""
    rows = [reading.results.row(s.point, seed, r.rate_index) for seed, r in s.seeds.items()]
    losses = [row["loss_curve"][-1] or math.inf for row in rows]  # None: diverged
    return {
        "method": s.point.method,
        "budget": s.point.budget,
        "epochs": rows[0]["epochs"],
        "train_loss": statistics.mean(losses),
        "lowest": statistics.mean(min(filter(None, row["loss_curve"])) for row in rows),
        "least": min(losses),
        "most": max(losses),
        "test": s.mean,
    }


ISO_FLOP = IsoFlopStudy(
    name="iso-flop",
    help="train loss at equal nominal cost: 1/p times as many steps",
    title="Train loss at equal nominal cost",
    published={"cpu": "iso-flop"},
    protocol=Protocol(MnistCell(widths=(784, 64, 64, 64, 10)), budgets=(0.5, 0.05)),
    findings=FINDINGS,
    sort_by=("widths", "epochs", "clip"),
)
