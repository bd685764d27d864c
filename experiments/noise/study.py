"""V/σ² of kept tokens on real gradients, at several moments of exact training.

V = E‖ĝ - g‖² over the draws for a batch, all parameters together; σ² is the variance between
batches. What ``Tokens(rows, queries=…, keys=…)`` adds is measured for budgets that are equal, for
those that could be the defaults, and for one kind of draw alone; ``Rows`` by token beside it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

import sketchprop as sp
from sketchprop.core.table import plain_data
from sketchprop.meters.noise.estimate import Estimate

from ..lab.figures import budget_axis, label_axes, picture
from ..lab.noise import (
    Noise,
    added_noise,
    exact_gradient,
    gradients_of,
    minibatch_noise,
    noise_batches,
)
from ..lab.pages import made_on, number_text, read_json, write_csv, write_json
from ..lab.problem import Problem, trajectory
from ..lab.study import MeasuredStudy
from ..lab.trainer import Batch
from ..tasks.table import TASKS, Task

GOAL = 0.1
"""The largest V/σ² that the defaults may add at ``GOAL_ROWS``."""
GOAL_ROWS = 0.3
MORE = 0.1
"""What queries of a candidate have above the rows."""
ALL = 1.0


class Budgets(NamedTuple):
    """Kept shares: rows of row-wise parts, queries of attention, rows of K and V."""

    rows: float
    queries: float
    keys: float

    @property
    def sketch(self) -> sp.Tokens:
        return sp.Tokens(self.rows, queries=self.queries, keys=self.keys, share="even")

    @property
    def alone(self) -> tuple[Budgets, Budgets, Budgets]:
        """Each kind of draw by itself, the other two exact."""
        return (
            Budgets(self.rows, ALL, ALL),
            Budgets(ALL, self.queries, ALL),
            Budgets(ALL, ALL, self.keys),
        )

    def __str__(self) -> str:
        """As it is stored.

        >>> str(Budgets(0.3, 0.4, 1.0))
        '0.3/0.4/1'
        """
        return "/".join(f"{share:g}" for share in self)


def default(rows: float) -> Budgets:
    """As ``Tokens(rows)`` has them."""
    sketch = sp.Tokens(rows)
    return Budgets(rows, *map(float, (sketch.query_budget, sketch.key_budget)))


class Plain(NamedTuple):
    """``Rows`` by token in each linear layer: what kept tokens replace."""

    rows: float

    @property
    def sketch(self) -> sp.Rows:
        return sp.Rows(self.rows, unit="token")

    def __str__(self) -> str:
        return f"rows-{self.rows:g}"


Point = Budgets | Plain


@dataclass(frozen=True)
class Settings:
    size: str = "full"
    moments: tuple[int, ...] = ()
    """Steps of exact training; empty: those of the task."""
    budgets: tuple[float, ...] = (0.1, 0.2, 0.3, 0.5)
    """One for rows, queries and keys."""
    candidates: tuple[float, ...] = (0.3, 0.2)
    """Rows for which defaults of queries and keys are looked for."""
    keys: tuple[float, ...] = (0.5, 0.7, 1.0)
    sigma_batches: int = 12
    batches: int = 4
    draws: int = 4

    @property
    def possible(self) -> list[Budgets]:
        """Candidates of the defaults, and the defaults."""
        found = [
            Budgets(rows, round(rows + MORE, 6), keys)
            for rows in self.candidates
            for keys in self.keys
        ]
        return sorted(dict.fromkeys([*found, *map(default, self.candidates)]), reverse=True)

    @property
    def equal(self) -> list[Budgets]:
        return [Budgets(p, p, p) for p in self.budgets]

    @property
    def split(self) -> list[Budgets]:
        """Those whose noise is split: equal ones and candidates, where keys draw too."""
        chosen = [b for b in (*self.possible, *self.equal) if b.rows in self.candidates]
        return [b for b in chosen if b.keys < ALL]

    @property
    def rounds(self) -> tuple[list[Point], list[Point]]:
        """What decides about the defaults is measured at all moments before the rest is."""
        first: list[Point] = [*self.possible, *(b for b in self.equal if b.rows in self.candidates)]
        rest: list[Point] = [single for b in self.split for single in b.alone]
        rest += [Budgets(p, p, ALL) for p in self.candidates]
        rest += [Plain(p) for p in self.budgets]
        rest += self.equal
        return first, [point for point in dict.fromkeys(rest) if point not in first]

    def steps(self, task: Task) -> tuple[int, ...]:
        return self.moments or task.moments


def sketched_gradients(
    model: nn.Module, problem: Problem, batch: Batch, point: Point, draws: int
) -> Iterator[Sequence[Tensor]]:
    """``draws`` gradients of one batch; the model is exact again behind them."""
    sp.sketch_(model, point.sketch, problem.inner)
    try:
        yield from gradients_of(model, problem, batch, draws)
    finally:
        sp.unsketch_(model)


class NoiseStudy(MeasuredStudy):
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--task", required=True, choices=sorted(TASKS), help="what is trained")
        parser.add_argument(
            "--rows",
            type=_numbers,
            default=(),
            help="only the defaults at these budgets, by commas: 0.2,0.169 for Tokens(0.2) and "
            "Tokens(0.169)",
        )

    def out_folder(self, options: argparse.Namespace, preset: str) -> Path:
        folder = super().out_folder(options, preset)
        return folder if options.out else folder / str(options.task)

    def measure(self, settings: Settings, out: Path, options: argparse.Namespace) -> None:
        """Adds what is missing, number by number."""
        task, stored = TASKS[options.task], out / "results.json"
        problem = task.problem(settings.size == "small")
        found: dict[str, Any] = {"task": task.name, "title": problem.title, "machine": made_on(),
                                 "shape": _shape(task, problem, settings.batches),
                                 "sigma2": {}, "noise": {}}  # fmt: skip
        found.update(read_json(stored, {}))
        asked: list[Point] = [default(p) for p in options.rows]
        for points in (asked,) if asked else settings.rounds:
            for step, model in trajectory(problem, settings.steps(task), task.rate, out):
                missing = [p for p in points if f"{step}/{p}" not in found["noise"]]
                if not missing:
                    continue
                noise = _noise(model, problem, settings, found["sigma2"], str(step))
                for point in missing:
                    how: Any = {"point": point, "draws": settings.draws}
                    line = added_noise(noise, partial(sketched_gradients, model, problem, **how))
                    found["noise"][f"{step}/{point}"] = line
                    write_json(stored, found)
                    if not options.quiet:
                        told = f"{task.name}, step {step}, {point}: V/σ² = {line['ratio']:.3g}"
                        sys.stderr.write(f"{told} ± {line['error']:.1g}\n")

    def results(self, settings: Settings, out: Path) -> tuple[list[Path], dict[str, Any]]:
        found = read_json(out / "results.json")
        task = TASKS[found["task"]]
        steps = [s for s in settings.steps(task) if str(s) in found["sigma2"]]
        lines = _Lines(found["noise"], steps)
        written = [write_csv(out / "results.csv", _flat(found))]
        written += picture(out, "noise", len(steps), lambda axes: _draw(axes, lines, settings))
        standard = default(GOAL_ROWS)
        plain: list[Point] = [Plain(p) for p in settings.budgets]
        exact_keys: list[Point] = [Budgets(p, p, ALL) for p in settings.candidates]
        tables = {
            "Candidates of the defaults": lines.table(lines.with_defaults(settings.possible)),
            "One budget for rows, queries and keys": lines.table(settings.equal),
            "One budget for rows and queries, keys exact": lines.table(exact_keys),
            "`Rows` by token in each linear layer": lines.table(plain),
        }
        facts = {
            **found, "steps": steps, "reference": task, "tables": tables, "goal": GOAL,
            "split": lines.split(settings.split), "standard": standard,
            "verdicts": [(s, lines.known(s, standard)) for s in steps],
        }  # fmt: skip
        return written, facts


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def _shape(task: Task, problem: Problem, count: int) -> dict[str, float]:
    """Samples and tokens of the batches on which V is measured; the share that is padding."""
    batches = [x for x, _ in noise_batches(problem, count)]
    found = {"samples": len(batches[0]), "tokens": 0.0, "padding": 0.0}
    if batches[0].is_floating_point():
        return found
    tokens = sum(x.numel() for x in batches)
    padded = sum(int((x == task.pad).sum()) for x in batches)
    return {**found, "tokens": tokens / count / found["samples"], "padding": padded / tokens}


def _noise(
    model: nn.Module, problem: Problem, settings: Settings, known: dict[str, Any], step: str
) -> Noise:
    """σ² is measured once for each moment and stored in ``known``."""
    if step not in known:
        noise = minibatch_noise(model, problem, settings.sigma_batches, settings.batches)
        known[step] = plain_data(noise.sigma2)
        return noise
    batches = noise_batches(problem, settings.batches)
    exact = tuple(exact_gradient(model, problem, batch) for batch in batches)
    return Noise(Estimate(known[step]["value"], known[step]["error"]), tuple(batches), exact)


def _flat(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for key, line in found["noise"].items():
        step, _, word = key.partition("/")
        names = ("rows", "queries", "keys")
        plain = word.startswith("rows-")
        shares = [word.removeprefix("rows-"), "", ""] if plain else word.split("/")
        rows.append(
            {
                "task": found["task"],
                "step": int(step),
                "sketch": "Rows" if plain else "Tokens",
                **dict(zip(names, shares, strict=True)),
                **line,
                "sigma2": found["sigma2"][step]["value"],
            }
        )
    return rows


class _Lines:
    """What is stored, as cells of tables; a dash where nothing is."""

    def __init__(self, noise: dict[str, Any], steps: Sequence[int]) -> None:
        self.noise, self.steps = noise, steps

    def known(self, step: int, point: Point) -> dict[str, Any] | None:
        line: dict[str, Any] | None = self.noise.get(f"{step}/{point}")
        return line

    def cell(self, step: int, point: Point) -> str:
        if point == Budgets(ALL, ALL, ALL):
            return "0"
        line = self.known(step, point)
        if line is None:
            return "-"
        sign = "≥ " if line["lower_bound"] else ""
        return f"{sign}{number_text(line['ratio'])} ± {number_text(line['error'], 1)}"

    def table(self, points: Sequence[Point]) -> list[list[str]]:
        """Those of which something is stored."""
        rows = [[*_shares(p), *(self.cell(step, p) for step in self.steps)] for p in points]
        return [row for row in rows if any(cell != "-" for cell in row[3:])]

    def with_defaults(self, points: Sequence[Budgets]) -> list[Budgets]:
        """And those that are stored and are what ``Tokens`` has of itself."""
        words = (key.partition("/")[2] for key in self.noise if "rows" not in key)
        stored = [Budgets(*map(float, word.split("/"))) for word in words]
        own = [point for point in stored if point == default(point.rows)]
        return sorted({*points, *own}, reverse=True)

    def split(self, points: Sequence[Budgets]) -> list[list[str]]:
        """Each kind of draw alone, their sum, and all together."""
        rows = []
        for point in points:
            for step in self.steps:
                found = [self.known(step, p) for p in (*point.alone, point)]
                if any(line is None for line in found):
                    continue
                values = [line["ratio"] for line in found if line is not None]
                cells = [number_text(v) for v in (*values[:3], sum(values[:3]), values[3])]
                rows.append([" / ".join(_shares(point)), str(step), *cells])
        return rows


def _shares(point: Point) -> list[str]:
    shown = [f"{share:g}" for share in point]
    return shown if isinstance(point, Budgets) else [*shown, "", ""]


def _draw(axes: Sequence[Any], lines: _Lines, settings: Settings) -> None:
    series: list[tuple[str, str, list[Point]]] = [
        ("Rows by token", "0.5", [Plain(p) for p in sorted(settings.budgets)]),
        ("equal budgets", "k", [*sorted(settings.equal)]),
    ]
    for number, keys in enumerate(settings.keys):
        own: list[Point] = [
            Budgets(p, round(p + MORE, 6), keys) for p in sorted(settings.candidates)
        ]
        series.append((f"queries + {MORE:g}, keys {keys:g}", f"C{number}", own))
    for panel, step in zip(axes, lines.steps, strict=True):
        for label, colour, points in series:
            found = [(p.rows, line) for p in points if (line := lines.known(step, p))]
            if not found:
                continue
            values, errors = ([line[k] for _, line in found] for k in ("ratio", "error"))
            places = [rows for rows, _ in found]
            panel.errorbar(places, values, errors, color=colour, marker="o", ms=3, label=label)
        panel.axhline(GOAL, color="r", lw=0.8, ls=":", label=f"V/σ² = {GOAL:g}")
        panel.set_yscale("log")
        budget_axis(panel, sorted(settings.budgets))
        label_axes(panel, f"after {step} steps", "rows", "V/σ²")
    axes[-1].legend(fontsize=6)


NOISE = NoiseStudy(
    name="noise",
    help="V/σ² of kept tokens over the training of a task",
    published={"cpu": "tokens-noise"},
    settings=Settings(),
)
