"""Fine-tuning: an encoder trained on one task, then on another, with few of its rows.

First it guesses hidden bytes of the standard library's source; then it tells from which package a
snippet is. How heavy the tails of the gradient's norms are is measured along the way.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sketchprop as sp

from . import sheet
from .loop import Contest, Task, Trainer, compete
from .mnist import generator
from .pay import EXACT, chosen_runs, flat, rows, sampled, smaller_batch, step_seconds
from .tasks import masked_bytes, packages, text_note
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


def run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    sp.keep_pages()
    out, stored = Path(options.out or FOLDER), Path(options.out or FOLDER) / "results.json"
    contest = PRESETS[options.preset]
    if not options.stored:
        small = options.preset == "smoke"
        first, reached = pretrained(masked_bytes(small), FIRST_STEPS[options.preset], out)
        task = packages(small, first)
        tails = [tail(task, contest, out, when, NOISE[options.preset]) for when in ("start",)]
        results = compete(task, contest, out)
        tails.append(tail(task, contest, out, "end", NOISE[options.preset]))
        content = {"machine": sheet.made_on(), "title": task.title, "first": reached}
        sheet.write_json(stored, {**content, "tails": tails, "runs": results})
    for path in write_results(sheet.read_json(stored), contest, options.preset, out):
        sys.stdout.write(f"{path}\n")
    return 0


def pretrained(task: Task, steps: int, out: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The encoder after exact training on the first task, and what it has reached."""
    file = out / "checkpoints" / "first-task.pt"
    trainer = Trainer(task, EXACT, FIRST_RATE, 0, 1.0, steps, 2, file)
    for point in (1, 2):
        trainer.run_to(point)
    return trainer.model.state_dict(), {"steps": steps, "accuracy": trainer.moments[-1].test}


def tail(
    task: Task, contest: Contest, out: Path, when: str, counts: tuple[int, int, int]
) -> dict[str, Any]:
    """Before and after fine-tuning: shares of the largest norms, and V/σ² of rows."""
    torch.manual_seed(0)
    model = task.model()
    if when == "end":
        files = (out / "checkpoints").glob(f"{task.name}-exact-*-{contest.seeds[0]}.pt")
        states = [torch.load(file, weights_only=True) for file in files]
        model.load_state_dict(max(states, key=lambda s: len(s["moments"]))["model"])
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


def write_results(found: dict[str, Any], contest: Contest, name: str, out: Path) -> list[Path]:
    runs = found["runs"]
    written = [sheet.write_csv(out / "results.csv", flat(runs))]
    written += sheet.picture(
        out, "finetune", 1, lambda axes: _draw(axes[0], contest, runs), (7.0, 4.2)
    )
    written.append(sheet.write_page(out / "README.md", _page(found, contest, name)))
    return written


def final(run: dict[str, Any]) -> float:
    """Test accuracy at the moment that is best on validation."""
    return float(max(run["moments"], key=lambda m: m["validation"])["test"])


def _page(found: dict[str, Any], contest: Contest, name: str) -> list[str]:
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
    return [
        f"# Fine-tuning with few rows: preset `{name}`",
        f"A small encoder is trained exactly for {first['steps']} steps to guess hidden bytes "
        f"({first['accuracy']:.1f} % right), then on another task: {found['title']}. All ways "
        f"spend the FLOPs of {contest.length} exact steps, so cheap ways make more of them; the "
        "learning rate is chosen on validation with the first seed. Accuracy on held-out "
        f"stretches of the same files, mean ± standard deviation over seeds. {text_note()}",
        sheet.markdown(header, lines),
        "## Tails",
        f"The share of the largest {TOP:.0%} in the sum of norms ({TOP:g} if all were equal), of "
        "samples at the output and of tokens in G (median over layers), and V/σ² ± its standard "
        "error. **≥**: a lower bound, some of it comes from draws too rare to be met.",
        _tail_table(found["tails"]),
        "![accuracy against cost](finetune.png)",
        f"{sheet.stamp(f'python -m experiments finetune --preset {name}', found['machine'])} "
        "All moments of all runs: [results.csv](results.csv).",
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


def _draw(panel: Any, contest: Contest, runs: Sequence[dict[str, Any]]) -> None:
    for way in contest.ways:
        own = chosen_runs(runs, way)
        x = [m["cost"] for m in own[0]["moments"]]
        by_moment = zip(*([m["test"] for m in run["moments"]] for run in own), strict=True)
        y = [statistics.mean(values) for values in by_moment]
        look = {"color": sheet.colour(way.colour), "ls": way.line, "label": way.label}
        panel.plot(x, y, marker="o", ms=2, lw=1.2, **look)
    sheet.dress(panel, "mean over seeds", "FLOPs, in exact steps", "test accuracy (%)")
    panel.legend(fontsize=6, loc="lower right")
