"""Does it pay? Accuracy against wall-clock and against honest FLOPs, exact and sketched."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

import sketchprop as sp

from . import sheet
from .loop import Contest, Task, Way, compete
from .tasks import small_vit, wide_mlp

FOLDER = "docs/results/rows-pay"
EXACT = Way("exact", "exact", "baseline")


def _way(name: str, label: str, look: str, budget: float, **options: Any) -> Way:
    line = {0.5: ":", 0.3: "-", 0.1: "--"}[budget]
    return Way(f"{name}-{budget:g}", f"{label}, {budget:g}", look, line=line, **options)


def rows(budget: float, unit: str) -> Way:
    everywhere = unit == "sample"
    sketch = f'Rows({budget:g}, unit="{unit}")'
    look = "rows" if everywhere else "gsv"
    return _way(unit, f"Rows by {unit}", look, budget, sketch=sketch, everywhere=everywhere)


def sampled(budget: float) -> Way:
    return _way("sampled", "sampled_backward", "rcs", budget, sampled=budget)


def l1(budget: float) -> Way:
    return _way("l1", "ℓ1", "l1", budget, sketch=f"L1({budget:g})")


def smaller_batch(budget: float) -> Way:
    """As costly as rows at ``budget``: one forward and two products of the backward at it."""
    share = (1 + 2 * budget) / 3
    name, label = f"batch-{share:.2f}", f"batch × {share:.2f}"
    return Way(name, label, "sample", batch=share, line={0.3: "-", 0.1: "--"}[budget])


MLP_WAYS = (EXACT, smaller_batch(0.3), smaller_batch(0.1), rows(0.3, "sample"),
            rows(0.1, "sample"), sampled(0.3), sampled(0.1), l1(0.3), l1(0.1))  # fmt: skip
VIT_WAYS = (EXACT, smaller_batch(0.3), rows(0.5, "token"), rows(0.3, "token"),
            rows(0.3, "sample"), sampled(0.3), l1(0.3))  # fmt: skip

MLP_RATES, VIT_RATES = (0.2, 0.4, 0.8), (3e-4, 7e-4, 1.5e-3)
PRESETS: dict[str, dict[str, Contest]] = {
    "smoke": {
        "mlp": Contest(MLP_WAYS[:1] + MLP_WAYS[3:6], (0.1,), (0,), 6, 2),
        "vit": Contest(VIT_WAYS, (1e-3, 2e-3), (0,), 6, 2),
    },
    "cpu": {
        "mlp": Contest(MLP_WAYS, MLP_RATES, (0,), 1000, 16),
        "vit": Contest(VIT_WAYS, VIT_RATES, (0,), 300, 8),
    },
}
BELOW: dict[str, tuple[float, ...]] = {"mlp": (1.0, 0.5, 0.2), "vit": (4.0, 2.0, 1.0)}
"""The accuracies to be reached: so many points below the best of exact training."""
TASKS: dict[str, Callable[[bool], Task]] = {"mlp": wide_mlp, "vit": small_vit}


def run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    sp.keep_pages()
    out = Path(options.out or FOLDER)
    chosen = [options.task] if options.task else list(TASKS)
    if not options.stored:
        for name in chosen:
            task = TASKS[name](options.preset == "smoke")
            results = compete(task, PRESETS[options.preset][name], out)
            content = {"machine": sheet.made_on(), "title": task.title, "runs": results}
            sheet.write_json(out / f"{name}.json", content)
    found = {name: sheet.read_json(out / f"{name}.json") for name in TASKS if _stored(out, name)}
    for path in write_results(found, options.preset, out):
        sys.stdout.write(f"{path}\n")
    return 0


def _stored(out: Path, name: str) -> bool:
    return (out / f"{name}.json").is_file()


def write_results(found: dict[str, Any], preset: str, out: Path) -> list[Path]:
    written: list[Path] = []
    parts = [
        f"# Does it pay? Preset `{preset}`",
        "All ways spend the same FLOPs (forward, backward, scores and draws; the optimizer's left "
        "out), so a cheap way makes more steps. They train in turns in one process on one thread, "
        "allocator pinned, so that a slow minute meets all; the clock runs in steps only, not "
        "while evaluating. The learning rate is constant after a short warm-up and chosen for each "
        "way on validation images; accuracy is that of the test images. "
        "'batch ×' is the control: a smaller batch at the cost of rows at 0.3 or 0.1. The "
        "accuracies to be reached are set by the best of exact training. "
        "One seed: differences of a point, and of a tenth in time, mean nothing.",
    ]
    for name, content in found.items():
        contest, runs = PRESETS[preset][name], content["runs"]
        targets = accuracies(runs, BELOW[name])
        written.append(sheet.write_csv(out / f"{name}.csv", flat(runs)))
        draw = partial(_draw, contest=contest, runs=runs, title=content["title"])
        written += sheet.picture(out, name, 2, draw)
        parts += [f"## {content['title']}", _verdict(contest, runs, targets)]
        parts += [outcome_table(contest, runs, targets), f"![accuracy]({name}.png)"]
        parts.append(
            f"{sheet.stamp(f'python -m experiments pay --preset {preset}', content['machine'])} "
            f"All moments of all runs: [{name}.csv]({name}.csv)."
        )
    written.append(sheet.write_page(out / "README.md", parts))
    return written


def flat(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**{k: v for k, v in run.items() if k != "moments"}, **moment}
        for run in runs
        for moment in run["moments"]
    ]


def chosen_runs(runs: Sequence[dict[str, Any]], way: Way) -> list[dict[str, Any]]:
    return [run for run in runs if run["chosen"] and run["way"] == way.name]


def accuracies(runs: Sequence[dict[str, Any]], below: Sequence[float]) -> list[float]:
    """Points below the best of exact training, to a tenth."""
    best = max(moment["test"] for moment in chosen_runs(runs, EXACT)[0]["moments"])
    return [max(0.0, round(best - points, 1)) for points in below]


def reached(run: dict[str, Any], target: float, axis: str) -> float:
    """Where on ``axis`` (seconds or cost) the test accuracy first meets ``target``, by linear
    interpolation between moments; infinite if never."""
    before = (0.0, 0.0)
    for moment in run["moments"]:
        now = (moment[axis], moment["test"])
        if now[1] >= target:
            rise = now[1] - before[1]
            share = (target - before[1]) / rise if rise > 0 and before[0] > 0 else 1.0
            return float(before[0] + share * (now[0] - before[0]))
        before = now
    return math.inf


def step_seconds(run: dict[str, Any]) -> float:
    """Median over stretches of the mean time of a step."""
    ends = [(0, 0.0), *((m["step"], m["seconds"]) for m in run["moments"])]
    times = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(ends) if b[0] > a[0]]
    return float(median(times))


def outcome_table(
    contest: Contest, runs: Sequence[dict[str, Any]], targets: Sequence[float]
) -> str:
    exact = chosen_runs(runs, EXACT)[0]
    header = ["way", "rate", "FLOPs of a step", "time of a step", "best test accuracy",
              *(f"time to {t:g} %" for t in targets),
              *(f"FLOPs to {t:g} %" for t in targets)]  # fmt: skip
    lines = []
    for way in contest.ways:
        for run in chosen_runs(runs, way)[:1]:
            cells = [way.label, f"{run['rate']:g}", f"{run['cost']:.3f}"]
            cells.append(f"{step_seconds(run) / step_seconds(exact):.3f}")
            cells.append(f"{max(m['test'] for m in run['moments']):.2f}")
            for axis in ("seconds", "cost"):
                for target in targets:
                    cells.append(_ratio(run, exact, target, axis))
            lines.append(cells)
    note = "Steps, times and FLOPs are ratios to exact; below 1 is a net gain. -: not reached."
    return f"{sheet.markdown(header, lines)}\n\n{note}"


def _ratio(run: dict[str, Any], exact: dict[str, Any], target: float, axis: str) -> str:
    a, b = reached(run, target, axis), reached(exact, target, axis)
    return f"{a / b:.2f}" if math.isfinite(a) and math.isfinite(b) and b > 0 else "-"


def _verdict(contest: Contest, runs: Sequence[dict[str, Any]], targets: Sequence[float]) -> str:
    """In words, for the highest of the accuracies."""
    exact = chosen_runs(runs, EXACT)[0]
    target = max(targets)
    base = reached(exact, target, "seconds")
    gains: list[str] = []
    losses: list[str] = []
    never: list[str] = []
    for way in contest.ways[1:]:
        run = chosen_runs(runs, way)[0]
        ratio = reached(run, target, "seconds") / base
        kind = never if not math.isfinite(ratio) else gains if ratio < 1 else losses
        kind.append(f"{way.label} ({ratio:.2f})" if math.isfinite(ratio) else way.label)
    return (
        f"Wall-clock to {target:g} % as a ratio to exact training ({base:.0f} s). "
        f"**Net gain**: {', '.join(gains) or 'none'}. **Net loss**: {', '.join(losses) or 'none'}. "
        f"Not reached at this cost: {', '.join(never) or 'none'}."
    )


def _draw(
    axes: Sequence[Any], contest: Contest, runs: Sequence[dict[str, Any]], title: str
) -> None:
    named = (("seconds", "seconds of training"), ("cost", "FLOPs, in exact steps"))
    for panel, (axis, text) in zip(axes, named, strict=True):
        for way in contest.ways:
            for run in chosen_runs(runs, way)[:1]:
                x = [m[axis] for m in run["moments"]]
                y = [m["test"] for m in run["moments"]]
                look = {"color": sheet.colour(way.colour), "ls": way.line, "label": way.label}
                panel.plot(x, y, marker="o", ms=2, lw=1.2, **look)
        best = max((m["test"] for run in runs for m in run["moments"]), default=100.0)
        panel.set_ylim(max(0.0, best - (5 if best > 90 else 25)), best + 1)
        sheet.dress(panel, title, text, "test accuracy (%)")
    axes[0].legend(fontsize=6, loc="lower right")
