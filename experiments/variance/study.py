"""V/σ² over training, for every sketch: what an estimator adds to the noise of a minibatch.

One exact trajectory; at some of its steps the gradient of a few batches is drawn many times by
each estimator. V = E‖ĝ - g‖² over the draws for a batch, all parameters together; σ² is the
variance between batches. A net gain needs ρ(V)(σ² + V) ≤ ρ(0)σ².
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import sketchprop as sp
from sketchprop.core.stopwatch import in_turns
from sketchprop.layers import select

from ..lab.figures import label_axes, picture
from ..lab.noise import Noise, added_noise, gradients_of, minibatch_noise, trained_parameters
from ..lab.pages import made_on, number_text, read_json, write_csv, write_json
from ..lab.problem import EVERYWHERE, Problem, step_ratio, trajectory
from ..lab.study import MeasuredStudy
from ..lab.trainer import Batch, generator
from ..methods import METHODS, Method, make_sketch
from ..problems import small_vit

WORDS = ("columns", "l1", "ds", "gsv", "samples", "samples-one", "tokens", "tokens-input",
         "tokens-independent", "tokens-shuffled", "sampled", "vcas", "wta")  # fmt: skip
ESTIMATORS = {word: METHODS.get(f"default-{word}") or METHODS[word] for word in WORDS}
"""By the words under which results are stored."""
RATE = 5e-4


def gradients(
    model: nn.Module, problem: Problem, batch: Batch, of: Method, budget: float, draws: int
) -> Iterator[list[Tensor]]:
    """``draws`` gradients of one batch; where layers draw in backward, from one forward pass."""
    sketch = make_sketch(of.expression(budget))
    if sketch is None:
        for _ in range(draws):
            loss = sp.sampled_loss(model, problem.loss, *batch, budget)
            yield list(torch.autograd.grad(loss, trained_parameters(model)))
        return
    everywhere = of.layers("all") == EVERYWHERE
    sp.sketch_(model, sketch, select.everything if everywhere else problem.inner)
    try:
        yield from gradients_of(model, problem, batch, draws)
    finally:
        sp.unsketch_(model)


def method_noise(
    model: nn.Module, problem: Problem, noise: Noise, of: Method, budget: float, draws: int
) -> dict[str, Any]:
    """V/σ² of a method, as ``added_noise`` says it."""
    return added_noise(noise, lambda b: gradients(model, problem, b, of, budget, draws))


def step_cost(problem: Problem, of: Method, budget: float, rounds: int) -> dict[str, float]:
    """ρ(V)/ρ(0) by FLOPs and by measured time of forward and backward, in turns with exact."""
    expression, layers = of.expression(budget), of.layers("all")
    plain, model = problem.model(), problem.prepared(expression, layers)
    batch = problem.draw(generator("times", 0), problem.batch_size)

    def exact_step() -> None:
        problem.loss_of(plain, batch).backward()  # type: ignore[no-untyped-call]

    def step() -> None:
        if make_sketch(expression) is None:
            sp.sampled_backward(model, problem.loss, *batch, budget)
        else:
            problem.loss_of(model, batch).backward()  # type: ignore[no-untyped-call]

    one, other = in_turns([exact_step, step], rounds, torch.device("cpu"))
    return {
        "flops": step_ratio(problem, expression, layers),
        "time": median(b / a for a, b in zip(one, other, strict=True)),
    }


@dataclass(frozen=True)
class Settings:
    size: str = "full"
    steps: tuple[int, ...] = (0, 150, 600, 2000)
    budgets: tuple[float, ...] = (0.3, 0.1)
    sigma_batches: int = 16
    batches: int = 4
    draws: int = 6
    rounds: int = 3


class VarianceStudy(MeasuredStudy):
    def measure(self, settings: Settings, out: Path, options: argparse.Namespace) -> None:
        """Adds what is missing, number by number."""
        problem, stored = small_vit(settings.size == "small"), out / "results.json"
        found: dict[str, Any] = {"machine": made_on(), "sigma2": {}, "noise": {}, "cost": {}}
        if stored.is_file():
            found.update(read_json(stored))
        pairs = [(word, budget) for word in ESTIMATORS for budget in settings.budgets]
        for step, model in trajectory(problem, settings.steps, RATE, out):
            missing = [(w, p) for w, p in pairs if f"{step}/{w}/{p:g}" not in found["noise"]]
            if not missing:
                continue
            noise = minibatch_noise(model, problem, settings.sigma_batches, settings.batches)
            found["sigma2"][str(step)] = noise.sigma2.as_dict()
            for word, p in missing:
                line = method_noise(model, problem, noise, ESTIMATORS[word], p, settings.draws)
                found["noise"][f"{step}/{word}/{p:g}"] = line
                write_json(stored, found)
                if not options.quiet:
                    sys.stderr.write(f"step {step}, {word} at {p:g}: V/σ² = {line['ratio']:.3g}\n")
        for word, p in pairs:
            if f"{word}/{p:g}" not in found["cost"]:
                cost = step_cost(problem, ESTIMATORS[word], p, settings.rounds)
                found["cost"][f"{word}/{p:g}"] = cost
        write_json(stored, found)

    def results(self, settings: Settings, out: Path) -> tuple[list[Path], dict[str, Any]]:
        found = read_json(out / "results.json")
        written = [write_csv(out / "results.csv", _flat(found))]
        panels = len(settings.budgets)
        written += picture(out, "variance", panels, lambda axes: _draw(axes, found, settings))
        tables = {budget: _lines(found, settings, budget) for budget in settings.budgets}
        return written, {**found, "tables": tables, "order": _order_lines(found, settings)}


def _flat(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for key, line in found["noise"].items():
        step, name, budget = key.split("/")
        cost = found["cost"][f"{name}/{budget}"]
        rows.append(
            {
                "step": int(step),
                "estimator": name,
                "budget": float(budget),
                **line,
                "flops": cost["flops"],
                "time": cost["time"],
                "sigma2": found["sigma2"][step]["value"],
            }
        )
    return rows


def _draw(axes: Sequence[Any], found: dict[str, Any], settings: Settings) -> None:
    for panel, budget in zip(axes, settings.budgets, strict=True):
        places = range(len(settings.steps))
        for number, (name, of) in enumerate(ESTIMATORS.items()):
            lines = [found["noise"][f"{step}/{name}/{budget:g}"] for step in settings.steps]
            values = [line["ratio"] for line in lines]
            errors = [line["error"] for line in lines]
            style = {"color": f"C{number % 10}", "ls": "-" if number < 10 else "--"}
            panel.errorbar(places, values, errors, marker="o", ms=3, label=of.label, lw=1, **style)
        token = found["cost"][f"tokens-input/{budget:g}"]
        for basis, dots in (("flops", ":"), ("time", "-.")):
            line = max(1e-3, 1 / token[basis] - 1)
            panel.axhline(line, color="k", lw=1, ls=dots, label=f"break-even of tokens, {basis}")
        panel.set_yscale("log")
        panel.set_xticks(list(places), [str(step) for step in settings.steps])
        label_axes(panel, f"budget {budget:g}", "steps of exact training", "V/σ²")
    axes[-1].legend(fontsize=5.5, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _lines(found: dict[str, Any], settings: Settings, budget: float) -> list[list[str]]:
    rows = []
    for name, of in ESTIMATORS.items():
        cost = found["cost"][f"{name}/{budget:g}"]
        limits = [1 / cost[basis] - 1 for basis in ("flops", "time")]
        cells = [of.label]
        for step in settings.steps:
            line = found["noise"][f"{step}/{name}/{budget:g}"]
            value = f"{number_text(line['ratio'])} ± {number_text(line['error'], 2)}"
            value = f"≥ {value}" if line["lower_bound"] else value
            cells.append(f"**{value}**" if line["ratio"] <= limits[0] else value)
        shown = [number_text(limit) if limit > 0 else "never" for limit in limits]
        cells += [f"{cost['flops']:.3f}", shown[0], f"{cost['time']:.3f}", shown[1]]
        rows.append(cells)
    return rows


def _order_lines(found: dict[str, Any], settings: Settings) -> list[list[str]]:
    """Systematic in sample-major order against independent coins and a random order."""
    rows = []
    for budget in settings.budgets:
        for step in settings.steps:
            lines = [
                found["noise"][f"{step}/tokens-{kind}/{budget:g}"]
                for kind in ("input", "shuffled", "independent")
            ]
            base = lines[0]
            cells = [f"{budget:g}", str(step), number_text(base["ratio"])]
            for line in lines[1:]:
                ratio = line["ratio"] / base["ratio"]
                error = ratio * math.hypot(
                    line["own_error"] / line["ratio"], base["own_error"] / base["ratio"]
                )
                cells.append(f"{ratio:.2f} ± {error:.2f}")
            rows.append(cells)
    return rows


VARIANCE = VarianceStudy(
    name="variance",
    help="V/σ² of every sketch over training",
    out="docs/results/rows-variance",
    settings=Settings(),
)
