"""Rows by importance and ``sampled_backward`` beside the paper's methods: MNIST, 5 epochs.

Accuracy against the budget and against the honest cost of a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import sketchprop as sp
from sketchprop.core.stopwatch import in_turns
from sketchprop.layers import select
from sketchprop.meters import measure_flops
from sketchprop.zoo import mlp

from . import sheet
from .engine import ENGINES, Progress, run_sweep
from .methods import COLOURS, EXACT, METHODS, make_sketch
from .mnist import sampled_share
from .mnist_study import MNIST, MnistCell, MnistProtocol, describe
from .selection import Results, Summary
from .store import Store, read_rows, write_table
from .study import told_choice, told_widening
from .sweep import Cell, Point, Sweep

FOLDER = "docs/results/rows-mnist"
CRITERIA = (("rows", 0.1, 0.3), ("rows", 0.05, 1.2), ("sampled", 0.1, 0.3), ("sampled", 0.05, 1.2))
"""Method, budget, and by how many points it may stay below exact training."""
ROUNDS = {"smoke": 2, "cpu": 200}


def run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    sp.keep_pages()
    sweep = replace(MNIST, name="rows-mnist").load(options.preset)
    out = Path(options.out or FOLDER)
    if options.stored:
        rows, costs = read_rows(out, MNIST.schema), sheet.read_json(out / "costs.json")
    else:
        with Store(out, MNIST.schema) as store:
            progress = None if options.quiet else Progress()
            points = sweep.select([], extras=True)
            run_sweep(points, store, ENGINES["processes"], options.workers, progress)
            rows = store.rows()
        write_table(rows, out, MNIST.schema)
        costs = {"machine": sheet.made_on(), "cells": step_costs(sweep, ROUNDS[options.preset])}
        sheet.write_json(out / "costs.json", costs)
    summaries = Results(rows).summaries(sweep.extras)
    for path in write_results(sweep, summaries, costs, options.preset, out):
        sys.stdout.write(f"{path}\n")
    return 0


def step_costs(sweep: Sweep, rounds: int) -> dict[str, dict[str, float]]:
    """For each point the FLOPs and the time of a step over those of an exact one.

    One step alone, with the library's own layers and functions and no optimizer. A shared sample
    mask is a smaller minibatch, and costs what that costs.
    """
    assert isinstance(sweep.protocol, MnistProtocol)
    B = sweep.protocol.batch_size
    x = torch.rand(B, sweep.protocol.widths[0])
    y = torch.randint(0, 10, (B,))
    flops: dict[str, float] = {}
    actions: dict[str, Callable[[], object]] = {}
    for point in sweep.extras:
        key = name_of(point)
        flops[key] = _flops(point, x, y)
        actions[key] = _step(point, x, y)
    seconds = in_turns(list(actions.values()), rounds, torch.device("cpu"))
    taken = dict(zip(actions, map(statistics.median, seconds), strict=True))
    exact = next(name_of(p) for p in sweep.extras if p.method == EXACT)
    return {
        key: {
            "flops": flops[key] / flops[exact],
            "time": taken[key] / taken[exact],
            "ms": 1e3 * taken[key],
        }
        for key in flops
    }


def name_of(point: Point) -> str:
    return f"{point.method}/{point.budget:g}"


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _model(cell: Cell) -> torch.nn.Module:
    assert isinstance(cell, MnistCell)
    model = mlp(*cell.widths)
    sketch = make_sketch(cell.sketch)
    if sketch is not None and cell.layers == "all":
        sp.sketch_(model, sketch, select.everything)
    return model


def _kept(point: Point) -> int:
    return max(1, round(point.budget * point.protocol.batch_size))


def _flops(point: Point, x: torch.Tensor, y: torch.Tensor) -> float:
    model, r = _model(point.cell), _kept(point)
    if METHODS[point.method].control:
        x, y = x[:r], y[:r]
    report = measure_flops(model, _loss, (x, y))
    if not sampled_share(point.cell):
        return report.forward + report.sketched_backward
    kept = measure_flops(model, _loss, (x[:r], y[:r]))
    return report.forward + kept.forward + kept.exact_backward


def _step(point: Point, x: torch.Tensor, y: torch.Tensor) -> Callable[[], object]:
    model, share = _model(point.cell), sampled_share(point.cell)
    if METHODS[point.method].control:
        x, y = x[: _kept(point)], y[: _kept(point)]

    def step() -> None:
        model.zero_grad()
        if share:
            sp.sampled_backward(model, F.cross_entropy, x, y, share)
        else:
            _loss(model, (x, y)).backward()  # type: ignore[no-untyped-call]

    return step


def write_results(
    sweep: Sweep, summaries: Sequence[Summary], costs: dict[str, Any], preset: str, out: Path
) -> list[Path]:
    cells = costs["cells"]
    written = [sheet.write_csv(out / "summary.csv", [_line(s, cells) for s in summaries])]
    title = describe(sweep.protocol)
    written += sheet.picture(
        out, "rows-mnist", 3, lambda axes: _draw(axes, summaries, cells, title)
    )
    written.append(sheet.write_page(out / "README.md", _page(sweep, summaries, costs, preset)))
    return written


def _line(s: Summary, cells: dict[str, Any]) -> dict[str, Any]:
    return {
        "method": s.point.method,
        "budget": s.point.budget,
        "test_median": s.median,
        "test_std": s.spread,
        "test_by_seed": " ".join(f"{r.test:.2f}" for r in s.seeds.values()),
        "learning_rate_median": s.learning_rate,
        "rates_at_edge": s.at_edge,
        "clipped_fraction": s.clipped,
        "runs": s.runs,
        **{f"step_{k}": v for k, v in cells[name_of(s.point)].items()},
    }


def _mean(s: Summary) -> float:
    return statistics.mean(r.test for r in s.seeds.values())


def _page(
    sweep: Sweep, summaries: Sequence[Summary], costs: dict[str, Any], preset: str
) -> list[str]:
    exact = next(s for s in summaries if s.point.method == EXACT)
    rows = []
    for s in summaries:
        cost = costs["cells"][name_of(s.point)]
        difference = _mean(s) - _mean(exact)
        rows.append(
            [
                METHODS[s.point.method].label,
                f"{s.point.budget:g}",
                f"{_mean(s):.2f} ± {s.spread:.2f}",
                "" if s is exact else f"{difference:+.2f}",
                f"{cost['flops']:.3f}",
                f"{cost['time']:.2f}",
                f"{s.learning_rate:.3g}",
                f"{s.at_edge}/{len(s.seeds)}",
                f"{s.clipped:.0%}",
            ]
        )
    header = ["method", "kept", "test accuracy", "against exact", "FLOPs of a step",
              "time of a step", "learning rate", "at edge", "clipped"]  # fmt: skip
    return [
        f"# Rows by importance on MNIST: preset `{preset}`",
        f"{describe(sweep.protocol)}. SGD, gradient clipping at norm {sweep.protocol.clip:g} as in "
        f"the paper, learning rates on a grid; {told_widening(sweep.protocol)}. "
        f"{sweep.protocol.validation_rows} training images are kept apart: "
        f"{told_choice(sweep.protocol, 'the test set')}; mean ± standard deviation over seeds. "
        "FLOPs (forward, scores, decompositions and draws included) and time are those of a step "
        f"without its optimizer, as ratios to exact. {_time_text(costs['cells'])}",
        "`rows by importance`: every layer draws rows of G by ‖g_b‖; what the last layer keeps, "
        "all others keep. `sampled_backward`: the function itself. The control is one uniform "
        "sample mask for all layers, a smaller minibatch. ℓ1, G-SV and RCS are the paper's, "
        "literally.",
        "## The criteria",
        _criteria(summaries, exact),
        "## All points",
        sheet.markdown(header, rows),
        "![accuracy against budget, FLOPs and time](rows-mnist.png)",
        f"{sheet.stamp(f'python -m experiments rows-mnist --preset {preset}', costs['machine'])} "
        "All points: [summary.csv](summary.csv), all runs: [results.csv](results.csv).",
    ]


def _time_text(cells: dict[str, dict[str, float]]) -> str:
    drawn = {k: c for k, c in cells.items() if not METHODS[k.split("/")[0]].control}
    faster = [k for k, c in drawn.items() if c["time"] < 1 and not k.startswith(EXACT)]
    if faster:
        return f"Faster than exact, by time: {', '.join(faster)}."
    return (
        "By time no sketch gains: these layers are so small that many small operations cost more "
        "than the products they save."
    )


def _criteria(summaries: Sequence[Summary], exact: Summary) -> str:
    rows = []
    for method, budget, allowed in CRITERIA:
        for s in summaries:
            if (s.point.method, s.point.budget) != (method, budget):
                continue
            lost = _mean(exact) - _mean(s)
            met = "met" if lost <= allowed else "**missed**"
            rows.append([METHODS[method].label, f"{budget:g}", f"{allowed:g}", f"{lost:.2f}", met])
    return sheet.markdown(["method", "kept", "points it may lose", "points lost", ""], rows)


def _draw(
    axes: Sequence[Any], summaries: Sequence[Summary], cells: dict[str, Any], title: str
) -> None:
    exact = next(s for s in summaries if s.point.method == EXACT)
    texts = ("budget", "FLOPs of a step over exact", "time of a step over exact")
    for panel, text in zip(axes, texts, strict=True):
        for name, method in METHODS.items():
            own = [s for s in summaries if s.point.method == name and name != EXACT]
            own.sort(key=lambda s: s.point.budget)
            if not own:
                continue
            costs = [cells[name_of(s.point)] for s in own]
            at = {
                "budget": [s.point.budget for s in own],
                "FLOPs of a step over exact": [c["flops"] for c in costs],
                "time of a step over exact": [c["time"] for c in costs],
            }[text]
            look = {"color": tuple(c / 255 for c in COLOURS[method.colour]), "ls": method.line}
            panel.errorbar(at, [_mean(s) for s in own], [s.spread for s in own], marker="o", ms=3,
                           lw=1.2, label=method.label, **look)  # fmt: skip
        panel.axhline(_mean(exact), color="k", lw=1, label="exact")
        sheet.dress(panel, title, text, "test accuracy (%)")
    axes[0].set_xscale("log")
    budgets = sorted({s.point.budget for s in summaries if s is not exact})
    axes[0].set_xticks(budgets, [f"{b:g}" for b in budgets])
    axes[0].minorticks_off()
    axes[0].legend(fontsize=6, loc="lower right")
