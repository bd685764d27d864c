"""``python -m experiments mnist --preset smoke --figure all``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sketchprop.data import DataError

from .engine import ENGINES, Progress, missing_tasks, run_sweep
from .methods import ExperimentError
from .page import write_results
from .store import Store, read_rows, write_table
from .sweep import figures_named, load_sweep

FIGURE_NAMES = ("1a", "1b", "2a", "2b", "location", "all")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _mnist(options)
    except (ExperimentError, DataError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; give the same command again: it continues\n")
        return 130


def _mnist(options: argparse.Namespace) -> int:
    sweep = load_sweep(options.preset)
    out = Path(options.out or f"results/mnist-{sweep.name}")
    asked = figures_named(options.figure, options.no_clip)
    names = [name for name in asked if name in sweep.figures]
    if not names and not (options.figure == "all" and sweep.extras):
        raise ExperimentError(f"{options.preset} makes {', '.join(sweep.figures)}, not {asked}")
    points = sweep.select(names, extras=options.figure == "all")
    if options.plan:
        rows = read_rows(out) if (out / "runs.sqlite").is_file() else []
        tasks = missing_tasks(points, rows)
        runs, seconds = sum(len(t.runs) for t in tasks), sum(t.cost for t in tasks)
        workers = max(1, options.workers)
        sys.stdout.write(
            f"{runs} runs in {len(tasks)} stacks are missing: about {seconds / 3600:.2f} "
            f"core-hours, {seconds / 3600 / workers:.2f} hours with --workers {workers}, "
            "before widened grids\n"
        )
        return 0
    if options.stored:
        rows = read_rows(out)
    else:
        progress = None if options.quiet else Progress()
        with Store(out) as store:
            run_sweep(points, store, ENGINES[options.engine], options.workers, progress)
            rows = store.rows()
        write_table(rows, out)
    for path in write_results(sweep, names, rows, out):
        sys.stdout.write(f"{path}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="EXPERIMENT")
    mnist = commands.add_parser("mnist", help="the paper's MLP study on MNIST")
    add = mnist.add_argument
    add("--preset", default="smoke", help="smoke, cpu, paper, or a path to a .toml file")
    add("--figure", default="all", choices=FIGURE_NAMES, help="which figure to make")
    add("--no-clip", action="store_true", help="figure 2b without gradient clipping")
    add("--out", help="folder for runs, table, figures and page (results/mnist-PRESET)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes; 0: in this one")
    add("--engine", default="processes", choices=sorted(ENGINES), help="ray: a Ray cluster")
    add("--stored", action="store_true", help="train nothing: draw from the stored results")
    add("--plan", action="store_true", help="only say how much there is to do")
    add("--quiet", action="store_true", help="no progress bar")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
