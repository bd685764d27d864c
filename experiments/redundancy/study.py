"""How the gain grows with redundancy: step ratio and noise by block against tokens for one label.

A step on kept tokens takes ρ of an exact one. A batch that is 1 + v times as large, v the V/σ² of
the worst block, has in no block more noise than an exact step: ρ(1 + v) is the time at equal noise.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sketchprop as sp

from ..depth.study import Looks, figures, looked_at, told
from ..lab.figures import label_axes, picture
from ..lab.pages import made_on, number_text, read_json, write_json
from ..lab.problem import Problem, trajectory
from ..lab.study import MeasuredStudy
from ..tasks.table import TASKS, reviews, vit


@dataclass(frozen=True)
class Settings(Looks):
    budgets: tuple[float, ...] = (0.1, 0.2, 0.3)
    most: int = 1024
    """Tokens of a sample; larger ones are left out."""


def _pictures(small: bool, tokens: int) -> Problem:
    """The task ``vit256``, with patches that make so many tokens."""
    patch = 32 // math.isqrt(tokens)
    return vit(small, name="pictures", batch_size=16, dim=128, hidden=512, patch=patch)


@dataclass(frozen=True)
class Series:
    make: Callable[[bool, int], Problem]
    tokens: tuple[int, ...]
    """That share one label."""
    task: str
    """Whose rate of exact training it has."""
    steps: int
    """Of exact training, before anything is measured."""
    line: str


SERIES = {
    "pictures": Series(_pictures, (16, 64, 256, 1024), "vit256", 150, "-"),
    "documents": Series(reviews, (64, 128, 256, 512), "reviews", 60, "--"),
}
PANELS = ("time of a step", "noise, V/σ² of the worst block", "time at equal noise")


class RedundancyStudy(MeasuredStudy):
    def measure(self, settings: Settings, out: Path, options: argparse.Namespace) -> None:
        """Adds the sizes that are missing."""
        stored = out / "results.json"
        found: dict[str, Any] = read_json(stored, {"machine": made_on()})
        sketches = {f"{budget:g}": sp.Tokens(budget) for budget in settings.budgets}
        sizes = [(name, tokens) for name, s in SERIES.items() for tokens in s.tokens]
        for name, tokens in sizes:
            series, key = SERIES[name], f"{name}/{tokens}"
            if key in found or tokens > settings.most:
                continue
            problem, rate = series.make(settings.size == "small", tokens), TASKS[series.task].rate
            for _, model in trajectory(problem, [series.steps], rate, out / f"{name}-{tokens}"):
                found[key] = looked_at(model, problem, settings, sketches)
            write_json(stored, found)
            if not options.quiet:
                sys.stderr.write(f"{key}: {told(found[key])}\n")

    def results(self, settings: Settings, out: Path) -> tuple[list[Path], dict[str, Any]]:
        found = read_json(out / "results.json")
        lines = {
            (name, budget): [
                _line(found[key], budget, tokens)
                for tokens in series.tokens
                if (key := f"{name}/{tokens}") in found
            ]
            for name, series in SERIES.items()
            for budget in map("{:g}".format, settings.budgets)
        }
        written = picture(out, "redundancy", len(PANELS), partial(_draw, lines), (4.0, 3.4))
        facts = {"lines": lines, "series": SERIES, "machine": found["machine"]}
        return written, {**facts, "best": {name: _best(lines, name) for name in SERIES}}


def _best(lines: dict[tuple[str, str], list[dict[str, Any]]], name: str) -> list[str]:
    """Of each size the least time at equal noise, in words."""
    found: dict[int, tuple[float, str]] = {}
    for (own, budget), points in lines.items():
        for point in points if own == name else ():
            least = found.get(point["tokens"], (math.inf, ""))
            found[point["tokens"]] = min(least, (point["equal"], budget))
    return [
        f"{number_text(equal, 2)} with {tokens:,} (`Tokens({budget})`)"
        for tokens, (equal, budget) in found.items()
    ]


def _line(moment: dict[str, Any], budget: str, tokens: int) -> dict[str, Any]:
    """A point of the picture, with the standard error of the worst block's V."""
    way = moment["ways"][budget]
    own = figures(moment, way)
    worst = own["blocks"].index(own["worst"])
    error = way["error"][worst] / moment["sigma2"][worst]
    equal = way["time"] * (1 + own["worst"])
    blocks = " ".join(number_text(v, 2) for v in own["blocks"])
    return {"tokens": tokens, "time": way["time"], "worst": own["worst"], "error": error,
            "all": own["all"], "blocks": blocks, "equal": equal}  # fmt: skip


def _draw(lines: dict[tuple[str, str], list[dict[str, Any]]], panels: Sequence[Any]) -> None:
    budgets = list(dict.fromkeys(budget for _, budget in lines))
    for (name, budget), points in lines.items():
        look: Any = {"color": f"C{budgets.index(budget)}", "ls": SERIES[name].line, "marker": "o"}
        look |= {"ms": 3, "label": f"{name}, Tokens({budget})"}
        tokens = [point["tokens"] for point in points]
        for axes, field in zip(panels, ("time", "worst", "equal"), strict=True):
            errors = [point["error"] for point in points] if field == "worst" else None
            axes.errorbar(tokens, [point[field] for point in points], errors, **look)
    ticks = sorted({point["tokens"] for points in lines.values() for point in points})
    for axes, title in zip(panels, PANELS, strict=True):
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        label_axes(axes, title, "tokens that share one label", "over exact")
    panels[1].set_yscale("log")
    panels[1].set_ylabel("V/σ²")
    panels[2].set_yscale("log")
    marks = (0.5, 0.7, 1, 2, 5, 10, 50)
    panels[2].set_yticks(marks, [f"{mark:g}" for mark in marks])
    for axes in (panels[0], panels[2]):
        axes.axhline(1, color="k", lw=0.8)
    panels[2].text(ticks[0], 0.97, "below: a gain", va="top", fontsize=7)
    panels[0].legend(fontsize=6)


REDUNDANCY = RedundancyStudy(
    name="redundancy",
    help="step ratio and noise by block against the tokens that share one label",
    published={"cpu": "redundancy"},
    settings=Settings(),
)
