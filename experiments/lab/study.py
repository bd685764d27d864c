"""A study: what is trained or measured, what is drawn, what is claimed; and its command."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from sketchprop.core.allocator import keep_pages

from ..methods import EXACT
from . import ExperimentError, claims
from .claims import Claim
from .engine import ENGINES, Job, missing_jobs, one_thread, progress_lines, run_sweep
from .figures import draw_figure, order
from .machine import Machine, seconds_of
from .pages import write_page
from .selection import PointResult, Results
from .store import Row, Schema, Store, read_rows, rows_so_far, table_path, write_table
from .sweep import (
    Cell,
    Figures,
    Point,
    Protocol,
    Run,
    Sweep,
    checked,
    make_sweep,
    read_preset,
    waiting_seeds,
)

SHOWN = 8
"""Of a claim with more comparisons only the least favourable are listed."""
COLUMNS: dict[str, type] = {
    "run": str, "cell": str, "package_version": str, "torch_version": str, "rate_index": int,
    "seed": int, "best_epoch": int, "learning_rate": float, "validation_accuracy": float,
    "test_accuracy": float, "best_test_accuracy": float, "wall_seconds": float,
    "validation_curve": list, "test_curve": list,
}  # fmt: skip
"""What every row has, beside the cell's own fields and the study's findings."""


@dataclass(frozen=True, kw_only=True)
class Study(ABC):
    """What all commands share. Presets and the page's template lie beside the study's code."""

    name: str
    help: str
    published: Mapping[str, str] = field(default_factory=dict)
    """Presets whose results are part of the documentation, and their folders there: they are drawn
    again from what is committed. Those of others are kept in ``results``."""

    @cached_property
    def folder(self) -> Path:
        return Path(inspect.getfile(type(self))).parent

    @property
    def preset_prefix(self) -> str:
        """What the names of its presets begin with, where two studies share a folder."""
        return ""

    def read_preset(self, preset: str) -> tuple[str, dict[str, Any], str]:
        return read_preset(preset, self.folder / "presets", self.preset_prefix)

    def out_folder(self, options: argparse.Namespace, preset: str) -> Path:
        documented = self.published.get(options.preset)
        folder = f"docs/results/{documented}" if documented else f"results/{self.name}-{preset}"
        return Path(options.out or folder)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--preset", default="smoke", help="smoke, cpu, paper, or a path to a .toml file")
        folders = [f"results/{self.name}-PRESET"]
        folders += [f"{preset}: docs/results/{name}" for preset, name in self.published.items()]
        add("--out", help=f"folder for results, figures and page ({', '.join(folders)})")
        add("--stored", action="store_true", help="train nothing: draw from the stored results")
        add("--quiet", action="store_true", help="no progress on the screen")

    @abstractmethod
    def run(self, options: argparse.Namespace) -> int:
        """The command; its exit code."""

    def finish(self, written: Iterable[Path], out: Path, facts: Mapping[str, Any]) -> int:
        """Writes the page and names all files."""
        return self.say((*written, write_page(out, self.folder, {"study": self, **facts})))

    def say(self, written: Iterable[Path]) -> int:
        for path in written:
            sys.stdout.write(f"{path}\n")
        return 0


@dataclass(frozen=True, kw_only=True)
class MeasuredStudy(Study):
    """Nothing is compared by training: numbers are measured and kept in ``results.json``."""

    settings: Any
    """A dataclass with the defaults of what a preset may set."""

    def run(self, options: argparse.Namespace) -> int:
        name, content, path = self.read_preset(options.preset)
        where = f"{path} [protocol]"
        (values,) = checked((self.settings,), content.get("protocol", {}), where)
        settings, out = replace(self.settings, **values), self.out_folder(options, name)
        if not options.stored:
            torch.set_num_threads(1)
            keep_pages()
            self.measure(settings, out, options)
        written, facts = self.results(settings, out)
        return self.finish(written, out, {"preset": name, "settings": settings, **facts})

    @abstractmethod
    def measure(self, settings: Any, out: Path, options: argparse.Namespace) -> None:
        """Adds what ``results.json`` lacks."""

    @abstractmethod
    def results(self, settings: Any, out: Path) -> tuple[list[Path], dict[str, Any]]:
        """Tables and pictures, and what the page's template needs."""


@dataclass(frozen=True)
class Reading:
    """A sweep and all that is stored of it: what figures and pages are made from."""

    sweep: Sweep
    names: tuple[str, ...]
    """The figures that were asked for."""
    rows: Sequence[Row]
    out: Path

    @cached_property
    def results(self) -> Results:
        return Results(self.rows)

    @cached_property
    def figures(self) -> dict[str, list[PointResult]]:
        """The complete points of each figure that has some."""
        found = {name: self.results.of_all(self.sweep.points(name)) for name in self.names}
        return {name: results for name, results in found.items() if results}

    @cached_property
    def extras(self) -> list[PointResult]:
        return self.results.of_all(self.sweep.extras)

    @property
    def points(self) -> list[PointResult]:
        return [result for group in self.figures.values() for result in group]


def schema_of(cell: Cell, findings: Mapping[str, type], sort_by: Sequence[str]) -> Schema:
    """The columns of runs of such cells."""
    own = {
        f.name: str if isinstance(value := getattr(cell, f.name), tuple) else type(value)
        for f in fields(cell)
    }
    order = (*sort_by, "sketch", "layers", "cell", "seed", "rate_index")
    added = tuple(f.name for f in fields(cell) if getattr(cell, f.name) == ())
    return Schema({**COLUMNS, **own, **findings}, order, ("wall_seconds", "seconds_curve"), added)


@dataclass(frozen=True, kw_only=True)
class SweepStudy(Study):
    """Runs are trained by an engine, stored, chosen on validation, drawn and judged."""

    title: str
    protocol: Protocol
    """With the cell that all are made from: the defaults of a TOML file."""
    findings: Mapping[str, type] = field(default_factory=dict)
    """Columns that the cells' training adds."""
    figures: Figures = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    reference: float = 0.0
    """What the paper's exact training reaches, in percent."""
    decides: float = 0.0
    """What exact training has to reach before it can speak against a claim of the paper."""
    sort_by: tuple[str, ...] = ()

    @cached_property
    def schema(self) -> Schema:
        return schema_of(self.protocol.base, self.findings, self.sort_by)

    def load(self, preset: str) -> Sweep:
        """A preset by name, or any TOML file by path."""
        return make_sweep(*self.read_preset(preset), self.protocol, self.figures)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        add = parser.add_argument
        if self.figures:
            told = "which figure to train and draw; the page is made with all of them"
            add("--figure", default="all", choices=(*self.figures, "all"), help=told)
        add("--workers", type=int, default=os.cpu_count() or 1, help="processes; 0: in this one")
        add("--engine", default="processes", choices=sorted(ENGINES), help="ray: a Ray cluster")
        add("--device", default="", help="cpu, or cuda: a process for each (a GPU if there is one)")
        add("--tf32", action="store_true", help="on a GPU: products in TensorFloat-32")
        add("--compile", action="store_true", help="torch.compile the steps")
        told = "only say how much there is to do, by a moment of steps of each method"
        add("--plan", action="store_true", help=told)

    def select(self, sweep: Sweep, options: argparse.Namespace) -> tuple[list[str], list[Point]]:
        """The figures to be drawn, and the points to be trained."""
        asked = getattr(options, "figure", "all")
        names, extras = [n for n in sweep.figures if asked in (n, "all")], asked == "all"
        if not names and not (extras and sweep.extras):
            raise ExperimentError(f"{options.preset} makes {', '.join(sweep.figures)}, not {asked}")
        return names, sweep.select(names, extras)

    def run(self, options: argparse.Namespace) -> int:
        """Trains what is missing, measures and draws."""
        sweep = self.load(options.preset)
        out = self.out_folder(options, sweep.name)
        names, points = self.select(sweep, options)
        machine = Machine(options.device, options.tf32, options.compile)
        if options.plan:
            sys.stdout.write(self.plan(points, out, options.workers, machine))
            return 0
        if not options.stored:
            keep_pages()
            report = None if options.quiet else progress_lines()
            with Store(out, self.schema) as store:
                missing = partial(missing_jobs, points, machine=machine)
                run_sweep(missing, store, ENGINES[options.engine], options.workers, report)
                write_table(store.rows(), out, self.schema)
        reading = Reading(sweep, tuple(names), read_rows(out, self.schema), out)
        written = self.draw(reading)
        if set(names) != set(sweep.figures):
            return self.say(written)
        facts = {"sweep": sweep, "protocol": sweep.protocol, "cell": sweep.protocol.base}
        return self.finish(written, out, {**facts, **self.facts(reading)})

    def plan(self, points: Sequence[Point], out: Path, workers: int, machine: Machine) -> str:
        rows = rows_so_far(out, self.schema)
        jobs = missing_jobs(points, rows, machine=machine)
        scores = {row["run"]: row["validation_accuracy"] for row in rows}
        later = [Run(p.cell, 0, seed) for p in points for seed in waiting_seeds(p, scores)]
        seconds = planned_seconds([*jobs, *(Job((run,)) for run in later)], machine)
        runs, workers = sum(len(job.runs) for job in jobs), machine.gpus or max(1, workers)
        more = f", {len(later)} more when their learning rate is chosen" if later else ""
        return (
            f"{runs} runs in {len(jobs)} stacks are missing{more}: about {seconds / 3600:.2f} "
            f"{'GPU' if machine.gpus else 'core'}-hours, {seconds / 3600 / workers:.2f} hours "
            f"with --workers {workers}, before widened grids\n"
        )

    def describe(self, protocol: Protocol) -> str:
        """How it was trained, in a line."""
        return f"{protocol.base.network}, seeds: {len(protocol.seeds)}"

    def draw(self, reading: Reading) -> list[Path]:
        """All figures that were asked for and have results."""
        text = self.describe(reading.sweep.protocol)
        written: list[Path] = []
        for name, results in reading.figures.items():
            figure = reading.sweep.figures[name]
            written += draw_figure(figure, results, text, reading.out)
        return written

    def facts(self, reading: Reading) -> dict[str, Any]:
        """What the page's template needs."""
        rows = reading.rows
        baselines = [s for s in reading.points if s.point.method == EXACT]
        points = {s.point.key: s for s in reading.points}
        small = max((s.mean for s in baselines), default=0.0) < self.decides
        return {
            "about": self.describe(reading.sweep.protocol),
            "runs": rows,
            "table_name": table_path(reading.out).name,
            "hours": sum(row["wall_seconds"] for row in rows) / 3600,
            "diverged": sum(row.get("diverged_epoch", 0) > 0 for row in rows),
            "versions": sorted(
                {f"sketchprop {r['package_version']}, torch {r['torch_version']}" for r in rows}
            ),
            "baselines": list({s.point.cell: s for s in (*baselines, *reading.extras)}.values()),
            "level": claims.LEVEL,
            "small": small,
            "claims": [_judged(claim, points, small) for claim in self.claims],
            "results": {n: sorted(found, key=order) for n, found in reading.figures.items()},
            "shown": SHOWN,
        }


def planned_seconds(jobs: Sequence[Job], machine: Machine) -> float:
    """Of all steps: those of each method in stacks of each size are timed on made-up data."""
    found: dict[tuple[str, int], float] = {}
    total = 0.0
    with machine.used(), one_thread():
        for job in jobs:
            cell = job.runs[0].cell
            for steps, count in cell.stretches(len(job.runs)):
                key = (cell.sketch.partition("(")[0], count)
                if key not in found:
                    found[key] = seconds_of(cell.trial(job.runs[:count]))
                total += steps * found[key]
    return total


def _judged(claim: Claim, points: Mapping[claims.Key, PointResult], small: bool) -> dict[str, Any]:
    outcomes = [claims.check(comparison, points) for comparison in claim.comparisons]
    done = [outcome for outcome in outcomes if outcome is not None]
    done.sort(key=lambda outcome: outcome.difference + outcome.comparison.margin)
    verdict = claims.verdict(outcomes)
    if small and verdict == claims.NOT_CONFIRMED:
        verdict = f"{claims.UNDECIDED} at this size"
    return {"claim": claim, "verdict": verdict, "done": done, "missing": len(outcomes) - len(done)}
