"""Fine-tuning: a transformer trained on one task, then on another, with few of its rows.

Two cases: a hard one, whose gradient norms stay flat (an encoder that has guessed hidden bytes of
source code is to name the package), and an easy one, where a few samples soon carry the gradient (a
ViT that knows the digits 0 to 4 learns 5 to 9). How heavy the tails are is measured along the way.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..lab.checkpoints import FOLDER, Checkpoint
from ..lab.figures import label_axes, picture
from ..lab.layers import captured
from ..lab.noise import minibatch_noise
from ..lab.pages import number_text, write_csv
from ..lab.problem import PROBLEM_FINDINGS, Contest, CostStudy, Problem, ProblemCell
from ..lab.selection import Results
from ..lab.store import read_rows
from ..lab.study import Reading
from ..lab.sweep import Point, Protocol, Run
from ..lab.trainer import generator
from ..problems import high_digits, linear_layers, low_digits, masked_bytes, packages
from ..variance.study import ESTIMATORS, method_noise

MEASURED = ("tokens", "tokens-input", "samples-one", "sampled")
TOP = 0.1
FIRST_RATE = 1e-3
NOISE = {"small": (4, 2, 3), "full": (16, 4, 8)}
"""Batches for σ², batches for V, draws for each."""


@dataclass(frozen=True)
class Transfer:
    """From one task to another."""

    first: Callable[[bool], Problem]
    second: Callable[[bool, dict[str, Tensor]], Problem]
    second_name: str


TRANSFERS = {
    "packages": Transfer(masked_bytes, packages, "packages"),
    "digits": Transfer(low_digits, high_digits, "digits-5"),
}


@dataclass(frozen=True, kw_only=True)
class FinetuneCell(ProblemCell):
    first_steps: int = 1500
    """Of exact training on the first task."""

    def make(self, folder: Path | None) -> Problem:
        return transferred(self.task, self.size, self.first_steps, folder)[0]


@lru_cache(maxsize=2)
def transferred(
    task: str, size: str, steps: int, folder: Path | None
) -> tuple[Problem, dict[str, Any]]:
    """The second task, from a model trained exactly on the first; and what that has reached."""
    case, small = TRANSFERS[task], size == "small"
    first = case.first(small)
    trainer = first.trainer(FIRST_RATE, 0, [steps // 2, steps])
    found = trainer.train(Checkpoint(folder / f"{first.name}-first.pt", 10.0) if folder else None)
    reached = {"steps": steps, "accuracy": found["test_curve"][-1]}
    return case.second(small, trainer.model.state_dict()), reached


@dataclass(frozen=True, kw_only=True)
class FinetuneStudy(CostStudy):
    def measure_task(self, points: Sequence[Point], out: Path) -> dict[str, Any]:
        """The tails before and after exact fine-tuning, which is done once more for that."""
        cell = points[0].cell
        assert isinstance(cell, FinetuneCell)
        folder = out / FOLDER
        problem, reached = transferred(cell.task, cell.size, cell.first_steps, folder)
        torch.manual_seed(0)  # the new head
        tails = [tail(problem, problem.model(), "start", NOISE[cell.size])]
        exact = Results(read_rows(out, self.schema)).of(points[0])
        assert exact is not None
        seed, chosen = next(iter(exact.seeds.items()))
        trainer, _ = cell.trainer(problem, Run(cell, chosen.rate_index, seed))
        trainer.train()
        tails.append(tail(problem, trainer.model, "end", NOISE[cell.size]))
        return {"title": problem.title, "first": reached, "tails": tails}

    def draw(self, reading: Reading) -> list[Path]:
        written: list[Path] = []
        for task, (_, contest) in self.contests(reading).items():
            table = contest.table(TRANSFERS[task].second_name)
            written.append(write_csv(reading.out / f"{task}.csv", table))
            written += picture(reading.out, task, 1, partial(_draw, contest=contest), (7.0, 4.2))
        return written

    def facts(self, reading: Reading) -> dict[str, Any]:
        parts = {}
        for task, (known, contest) in self.contests(reading).items():
            rates = sorted({track.row["learning_rate"] for track in contest.tracks})
            keys = [key.split("/") for key in known["tails"][0]["noise"]]
            heads = [f"{ESTIMATORS[word].label} {budget}" for word, budget in keys]
            tails = [_tail_line(line) for line in known["tails"]]
            lines = accuracy_lines(contest)
            parts[task] = {**known, "rates": rates, "lines": lines, "heads": heads, "tails": tails}
        lengths = {point.cell.length for point in reading.sweep.extras}  # type: ignore[attr-defined]
        return {"parts": parts, "length": max(lengths), "top": TOP}


def tail(
    problem: Problem, model: nn.Module, when: str, counts: tuple[int, int, int]
) -> dict[str, Any]:
    """Shares of the largest norms, and V/σ² of rows."""
    torch.manual_seed(0)
    noise = minibatch_noise(model, problem, counts[0], counts[1])
    found = {
        f"{word}/{p:g}": method_noise(model, problem, noise, ESTIMATORS[word], p, counts[2])
        for word in MEASURED
        for p in (0.3, 0.1)
    }
    return {"when": when, **norms(model, problem), "sigma2": noise.sigma2.as_dict(), "noise": found}


def norms(model: nn.Module, problem: Problem) -> dict[str, Any]:
    """The share that the largest tenth has in Σ‖g‖: of samples at the output, of tokens in G."""
    batch = problem.draw(generator("tail", 0), 4 * problem.batch_size)
    with torch.no_grad():
        logits = model(batch[0])
    logits.requires_grad_()
    (grad,) = torch.autograd.grad(problem.loss(logits, batch[1]), logits)
    one = problem.draw(generator("captured", 0), problem.batch_size)
    layers = captured(model, one, linear_layers(model, problem), problem.loss)
    tokens = statistics.median(share(G.norm(dim=-1)) for G, _, _ in layers.values())
    return {"samples": share(grad.norm(dim=-1)), "tokens": tokens}


def share(values: Tensor) -> float:
    """Of the largest tenth in the sum; 0.1 where all are equal."""
    count = max(1, round(TOP * len(values)))
    return float(values.topk(count).values.sum() / values.sum())


def accuracy_lines(contest: Contest) -> list[list[str]]:
    exact = {track.row["seed"]: track for track in contest.exact}
    lines = []
    for way in contest.ways:
        own = contest.of(way)
        first = own[0].row
        differences = [track.final - exact[track.row["seed"]].final for track in own]
        times = [track.step_seconds / exact[track.row["seed"]].step_seconds for track in own]
        line = [way.label, f"{first['learning_rate']:g}", f"{first['cost']:.3f}"]
        line += [f"{statistics.median(times):.3f}", str(first["steps"])]
        line += [_spread([track.final for track in own])]
        line += ["" if way == contest.ways[0] else _spread(differences, "+")]
        lines.append([*line, ", ".join(f"{track.final:.1f}" for track in own)])
    return lines


def _spread(values: Sequence[float], sign: str = "") -> str:
    error = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):{sign}.2f} ± {error:.2f}"


def _tail_line(line: dict[str, Any]) -> list[str]:
    cells = [line["when"], f"{line['samples']:.2f}", f"{line['tokens']:.2f}"]
    for noise in line["noise"].values():
        bound = "≥ " if noise["lower_bound"] else ""
        cells.append(f"{bound}{number_text(noise['ratio'])} ± {number_text(noise['error'], 2)}")
    return cells


def _draw(axes: Sequence[Any], contest: Contest) -> None:
    panel = axes[0]
    for way in contest.ways:
        own = contest.of(way)
        x = [m["cost"] for m in own[0].moments]
        by_moment = zip(*([m["test"] for m in track.moments] for track in own), strict=True)
        y = [statistics.mean(values) for values in by_moment]
        panel.plot(x, y, marker="o", ms=2, lw=1.2, **way.look)
    label_axes(panel, "mean over seeds", "FLOPs, in exact steps", "test accuracy (%)")
    panel.legend(fontsize=6, loc="lower right")


FINETUNE = FinetuneStudy(
    name="finetune",
    help="a second task with few of the rows",
    out="docs/results/rows-finetune",
    title="Fine-tuning with few rows",
    tasks=tuple(TRANSFERS),
    protocol=Protocol(FinetuneCell(), learning_rates=(0, 1, 2), tuning_seeds=1, widen=0),
    findings=PROBLEM_FINDINGS,
    sort_by=("task",),
)
