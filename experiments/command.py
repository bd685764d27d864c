"""What the commands of all studies share: options, and the way from a preset to a page."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .engine import ENGINES, Progress, missing_tasks, run_sweep
from .methods import ExperimentError
from .page import write_results
from .store import Row, Store, read_rows, write_table
from .study import Study
from .sweep import Point, Sweep, waiting_seeds


def add_options(parser: argparse.ArgumentParser, name: str, figures: Sequence[str]) -> None:
    add = parser.add_argument
    add("--preset", default="smoke", help="smoke, cpu, paper, or a path to a .toml file")
    add("--figure", default="all", choices=figures, help="which figure to make")
    add("--out", help=f"folder for runs, table, figures and page (results/{name}-PRESET)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes; 0: in this one")
    add("--engine", default="processes", choices=sorted(ENGINES), help="ray: a Ray cluster")
    add("--stored", action="store_true", help="train nothing: draw from the stored results")
    add("--plan", action="store_true", help="only say how much there is to do")
    add("--quiet", action="store_true", help="no progress bar")


def run_study(study: Study, options: argparse.Namespace, asked: Sequence[str], extras: bool) -> int:
    """Trains what is missing and draws: the figures ``asked``, and the extras of the preset."""
    sweep = study.load(options.preset)
    out = out_folder(study, sweep, options)
    names = [name for name in asked if name in sweep.figures]
    if not names and not (extras and sweep.extras):
        raise ExperimentError(f"{options.preset} makes {', '.join(sweep.figures)}, not {asked}")
    points = sweep.select(names, extras)
    if options.plan:
        sys.stdout.write(plan(study, points, out, options.workers))
        return 0
    rows = trained(study, points, out, options)
    for path in write_results(study, sweep, names, rows, out):
        sys.stdout.write(f"{path}\n")
    return 0


def out_folder(study: Study, sweep: Sweep, options: argparse.Namespace) -> Path:
    return Path(options.out or f"results/{study.name}-{sweep.name}")


def plan(study: Study, points: Sequence[Point], out: Path, workers: int) -> str:
    rows = read_rows(out, study.schema) if (out / "runs.sqlite").is_file() else []
    tasks = missing_tasks(points, rows)
    runs, seconds = sum(len(t.runs) for t in tasks), sum(t.cost for t in tasks)
    scores = {row["run"]: row["validation_accuracy"] for row in rows}
    waiting = [(p.cell, len(waiting_seeds(p, scores))) for p in points]
    later = sum(count for _, count in waiting)
    seconds += sum(cell.cost(count) for cell, count in waiting if count)
    more = f", {later} more when their learning rate is chosen" if later else ""
    workers = max(1, workers)
    return (
        f"{runs} runs in {len(tasks)} stacks are missing{more}: about {seconds / 3600:.2f} "
        f"core-hours, {seconds / 3600 / workers:.2f} hours with --workers {workers}, "
        "before widened grids\n"
    )


def trained(
    study: Study, points: Sequence[Point], out: Path, options: argparse.Namespace
) -> list[Row]:
    """All rows of the store, after training what was missing (unless ``--stored``)."""
    if options.stored:
        return read_rows(out, study.schema)
    progress = None if options.quiet else Progress()
    with Store(out, study.schema) as store:
        run_sweep(points, store, ENGINES[options.engine], options.workers, progress)
        rows = store.rows()
    write_table(rows, out, study.schema)
    return rows
