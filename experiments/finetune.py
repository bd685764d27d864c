"""Fine-tuning: a transformer trained on one task, then on another, with few of its rows.

Two cases: a hard one, whose gradient norms stay flat (an encoder that has guessed hidden bytes of
source code is to name the package), and an easy one, where a few samples soon carry the gradient (a
ViT that knows the digits 0 to 4 learns 5 to 9). How heavy the tails are is measured along the way.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sketchprop as sp

from . import sheet
from .loop import Contest, Task, Trainer, compete
from .mnist import generator
from .pay import EXACT, chosen_runs, flat, rows, sampled, smaller_batch, step_seconds
from .tasks import high_digits, low_digits, masked_bytes, packages, text_note
from .variance import ESTIMATORS, added_noise, minibatch_noise
from .weight_variance import captured

FOLDER = "docs/results/rows-finetune"
WAYS = (EXACT, smaller_batch(0.3), smaller_batch(0.1), rows(0.3, "token"), rows(0.1, "token"),
        rows(0.3, "sample"), rows(0.1, "sample"), sampled(0.3), sampled(0.1))  # fmt: skip
MEASURED = ("tokens", "tokens-input", "samples-one", "sampled")
TOP = 0.1
PRESETS = {
    "smoke": Contest(WAYS[:1] + WAYS[3:4] + WAYS[7:8], (1e-3, 2e-3), (0, 1), 6, 2),
    "cpu": Contest(WAYS, (2e-4, 5e-4, 1.2e-3), (0, 1, 2), 240, 6),
}
FIRST_STEPS = {"smoke": 8, "cpu": 1500}
FIRST_RATE = 1e-3
NOISE = {"smoke": (4, 2, 3), "cpu": (16, 4, 8)}
"""Batches for σ², batches for V, draws for each."""


@dataclass(frozen=True)
class Transfer:
    """From one task to another."""

    name: str
    heading: str
    learnt: str
    first: Callable[[bool], Task]
    second: Callable[[bool, dict[str, Tensor]], Task]
    held: str
    """What the accuracy is measured on."""
    more_rates: tuple[float, ...] = ()
    """Tried beside those of the preset."""
    of_source: bool = False
    """Whether its data are the standard library's source, which differs between versions."""


TRANSFERS = {
    case.name: case
    for case in (
        Transfer(
            "packages",
            "A hard second task: source code",
            "A small encoder is trained exactly to guess hidden bytes of source code",
            masked_bytes,
            packages,
            "held-out stretches of the same files.",
            of_source=True,
        ),
        Transfer(
            "digits",
            "An easy second task: digits",
            "A small ViT (dimension 64, depth 3, 16 tokens) is trained exactly on the digits 0 to "
            "4 of MNIST",
            low_digits,
            high_digits,
            "test images.",
            more_rates=(3e-3,),
        ),
    )
}


def run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    sp.keep_pages()
    out, contest = Path(options.out or FOLDER), PRESETS[options.preset]
    if not options.stored:
        for name in [options.task] if options.task else list(TRANSFERS):
            found = transferred(TRANSFERS[name], options.preset, out)
            sheet.write_json(out / f"{name}.json", found)
    stored = {name: out / f"{name}.json" for name in TRANSFERS}
    results = {name: sheet.read_json(file) for name, file in stored.items() if file.is_file()}
    for path in write_results(results, contest, options.preset, out):
        sys.stdout.write(f"{path}\n")
    return 0


def transferred(case: Transfer, preset: str, out: Path) -> dict[str, Any]:
    """Trains the first task, then all ways on the second."""
    small, contest = preset == "smoke", PRESETS[preset]
    contest = replace(contest, rates=contest.rates + case.more_rates)
    first, reached = pretrained(case.first(small), FIRST_STEPS[preset], out)
    task = case.second(small, first)
    torch.manual_seed(0)  # the new head
    tails = [tail(task, task.model(), "start", NOISE[preset])]
    results = compete(task, contest, out)
    tails.append(tail(task, trained_exactly(task, results, contest, out), "end", NOISE[preset]))
    return {
        "machine": sheet.made_on(),
        "title": task.title,
        "first": reached,
        "tails": tails,
        "runs": results,
    }


def pretrained(task: Task, steps: int, out: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The model after exact training on the first task, and what it has reached."""
    file = out / "checkpoints" / f"{task.name}-first.pt"
    trainer = Trainer(task, EXACT, FIRST_RATE, 0, 1.0, steps, 2, file)
    for point in (1, 2):
        trainer.run_to(point)
    return trainer.model.state_dict(), {"steps": steps, "accuracy": trainer.moments[-1].test}


def trained_exactly(
    task: Task, results: Sequence[dict[str, Any]], contest: Contest, out: Path
) -> nn.Module:
    """The model of the chosen exact run of the first seed."""
    rate = chosen_runs(results, EXACT)[0]["rate"]
    file = out / "checkpoints" / f"{task.name}-exact-{rate:g}-{contest.seeds[0]}.pt"
    model = task.model()
    model.load_state_dict(torch.load(file, weights_only=True)["model"])
    return model


def tail(task: Task, model: nn.Module, when: str, counts: tuple[int, int, int]) -> dict[str, Any]:
    """Shares of the largest norms, and V/σ² of rows."""
    torch.manual_seed(0)
    noise = minibatch_noise(model, task, counts[0], counts[1])
    found = {
        f"{name}/{budget:g}": added_noise(model, task, noise, ESTIMATORS[name], budget, counts[2])
        for name in MEASURED
        for budget in (0.3, 0.1)
    }
    return {"when": when, **norms(model, task), "sigma2": noise.sigma2.as_dict(), "noise": found}


def norms(model: nn.Module, task: Task) -> dict[str, Any]:
    """The share that the largest tenth has in Σ‖g‖: of samples at the output, of tokens in G."""
    batch = task.draw(generator("tail", 0), 4 * task.batch_size)
    with torch.no_grad():
        logits = model(batch[0])
    logits.requires_grad_()
    (grad,) = torch.autograd.grad(task.loss(logits, batch[1]), logits)
    layers = {name: share(G.norm(dim=-1)) for name, G, _ in captured(model, task, task.batch_size)}
    return {"samples": share(grad.norm(dim=-1)), "tokens": statistics.median(layers.values())}


def share(values: Tensor) -> float:
    """Of the largest tenth in the sum; 0.1 where all are equal."""
    count = max(1, round(TOP * len(values)))
    return float(values.topk(count).values.sum() / values.sum())


def write_results(
    found: dict[str, dict[str, Any]], contest: Contest, preset: str, out: Path
) -> list[Path]:
    written: list[Path] = []
    parts = [
        f"# Fine-tuning with few rows: preset `{preset}`",
        f"All ways spend the FLOPs of {contest.length} exact steps, so cheap ways make more of "
        "them; the learning rate is chosen on validation with the first seed. Accuracies are mean "
        "± standard deviation over seeds. Times are those of steps made in turns on one thread.",
    ]
    for name, content in found.items():
        runs = content["runs"]
        written.append(sheet.write_csv(out / f"{name}.csv", flat(runs)))
        draw = partial(_draw, contest=contest, runs=runs)
        written += sheet.picture(out, name, 1, draw, (7.0, 4.2))
        parts += _part(TRANSFERS[name], content, contest, preset)
    written.append(sheet.write_page(out / "README.md", parts))
    return written


def final(run: dict[str, Any]) -> float:
    """Test accuracy at the moment that is best on validation."""
    return float(max(run["moments"], key=lambda m: m["validation"])["test"])


def _part(case: Transfer, found: dict[str, Any], contest: Contest, preset: str) -> list[str]:
    runs, first = found["runs"], found["first"]
    exact = {run["seed"]: run for run in chosen_runs(runs, EXACT)}
    header = ["way", "rate", "FLOPs of a step", "time of a step", "steps", "test accuracy",
              "against exact, seed by seed", "by seed"]  # fmt: skip
    lines = []
    for way in contest.ways:
        own = chosen_runs(runs, way)
        values = [final(run) for run in own]
        differences = [final(run) - final(exact[run["seed"]]) for run in own]
        times = [step_seconds(run) / step_seconds(exact[run["seed"]]) for run in own]
        lines.append(
            [
                way.label,
                f"{own[0]['rate']:g}",
                f"{own[0]['cost']:.3f}",
                f"{statistics.median(times):.3f}",
                str(own[0]["steps"]),
                _spread(values),
                "" if way is EXACT else _spread(differences, "+"),
                ", ".join(f"{v:.1f}" for v in values),
            ]
        )
    call = f"python -m experiments finetune --preset {preset}"
    note = f" {text_note(found['machine'])}" if case.of_source else ""
    rates = ", ".join(f"{rate:g}" for rate in sorted({run["rate"] for run in runs}))
    return [
        f"## {case.heading}",
        f"{case.learnt} for {first['steps']} steps ({first['accuracy']:.1f} % right), then on "
        f"another task: {found['title']}. Rates tried: {rates}. Accuracy on {case.held}{note}",
        sheet.markdown(header, lines),
        f"Tails: the share of the largest {TOP:.0%} in the sum of norms ({TOP:g} if all were "
        "equal), of samples at the output and of tokens in G (median over layers), and V/σ² ± its "
        "standard error. **≥**: a lower bound, some of it comes from draws too rare to be met.",
        _tail_table(found["tails"]),
        f"![accuracy against cost]({case.name}.png)",
        f"{sheet.stamp(call, found['machine'])} "
        f"All moments of all runs: [{case.name}.csv]({case.name}.csv).",
    ]


def _spread(values: Sequence[float], sign: str = "") -> str:
    error = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):{sign}.2f} ± {error:.2f}"


def _tail_table(tails: Sequence[dict[str, Any]]) -> str:
    keys = list(tails[0]["noise"])
    names = [f"{ESTIMATORS[k.split('/')[0]].label} {k.split('/')[1]}" for k in keys]
    rows_ = []
    for line in tails:
        cells = [line["when"], f"{line['samples']:.2f}", f"{line['tokens']:.2f}"]
        for key in keys:
            noise = line["noise"][key]
            bound = "≥ " if noise["lower_bound"] else ""
            value = f"{sheet.figure_text(noise['ratio'])} ± {sheet.figure_text(noise['error'], 2)}"
            cells.append(bound + value)
        rows_.append(cells)
    return sheet.markdown(["fine-tuning", "samples", "tokens", *names], rows_)


def _draw(axes: Sequence[Any], contest: Contest, runs: Sequence[dict[str, Any]]) -> None:
    panel = axes[0]
    for way in contest.ways:
        own = chosen_runs(runs, way)
        x = [m["cost"] for m in own[0]["moments"]]
        by_moment = zip(*([m["test"] for m in run["moments"]] for run in own), strict=True)
        y = [statistics.mean(values) for values in by_moment]
        look = {"color": sheet.colour(way.colour), "ls": way.line, "label": way.label}
        panel.plot(x, y, marker="o", ms=2, lw=1.2, **look)
    sheet.dress(panel, "mean over seeds", "FLOPs, in exact steps", "test accuracy (%)")
    panel.legend(fontsize=6, loc="lower right")
