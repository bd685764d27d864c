"""Does it pay? Accuracy against wall-clock and against honest FLOPs, exact and sketched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..lab.figures import label_axes, picture
from ..lab.pages import write_csv
from ..lab.problem import PROBLEM_FINDINGS, Contest, CostStudy, Problem, ProblemCell, Track
from ..lab.study import Reading
from ..lab.sweep import Protocol
from ..problems import small_vit, wide_mlp

BELOW: dict[str, tuple[float, ...]] = {"mlp": (1.0, 0.5, 0.2), "vit": (4.0, 2.0, 1.0)}
"""The accuracies to be reached: so many points below the best of exact training."""
TASKS = {"mlp": wide_mlp, "vit": small_vit}


@dataclass(frozen=True, kw_only=True)
class PayCell(ProblemCell):
    def make(self, folder: Path | None) -> Problem:
        return TASKS[self.task](self.size == "small")


@dataclass(frozen=True, kw_only=True)
class PayStudy(CostStudy):
    def draw(self, reading: Reading) -> list[Path]:
        written: list[Path] = []
        for task, (known, contest) in self.contests(reading).items():
            written.append(write_csv(reading.out / f"{task}.csv", contest.table(task)))
            draw = partial(_draw, contest=contest, title=known["title"])
            written += picture(reading.out, task, 2, draw)
        return written

    def facts(self, reading: Reading) -> dict[str, Any]:
        parts = []
        for task, (known, contest) in self.contests(reading).items():
            best = max(m["test"] for m in contest.exact[0].moments)
            targets = [max(0.0, round(best - points, 1)) for points in BELOW[task]]
            lines, verdict = outcome_lines(contest, targets), _verdict(contest, max(targets))
            parts.append({"task": task, **known, "targets": targets, "lines": lines, **verdict})
        return {"parts": parts}


def reached(track: Track, target: float, axis: str) -> float:
    """Where on ``axis`` (seconds or cost) the test accuracy first meets ``target``, by linear
    interpolation between moments; infinite if never."""
    before = (0.0, 0.0)
    for moment in track.moments:
        now = (moment[axis], moment["test"])
        if now[1] >= target:
            rise = now[1] - before[1]
            share = (target - before[1]) / rise if rise > 0 and before[0] > 0 else 1.0
            return float(before[0] + share * (now[0] - before[0]))
        before = now
    return math.inf


def outcome_lines(contest: Contest, targets: Sequence[float]) -> list[list[str]]:
    exact = contest.exact[0]
    lines = []
    for way in contest.ways:
        for track in contest.of(way)[:1]:
            cells = [way.label, f"{track.row['learning_rate']:g}", f"{track.row['cost']:.3f}"]
            cells.append(f"{track.step_seconds / exact.step_seconds:.3f}")
            cells.append(f"{max(m['test'] for m in track.moments):.2f}")
            for axis in ("seconds", "cost"):
                cells += [_ratio(track, exact, target, axis) for target in targets]
            lines.append(cells)
    return lines


def _ratio(track: Track, exact: Track, target: float, axis: str) -> str:
    a, b = reached(track, target, axis), reached(exact, target, axis)
    return f"{a / b:.2f}" if math.isfinite(a) and math.isfinite(b) and b > 0 else "-"


def _verdict(contest: Contest, target: float) -> dict[str, Any]:
    """Which ways gain, lose, or never reach the highest of the accuracies."""
    base = reached(contest.exact[0], target, "seconds")
    kinds: dict[str, list[str]] = {"gains": [], "losses": [], "never": []}
    for way in contest.ways[1:]:
        ratio = reached(contest.of(way)[0], target, "seconds") / base
        if math.isfinite(ratio):
            kinds["gains" if ratio < 1 else "losses"].append(f"{way.label} ({ratio:.2f})")
        else:
            kinds["never"].append(way.label)
    return {"target": target, "base": base, **{k: ", ".join(v) or "none" for k, v in kinds.items()}}


def _draw(axes: Sequence[Any], contest: Contest, title: str) -> None:
    named = (("seconds", "seconds of training"), ("cost", "FLOPs, in exact steps"))
    for panel, (axis, text) in zip(axes, named, strict=True):
        for way in contest.ways:
            for track in contest.of(way)[:1]:
                x, y = ([m[key] for m in track.moments] for key in (axis, "test"))
                panel.plot(x, y, marker="o", ms=2, lw=1.2, **way.look)
        best = max((m["test"] for t in contest.tracks for m in t.moments), default=100.0)
        panel.set_ylim(max(0.0, best - (5 if best > 90 else 25)), best + 1)
        label_axes(panel, title, text, "test accuracy (%)")
    axes[0].legend(fontsize=6, loc="lower right")


PAY = PayStudy(
    name="pay",
    help="accuracy against wall-clock and FLOPs",
    out="docs/results/rows-pay",
    title="Does it pay?",
    tasks=tuple(TASKS),
    protocol=Protocol(PayCell(), seeds=(0,), learning_rates=(0, 1, 2), tuning_seeds=1, widen=0),
    findings=PROBLEM_FINDINGS,
    sort_by=("task",),
)
