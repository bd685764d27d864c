"""V/σ² over training, for every sketch: what an estimator adds to the noise of a minibatch.

One exact trajectory; at some of its steps the gradient of a few batches is drawn many times by
each estimator. V = E‖ĝ - g‖² over the draws for a batch, all parameters together; σ² is the
variance between batches. A net gain needs ρ(V)(σ² + V) ≤ ρ(0)σ².
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import sketchprop as sp
from sketchprop.core.stopwatch import in_turns
from sketchprop.layers import select
from sketchprop.meters.noise.estimate import Estimate, minibatch_variance, over_draws
from sketchprop.meters.noise.passes import squared_distance
from sketchprop.meters.noise.variance import alignment, surprising
from sketchprop.sketches import VCAS, WTACRS, Rows, Sketch

from . import sheet
from .loop import Batch, Task, Trainer, Way
from .mnist import generator
from .tasks import small_vit

EXACT = Way("exact", "exact", "baseline")
FOLDER = "docs/results/rows-variance"


class ShuffledRows(Rows):
    """Rows met in random order by the systematic draw: what the order of rows gives."""

    def draw(self, p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.randperm(p.shape[-1])
        index, scale = super().draw(p[order], u)
        return order[index], scale


@dataclass(frozen=True)
class Estimator:
    """A way to draw a gradient: a sketch in the layers, or whole samples outside of them."""

    label: str
    make: Callable[[float], Sketch] | None
    everywhere: bool = False
    note: str = ""


def vcas(p: float) -> Sketch:
    """4p/3 of the samples and half of their rows for dW: together p of the exact backward."""
    return VCAS(0.5, samples=min(1.0, 4 * p / 3))


ESTIMATORS = {
    "columns": Estimator("uniform columns", sp.ColumnMask),
    "l1": Estimator("ℓ1", sp.L1),
    "ds": Estimator("DS", sp.Diagonal),
    "gsv": Estimator("G-SV", sp.GradientSVD),
    "samples": Estimator(
        "samples, each layer", lambda p: Rows(p, unit="sample"), note="drawn anew in each layer"
    ),
    "samples-one": Estimator(
        "samples, one draw",
        lambda p: Rows(p, unit="sample"),
        everywhere=True,
        note="the head draws too: one draw for all layers",
    ),
    "tokens": Estimator("tokens ‖g‖", Rows),
    "tokens-input": Estimator("tokens ‖g‖‖x‖", lambda p: Rows(p, weights="gradient_input")),
    "tokens-independent": Estimator(
        "tokens ‖g‖‖x‖, independent",
        lambda p: Rows(p, weights="gradient_input", sampling="independent"),
    ),
    "tokens-shuffled": Estimator(
        "tokens ‖g‖‖x‖, shuffled", lambda p: ShuffledRows(p, weights="gradient_input")
    ),
    "sampled": Estimator("sampled_backward", None),
    "vcas": Estimator("VCAS", vcas, note="4p/3 of the samples, half of their rows for dW"),
    "wta": Estimator("WTA-CRS", WTACRS, note="dW only; dX is exact"),
}


def gradients(
    model: nn.Module, task: Task, batch: Batch, of: Estimator, budget: float, draws: int
) -> Iterator[list[Tensor]]:
    """``draws`` gradients of one batch; where layers draw in backward, from one forward pass."""
    parameters = list(model.parameters())
    if of.make is None:
        for _ in range(draws):
            loss = sp.sampled_loss(model, task.loss, *batch, budget)
            yield list(torch.autograd.grad(loss, parameters))
        return
    sp.sketch_(model, of.make(budget), select.everything if of.everywhere else task.inner)
    try:
        loss = task.loss_of(model, batch)
        for _ in range(draws):
            yield list(torch.autograd.grad(loss, parameters, retain_graph=True))
    finally:
        sp.unsketch_(model)


def exact_gradient(model: nn.Module, task: Task, batch: Batch) -> list[Tensor]:
    return list(torch.autograd.grad(task.loss_of(model, batch), list(model.parameters())))


@dataclass(frozen=True)
class Noise:
    """σ² and the batches on which V is measured, with their exact gradients."""

    sigma2: Estimate
    batches: tuple[Batch, ...]
    exact: tuple[list[Tensor], ...]


def minibatch_noise(model: nn.Module, task: Task, count: int, kept: int) -> Noise:
    """σ² from ``count`` batches; the first ``kept`` of them are for V."""
    source = generator("noise", 0)
    batches = [task.draw(source, task.batch_size) for _ in range(count)]
    mean: list[Tensor] = []
    norms, kept_gradients = [], []
    for i, batch in enumerate(batches):
        g = exact_gradient(model, task, batch)
        if i < kept:
            kept_gradients.append(g)
        mean = g if not mean else [m + (a - m) / (i + 1) for m, a in zip(mean, g, strict=True)]
        norms.append(g)
    deviations = [squared_distance(g, mean) for g in norms]
    return Noise(minibatch_variance(deviations), tuple(batches[:kept]), tuple(kept_gradients))


def added_noise(
    model: nn.Module, task: Task, noise: Noise, of: Estimator, budget: float, draws: int
) -> dict[str, Any]:
    """V/σ² with its standard error; whether the draws met all that V comes from."""
    totals: list[list[float]] = []
    aligned: list[list[list[float]]] = [[] for _ in model.parameters()]
    torch.manual_seed(0)
    for batch, exact in zip(noise.batches, noise.exact, strict=True):
        totals.append([])
        for of_parameter in aligned:
            of_parameter.append([])
        for drawn in gradients(model, task, batch, of, budget, draws):
            totals[-1].append(squared_distance(drawn, exact))
            for of_parameter, value in zip(aligned, alignment(drawn, exact), strict=True):
                of_parameter[-1].append(value)
    V = over_draws(totals)
    ratio = V.value / noise.sigma2.value
    own = V.error / V.value if V.value else 0.0
    return {
        "ratio": ratio,
        "error": ratio * math.hypot(own, noise.sigma2.error / noise.sigma2.value),
        "own_error": ratio * own,
        "lower_bound": any(surprising(of_parameter) for of_parameter in aligned),
        "largest": max(map(max, totals)) / noise.sigma2.value,
    }


def step_cost(task: Task, name: str, budget: float, rounds: int) -> dict[str, float]:
    """ρ(V)/ρ(0) by FLOPs and by measured time of forward and backward, in turns with exact."""
    of = ESTIMATORS[name]
    sampled = 0.0 if of.make else budget
    way = Way(name, of.label, "rows", sampled=sampled, everywhere=of.everywhere)
    model = task.model()
    exact = task.step_flops(EXACT)
    if of.make is None:
        flops = task.step_flops(way)
    else:
        filter_fn = select.everything if of.everywhere else task.inner
        sp.sketch_(model, of.make(budget), filter_fn)
        batch = task.draw(generator("flops", 0), task.batch_size)
        report = sp.meters.measure_flops(model, task.loss_of, batch)
        flops = report.forward + report.sketched_backward
    plain = task.model()
    batch = task.draw(generator("times", 0), task.batch_size)

    def exact_step() -> None:
        task.loss_of(plain, batch).backward()  # type: ignore[no-untyped-call]

    def step() -> None:
        if of.make is None:
            sp.sampled_backward(plain, task.loss, *batch, budget)
        else:
            task.loss_of(model, batch).backward()  # type: ignore[no-untyped-call]

    one, other = in_turns([exact_step, step], rounds, torch.device("cpu"))
    return {
        "flops": flops / exact,
        "time": median(b / a for a, b in zip(one, other, strict=True)),
    }


def trajectory(
    task: Task, steps: Sequence[int], rate: float, folder: Path
) -> Iterator[tuple[int, nn.Module]]:
    """The model after each of ``steps`` of exact training; continues from what is on disk."""
    model = Trainer(task, EXACT, rate, 0, 1.0, max(*steps, 1), 1).model
    yield 0, model
    for before, step in pairwise(steps):
        file = folder / "checkpoints" / f"{task.name}-{step}.pt"
        if not file.is_file():
            start = folder / "checkpoints" / f"{task.name}-{before}.pt"
            trainer = Trainer(task, EXACT, rate, 0, 1.0, steps[-1], 1, start)
            trainer.moments = []
            _train(trainer, step)
            trainer._save(file)
        model.load_state_dict(torch.load(file, weights_only=True)["model"])
        yield step, model


def _train(trainer: Trainer, step: int) -> None:
    torch.set_rng_state(trainer.random)
    while trainer.step < step:
        trainer._one(trainer.task.draw(trainer.batches, trainer.task.batch_size))
    trainer.random = torch.get_rng_state()


@dataclass(frozen=True)
class Preset:
    steps: tuple[int, ...]
    budgets: tuple[float, ...]
    sigma_batches: int
    batches: int
    draws: int
    rounds: int


PRESETS = {
    "smoke": Preset((0, 4), (0.3,), 4, 2, 3, 1),
    "cpu": Preset((0, 150, 600, 2000), (0.3, 0.1), 16, 4, 6, 3),
}
RATE = 5e-4


def run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    sp.keep_pages()
    preset, out = PRESETS[options.preset], Path(options.out or FOLDER)
    stored = out / "results.json"
    if not options.stored:
        measure(small_vit(options.preset == "smoke"), preset, out, stored, options.quiet)
    for path in write_results(sheet.read_json(stored), preset, options.preset, out):
        sys.stdout.write(f"{path}\n")
    return 0


def measure(task: Task, preset: Preset, out: Path, stored: Path, quiet: bool) -> None:
    """Adds what ``stored`` lacks, figure by figure."""
    found: dict[str, Any] = {"machine": sheet.made_on(), "sigma2": {}, "noise": {}, "cost": {}}
    if stored.is_file():
        found.update(sheet.read_json(stored))
    for step, model in trajectory(task, preset.steps, RATE, out):
        missing = [
            (name, budget)
            for name in ESTIMATORS
            for budget in preset.budgets
            if f"{step}/{name}/{budget:g}" not in found["noise"]
        ]
        if not missing:
            continue
        noise = minibatch_noise(model, task, preset.sigma_batches, preset.batches)
        found["sigma2"][str(step)] = noise.sigma2.as_dict()
        for name, budget in missing:
            line = added_noise(model, task, noise, ESTIMATORS[name], budget, preset.draws)
            found["noise"][f"{step}/{name}/{budget:g}"] = line
            sheet.write_json(stored, found)
            if not quiet:
                sys.stderr.write(f"step {step}, {name} at {budget:g}: V/σ² = {line['ratio']:.3g}\n")
    for name in ESTIMATORS:
        for budget in preset.budgets:
            if f"{name}/{budget:g}" not in found["cost"]:
                found["cost"][f"{name}/{budget:g}"] = step_cost(task, name, budget, preset.rounds)
    sheet.write_json(stored, found)


def write_results(found: dict[str, Any], preset: Preset, name: str, out: Path) -> list[Path]:
    written = [sheet.write_csv(out / "results.csv", _flat(found, preset))]
    written += sheet.picture(
        out, "variance", len(preset.budgets), lambda axes: _draw(axes, found, preset)
    )
    written.append(sheet.write_page(out / "README.md", _page(found, preset, name)))
    return written


def _flat(found: dict[str, Any], preset: Preset) -> list[dict[str, Any]]:
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


def _draw(axes: Sequence[Any], found: dict[str, Any], preset: Preset) -> None:
    for panel, budget in zip(axes, preset.budgets, strict=True):
        places = range(len(preset.steps))
        for number, (name, of) in enumerate(ESTIMATORS.items()):
            lines = [found["noise"][f"{step}/{name}/{budget:g}"] for step in preset.steps]
            values = [line["ratio"] for line in lines]
            errors = [line["error"] for line in lines]
            style = {"color": f"C{number % 10}", "ls": "-" if number < 10 else "--"}
            panel.errorbar(places, values, errors, marker="o", ms=3, label=of.label, lw=1, **style)
        token = found["cost"][f"tokens-input/{budget:g}"]
        for basis, dots in (("flops", ":"), ("time", "-.")):
            line = max(1e-3, 1 / token[basis] - 1)
            panel.axhline(line, color="k", lw=1, ls=dots, label=f"break-even of tokens, {basis}")
        panel.set_yscale("log")
        panel.set_xticks(list(places), [str(step) for step in preset.steps])
        sheet.dress(panel, f"budget {budget:g}", "steps of exact training", "V/σ²")
    axes[-1].legend(fontsize=5.5, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _page(found: dict[str, Any], preset: Preset, name: str) -> list[str]:
    sigma = ", ".join(
        f"{step}: {s['value']:.3g} ± {s['error']:.1g}" for step, s in found["sigma2"].items()
    )
    parts = [
        f"# The variance that sketches add over training: preset `{name}`",
        "A small ViT (dimension 96, depth 4, batch 128) is trained exactly on CIFAR-10 (AdamW). "
        "After some steps the gradients of "
        f"{preset.batches} batches are drawn {preset.draws} times by each estimator. V/σ² over all "
        "parameters ± its standard error (over batches and draws, and of σ²). Every linear layer "
        "in the blocks is sketched. **≥**: the mean of the draws misses the gradient of some "
        "parameter by more than five standard errors: V comes from draws too rare to be met and is "
        "larger than shown. Where columns compound, a few draws carry V even without that sign.",
        f"σ² after each number of steps, from {preset.sigma_batches} batches: {sigma}.",
    ]
    for budget in preset.budgets:
        parts += [f"## Budget {budget:g}", _table(found, preset, budget)]
    parts += [
        "The break-even columns are the largest V/σ² at which ρ(V)(σ² + V) ≤ ρ(0)σ² holds, with "
        "ρ by FLOPs (scores and draws included) and by the measured time of forward and backward; "
        "**bold** values are below the one by FLOPs. 'never': a step costs no less than an exact "
        "one. Rows of G by unit sample are drawn anew in each block unless the head draws too "
        "('one draw'); VCAS keeps 4p/3 of the samples and half of their rows for dW, without its "
        "control of budgets, its samples drawn in each layer; WTA-CRS leaves dX exact.",
        "## The order of the rows",
        _order_text(found, preset),
        "![V/σ² over training](variance.png)",
        f"{sheet.stamp(f'python -m experiments variance --preset {name}', found['machine'])} All "
        "figures: [results.csv](results.csv).",
    ]
    return parts


def _table(found: dict[str, Any], preset: Preset, budget: float) -> str:
    header = ["estimator", *(f"after {step}" for step in preset.steps)]
    header += ["FLOPs of a step", "break-even", "time of a step", "break-even by time"]
    rows = []
    for name, of in ESTIMATORS.items():
        cost = found["cost"][f"{name}/{budget:g}"]
        limits = [1 / cost[basis] - 1 for basis in ("flops", "time")]
        cells = [of.label]
        for step in preset.steps:
            line = found["noise"][f"{step}/{name}/{budget:g}"]
            value = f"{sheet.figure_text(line['ratio'])} ± {sheet.figure_text(line['error'], 2)}"
            value = f"≥ {value}" if line["lower_bound"] else value
            cells.append(f"**{value}**" if line["ratio"] <= limits[0] else value)
        shown = [sheet.figure_text(limit) if limit > 0 else "never" for limit in limits]
        cells += [f"{cost['flops']:.3f}", shown[0], f"{cost['time']:.3f}", shown[1]]
        rows.append(cells)
    return sheet.markdown(header, rows)


def _order_text(found: dict[str, Any], preset: Preset) -> str:
    """Systematic in sample-major order against independent coins and a random order."""
    header = ["budget", "steps", "sample-major", "shuffled / sample-major",
              "independent / sample-major"]  # fmt: skip
    rows = []
    for budget in preset.budgets:
        for step in preset.steps:
            lines = [
                found["noise"][f"{step}/tokens-{kind}/{budget:g}"]
                for kind in ("input", "shuffled", "independent")
            ]
            base = lines[0]
            cells = [f"{budget:g}", str(step), sheet.figure_text(base["ratio"])]
            for line in lines[1:]:
                ratio = line["ratio"] / base["ratio"]
                error = ratio * math.hypot(
                    line["own_error"] / line["ratio"], base["own_error"] / base["ratio"]
                )
                cells.append(f"{ratio:.2f} ± {error:.2f}")
            rows.append(cells)
    return sheet.markdown(header, rows)
