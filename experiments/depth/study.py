"""Budgets shared out over blocks beside even ones: noise of each block, at the same step time."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median, stdev
from time import process_time
from typing import Any

from torch import Tensor, nn

import sketchprop as sp
from sketchprop.layers import SketchedModule
from sketchprop.layers.depth import load_shares_, shares_in, shares_of
from sketchprop.meters.noise.gradients import squared_norms

from ..lab.checkpoints import FOLDER, Checkpoint
from ..lab.claims import confidence
from ..lab.engine import spread
from ..lab.noise import exact_gradient, gradients_of, noise_batches, trained_parameters
from ..lab.pages import made_on, number_text, read_csv, read_json, write_json
from ..lab.problem import GOING, Problem, trajectory
from ..lab.study import MeasuredStudy
from ..lab.trainer import Batch, outputs
from ..pay.predictions import advised
from ..tasks.table import TASKS, Task

PAID = Path("docs/results/pay/summary.csv")
EXACT = "exact"
FORETELL = ("V/σ² of all parameters", "its mean over blocks", "that of the worst block", "`advise`")
EVEN, SHARED, EARLY = "even", "shared out", "shared out at the first moment"
WAYS = (EXACT, EVEN, SHARED)
"""What trains."""
LEFT = 60.0
"""The score on test data (%) above which a run has left the plateau, where half of all answers are
right."""


@dataclass(frozen=True)
class Looks:
    """How often noise and time are looked at."""

    size: str = "full"
    sigma_batches: int = 8
    batches: int = 5
    draws: int = 2
    rounds: int = 5


@dataclass(frozen=True)
class Settings(Looks):
    moments: tuple[int, ...] = ()
    """Steps of exact training; empty: those of the task."""
    budget: float = 0.3
    seeds: int = 5
    steps: int = 800
    """Of exact training; the others have as much time."""
    marks: int = 4


class DepthStudy(MeasuredStudy):
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument(
            "--task", default="documents", choices=sorted(TASKS), help="what is trained"
        )
        parser.add_argument("--train", action="store_true", help="and train all ways equally long")
        parser.add_argument("--workers", type=int, default=2, help="runs at a time; 0: no process")

    def measure(self, settings: Settings, out: Path, options: argparse.Namespace) -> None:
        """Adds the moments that are missing."""
        task, stored = TASKS[options.task], out / "results.json"
        found: dict[str, Any] = read_json(stored) if stored.is_file() else {}
        problem = task.problem(settings.size == "small")
        own = found.setdefault(task.name, {"title": problem.title, "machine": made_on()})
        steps = settings.moments or task.moments
        missing = [step for step in steps if str(step) not in own]
        for step, model in trajectory(problem, missing, task.rate, out / task.name):
            early = own.get(str(steps[0]), {}).get("shares", {})
            sketches = {EVEN: sp.Tokens(settings.budget, share="even")}
            for way in (SHARED, *([EARLY] if early else [])):
                sketches[way] = sp.Tokens(settings.budget)
            own[str(step)] = looked_at(model, problem, settings, sketches, early)
            write_json(stored, found)
            if not options.quiet:
                sys.stderr.write(f"{task.name}, step {step}: {told(own[str(step)])}\n")
        if options.train:
            runs = own.setdefault("runs", {})
            moments = [moment for step, moment in own.items() if step.isdecimal()]
            jobs = [
                _job(task, settings, moments, seed, way, out)
                for seed, way in product(range(settings.seeds), WAYS)
                if f"{way}/{seed}" not in runs
            ]
            for job, curves in spread(_trained, jobs, options.workers) if jobs else ():
                runs[f"{job.way}/{job.seed}"] = curves
                write_json(stored, found)
                if not options.quiet:
                    sys.stderr.write(f"{job.way}, seed {job.seed}: {curves}\n")

    def results(self, settings: Settings, out: Path) -> tuple[list[Path], dict[str, Any]]:
        found = read_json(out / "results.json")
        rows = [
            [task, step, way, *_cells(moment, line)]
            for task, own in found.items()
            for step, moment in own.items()
            if step.isdecimal()
            for way, line in moment["ways"].items()
        ]
        runs = [
            [
                task,
                *name.split("/"),
                *(f"{a:.1f} ({b:.3f})" for a, b in zip(c["test"], c["loss"], strict=True)),
            ]
            for task, own in found.items()
            for name, c in sorted(own.get("runs", {}).items())
        ]
        ended = [
            [task, *line]
            for task, own in found.items()
            for line in final_scores(own.get("runs", {}))
        ]
        told = {"rows": rows, "tasks": found, "runs": runs, "ended": ended}
        return [], {**told, "worst": worst_blocks(found), "foretold": _foretold(found)}


def worst_blocks(found: Mapping[str, Any]) -> list[list[str]]:
    """V/σ² of the noisiest block, shared-out budgets over even ones, moment by moment; the steps
    that measuring took at most."""
    lines = []
    for task, own in found.items():
        moments = [moment for step, moment in own.items() if step.isdecimal()]
        ratios = [
            figures(m, m["ways"][SHARED])["worst"] / figures(m, m["ways"][EVEN])["worst"]
            for m in moments
        ]
        spent = max(m["steps"] for m in moments)
        lines.append([task, *map("{:.2f}".format, ratios), f"{spent:.1f} steps"])
    return lines


def final_scores(runs: Mapping[str, Any]) -> list[list[str]]:
    """Where each way ends: mean and spread over its seeds, how many of them left the plateau, and
    by how much it is above exact training, paired by seed, with the interval of 95 %."""
    last = {name: curves["test"][-1] for name, curves in runs.items()}
    lines = []
    for way in WAYS:
        own = {n.split("/")[1]: score for n, score in last.items() if n.split("/")[0] == way}
        if len(own) < 2:
            continue
        above = [score - last[f"{EXACT}/{s}"] for s, score in own.items() if f"{EXACT}/{s}" in last]
        paired = ""
        if way != EXACT and len(above) > 1:
            error = stdev(above) / len(above) ** 0.5
            low, high = confidence(fmean(above), error, len(above))
            paired = f"{fmean(above):+.1f} [{low:+.1f}, {high:+.1f}]"
        left = sum(score > LEFT for score in own.values())
        scores = list(own.values())
        lines.append(
            [way, f"{fmean(scores):.1f} ± {stdev(scores):.1f}", f"{left} of {len(own)}", paired]
        )
    return lines


def _foretold(found: dict[str, Any]) -> dict[str, Any]:
    """What training at even budgets was found to need, in steps over exact training's at the same
    batch, beside what each figure says of it at the last moment; how often that is within."""
    asked = {(row["task"], row["name"]): row["noise"] for row in advised("options.csv")}
    lines, hits = [], {name: [0, 0] for name in FORETELL}
    for row in read_csv(PAID):
        moments = [m for step, m in found.get(row["task"], {}).items() if step.isdecimal()]
        if row["way"] == "tokens-0.3" and moments:
            told = figures(moments[-1], moments[-1]["ways"][EVEN])
            noise = asked.get((row["task"], "Tokens(0.3)"))
            given = [*(told[name] for name in ("all", "mean", "worst")), noise]
            steps, low, high = (float(row[name]) / float(row["step_ratio"])
                                for name in ("same_batch", "same_low", "same_high"))  # fmt: skip
            for hit, value in zip(hits.values(), given, strict=True):
                if value is not None and low < math.inf:
                    hit[0] += low <= 1 + float(value) <= high
                    hit[1] += 1
            texts = [number_text(n) if n < math.inf else "> 1" for n in (steps, low, high)]
            cells = [number_text(1 + float(n)) if n is not None else "-" for n in given]
            early = [1 + figures(m, m["ways"][EVEN])["mean"] for m in moments]
            cells[1] = ", ".join(map(number_text, early))
            lines.append([row["task"], "{} ({} to {})".format(*texts), *cells])
    return {"lines": lines, "hits": hits}


@dataclass(frozen=True)
class Job:
    """A run in a worker process."""

    task: str
    small: bool
    way: str
    sketch: str
    seed: int
    marks: tuple[int, ...]
    checkpoint: Path


def _job(
    task: Task, settings: Settings, moments: Sequence[Any], seed: int, way: str, out: Path
) -> Job:
    """All ways have the same time of the processor by what a step takes in the mean over the
    moments, measuring the shares included."""
    ratio = 1.0 if way == EXACT else fmean(m["ways"][way]["time"] for m in moments)
    spent = fmean(m["steps"] for m in moments) if way == SHARED else 0.0
    quarters = [k / settings.marks for k in range(1, settings.marks + 1)]
    marks = tuple(round((settings.steps * q - spent) / ratio) for q in quarters)
    share = "measured" if way == SHARED else "even"
    sketch = "" if way == EXACT else f"Tokens({settings.budget:g}, share={share!r})"
    path = out / task.name / FOLDER / f"{way.replace(' ', '-')}-{seed}.pt"
    return Job(task.name, settings.size == "small", way, sketch, seed, marks, path)


def _trained(job: Job) -> dict[str, list[float]]:
    """The score on test data at the marks, and the mean loss of training since the one before."""
    task = TASKS[job.task]
    problem = task.problem(job.small)

    def tested(model: nn.Module) -> tuple[float, float]:
        return 0.0, problem.score(*outputs(model, problem.test()))

    trainer = problem.trainer(
        task.rate, job.seed, job.marks, sketch=job.sketch, decay=True, evaluate=tested
    )
    found = trainer.train(Checkpoint(job.checkpoint, GOING))
    job.checkpoint.unlink(missing_ok=True)
    return {"test": found["test_curve"], "loss": found["loss_curve"]}


def looked_at(
    model: nn.Module,
    problem: Problem,
    settings: Looks,
    sketches: Mapping[str, sp.Tokens],
    early: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, Any]:
    """All ways at one moment, by block, and what is in none of them last; the model is exact again
    at the end. ``early``: shares that ``EARLY`` has from the first moment."""
    batches = noise_batches(problem, settings.sigma_batches + 1)
    aside = batches.pop()
    sp.sketch_(model, next(iter(sketches.values())), problem.inner)
    blocks = [m for m in model.modules() if isinstance(m, SketchedModule)]
    number = {p: k for k, m in enumerate(blocks) for p in m.parameters()}
    owner = [number.get(p, len(blocks)) for p in trained_parameters(model)]

    def by_block(gradient: Sequence[Tensor]) -> list[float]:
        sums = [0.0] * (len(blocks) + 1)
        for k, square in zip(owner, squared_norms(gradient), strict=True):
            sums[k] += square
        return sums

    def mean(values: Sequence[Sequence[float]], count: int) -> list[float]:
        return [sum(column) / count for column in zip(*values, strict=True)]

    def apart(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[float]:
        return by_block([x - y for x, y in zip(a, b, strict=True)])

    with sp.exact(model):
        exact = [exact_gradient(model, problem, batch) for batch in batches]
    centre = [sum(parts) / len(exact) for parts in zip(*exact, strict=True)]
    sigma2 = mean([apart(g, centre) for g in exact], len(exact) - 1)

    def noise() -> list[list[float]]:
        """By batch, the mean over its draws."""
        found = []
        for batch, g in list(zip(batches, exact, strict=True))[: settings.batches]:
            drawn = gradients_of(model, problem, batch, settings.draws)
            found.append(mean([apart(each, g) for each in drawn], settings.draws))
        return found

    ways: dict[str, Any] = {}
    shares: dict[str, list[float]] = {}
    spent = 0.0
    for way, sketch in sketches.items():
        sp.sketch_(model, sketch, problem.inner)
        if way == EARLY and early:
            load_shares_(model, early)
        elif shares_in(model):
            spent, shares = _seconds(model, problem, aside), shares_of(model)
            with sp.exact(model):
                spent /= _seconds(model, problem, aside)
        ways[way] = {"sketches": [m.sketch for m in blocks]}
    for line in ways.values():
        _give(blocks, line["sketches"])
        found = noise()
        line["noise"] = mean(found, len(found))
        line["error"] = [stdev(column) / len(found) ** 0.5 for column in zip(*found, strict=True)]
    times: dict[str, list[float]] = {way: [] for way in (EXACT, *ways)}
    for batch in (batches * settings.rounds)[: settings.rounds]:
        for way, seconds in times.items():
            _give(blocks, ways.get(way, next(iter(ways.values())))["sketches"])
            for m in blocks:
                m.sketching.exact = way == EXACT
            seconds.append(_seconds(model, problem, batch))
    for way, line in ways.items():
        pairs = zip(times[way], times[EXACT], strict=True)
        line["time"] = median(a / b for a, b in pairs)
        line["budgets"] = [(s.budget, s.query_budget, s.key_budget) for s in line.pop("sketches")]
    sp.unsketch_(model)
    squares = mean(list(map(by_block, exact)), len(exact))
    spread = {"sigma2": sigma2, "squares": squares}
    return {"ways": ways, **spread, "shares": shares, "steps": spent}


def _give(blocks: Sequence[Any], sketches: Sequence[sp.Tokens]) -> None:
    for block, sketch in zip(blocks, sketches, strict=True):
        block.sketching.sketch = sketch


def _seconds(model: nn.Module, problem: Problem, batch: Batch) -> float:
    """Of the processor, for one pass."""
    start = process_time()
    exact_gradient(model, problem, batch)
    return process_time() - start


def figures(moment: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    """V/σ² by block, of the worst and over all parameters; the mean of V_b/(σ_b² + |g_b|²)."""
    noise, sigma2, squares = line["noise"], moment["sigma2"], moment["squares"]
    blocks = [v / s for v, s in zip(noise[:-1], sigma2, strict=False)]
    mean = fmean(v / s for v, s in zip(noise[:-1], squares, strict=False))
    return {"blocks": blocks, "worst": max(blocks), "all": sum(noise) / sum(sigma2), "mean": mean}


def _cells(moment: dict[str, Any], line: dict[str, Any]) -> list[str]:
    found = figures(moment, line)
    told = [number_text(found[name], 2) for name in ("all", "mean", "worst")]
    return [number_text(line["time"]), *told, " ".join(number_text(v, 2) for v in found["blocks"])]


def told(moment: dict[str, Any]) -> str:
    texts = [f"{way}: {', '.join(_cells(moment, line))}" for way, line in moment["ways"].items()]
    return "; ".join([*texts, f"measured in {moment['steps']:.1f} steps"])


DEPTH = DepthStudy(
    name="depth",
    help="noise by block: budgets shared out beside even ones",
    published={"cpu": "depth"},
    settings=Settings(),
)
