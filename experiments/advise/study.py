"""What ``advise`` says of real tasks, each after some steps of training, within its time limit."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import sketchprop as sp
from sketchprop.meters import Advice
from sketchprop.meters.noise.variance import Progress

from ..lab import ExperimentError
from ..lab.checkpoints import FOLDER, Checkpoint
from ..lab.engine import progress_lines
from ..lab.pages import made_on, number_text, read_json, write_csv, write_json
from ..lab.problem import Problem
from ..lab.study import MeasuredStudy
from ..lab.trainer import Batch, Trainer, generator
from ..pay.predictions import draw
from ..pay.predictions import summary as summary_of_pairs
from ..tasks.table import TASKS
from .problems import in_fours, paper_mlp, resnet
from .trials import cells, least, pairs, stored, try_out

STAY, TOKENS = "stay exact", "Tokens"
EXPECTED = {"mlp": STAY, "gpt": STAY, "resnet": STAY, "vit": TOKENS, "yields": TOKENS}
"""What the answer has to be; the others are whatever a trial confirms."""
OWN: dict[str, tuple[Callable[[bool], Problem], float, int]] = {
    "mlp": (paper_mlp, 0.1, 150), "resnet": (resnet, 1e-3, 50),
    "vit256@4": (partial(in_fours, "vit256"), 2.5e-4, 200),
    "yields@4": (partial(in_fours, "yields"), 1e-4, 40),
}  # fmt: skip
"""Beside the real tasks: how it is made, its rate, and steps of training. Those at 4 have the batch
and the rate that are best for kept tokens in ``pay``."""
TRIALS = "trials.json"
ORDER = (
    *("mlp", "gpt", "resnet", "vit", "vit256", "vit256@4", "yields", "yields@4", "mrpc", "sst2"),
    *("sst2-padded", "documents", "reviews"),
)


@dataclass(frozen=True)
class Settings:
    size: str = "full"
    tasks: tuple[str, ...] = ORDER
    minutes: float = 2.0
    """What ``advise`` is given."""
    batches: int = 32
    steps: int = -1
    """Of training before; -1: a third of those of the task's second moment."""


def problem_of(name: str, small: bool) -> tuple[Problem, float, int]:
    """The problem, its rate, and how long it trains before it is asked."""
    if name in OWN:
        make, rate, steps = OWN[name]
        return make(small), rate, steps
    if name not in TASKS:
        raise ExperimentError(f"tasks has {name!r}; use some of {', '.join(ORDER)}")
    task = TASKS[name]
    return task.problem(small), task.rate, task.moments[1] // 3


def trained(name: str, settings: Settings, out: Path) -> tuple[Problem, Trainer, int]:
    """A task after so many steps of training, which are kept on disk."""
    problem, rate, usual = problem_of(name, settings.size == "small")
    steps = usual if settings.steps < 0 else settings.steps
    trainer = problem.trainer(rate, 0, [steps + 1])
    kept = Checkpoint(out / FOLDER / f"{name}-{settings.size}-{steps}.pt", every=0.0)
    if state := kept.load():
        trainer.load_state(state)
    else:
        trainer.run_to(steps)
        kept.offer(trainer.state)
    return problem, trainer, steps


def telling(name: str, quiet: bool) -> Progress | None:
    """Says how much of a task is done."""
    if quiet:
        return None
    report = progress_lines()
    return lambda share: report(share, 1.0, name)


def ask(
    name: str, settings: Settings, out: Path, quiet: bool = True
) -> tuple[Advice, dict[str, Any]]:
    """Asks, with the optimizer that trained before."""
    problem, trainer, steps = trained(name, settings, out)

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        return problem.loss_of(model, batch)

    source = generator("advised", 0)
    batches = [problem.draw(source, problem.batch_size) for _ in range(settings.batches)]
    advice = sp.advise(
        trainer.model, loss_fn, batches, optimizer=trainer.optimizer,
        minutes=settings.minutes, progress=telling(name, quiet),
    )  # fmt: skip
    facts = {"title": problem.title, "batch": problem.batch_size, "steps": steps}
    return advice, {**facts, "minutes": settings.minutes}


class AdviseStudy(MeasuredStudy):
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--task", choices=ORDER, help="only this one, anew")
        parser.add_argument("--minutes", type=float, help="instead of the preset's: a busy machine")
        parser.add_argument(
            "--trial", type=float, metavar="MINUTES",
            help="then train on each task for so long, exact and with the best that was found",
        )  # fmt: skip

    def measure(self, settings: Settings, out: Path, options: argparse.Namespace) -> None:
        """Adds the tasks that are missing; one that is named is asked again."""
        if options.minutes:
            settings = replace(settings, minutes=options.minutes)
        stored = out / "results.json"
        found = read_json(stored, {})
        if options.trial:
            self._try(settings, out, options, found)
            return
        for name in settings.tasks:
            if options.task not in (None, name) or (name in found and not options.task):
                continue
            advice, facts = ask(name, settings, out, options.quiet)
            found[name] = {**facts, "machine": made_on(), **advice.as_dict()}
            out.mkdir(parents=True, exist_ok=True)
            write_json(stored, {task: found[task] for task in ORDER if task in found})
            if not options.quiet:
                said = advice.headline().partition("\n")[0]
                sys.stderr.write(f"{name}, {advice.seconds:.0f} s: {said} {advice.line}\n")

    def _try(
        self, settings: Settings, out: Path, options: argparse.Namespace, asked: dict[str, Any]
    ) -> None:
        """Of what was asked before; one that is named is tried again."""
        if not asked:
            raise ExperimentError("nothing was asked yet; give the command without --trial first")
        tried = read_json(out / TRIALS, {})
        for name, answer in asked.items():
            done = name in tried and tried[name]["way"] == least(answer)["name"]
            if options.task not in (None, name) or (done and not options.task):
                continue
            problem, trainer, _ = trained(name, settings, out)
            progress = telling(name, options.quiet)
            line = try_out(problem, trainer, answer, options.trial, progress)
            tried = {**read_json(out / TRIALS, {}), name: line}
            write_json(out / TRIALS, {task: tried[task] for task in ORDER if task in tried})
            if not options.quiet:
                change = stored(line).change(line["way"])
                found = "-" if change is None else f"{change.value:.2f}"
                change_said = least(answer)["change"]
                sys.stderr.write(f"{name}, {line['way']}: {change_said:.2f}, {found}\n")

    def results(self, settings: Settings, out: Path) -> tuple[list[Path], dict[str, Any]]:
        found = read_json(out / "results.json")
        summary = [_summary(name, line) for name, line in found.items()]
        options = [
            {"task": name, **option}
            for name, line in found.items()
            for option in (*line["options"], *([line["control"]] if line["control"] else []))
        ]
        written = [
            write_csv(out / "summary.csv", summary),
            write_csv(out / "options.csv", options),
        ]
        trials = read_json(out / TRIALS, {})
        if trials:
            written += draw(pairs(trials, found), out)
        facts = {
            "trials": [cells(task, line, found[task]) for task, line in trials.items()],
            "trial": next(iter(trials.values()), None),
            "held": summary_of_pairs(pairs(trials, found)),
            "lines": [_cells(line) for line in summary],
            "found": found,
            "tables": {name: _table(line) for name, line in found.items()},
            "right": sum(line["as_expected"] == "yes" for line in summary),
            "expected": sum(line["as_expected"] != "" for line in summary),
            "machine": next(iter(found.values()))["machine"],
        }
        return written, facts


def _summary(name: str, line: dict[str, Any]) -> dict[str, Any]:
    best = least(line)
    answer = line["line"] or line.get("answer", STAY)
    wanted = EXPECTED.get(name, "")
    return {
        "task": name,
        "batch": line["batch"],
        "steps": line["steps"],
        "batches": line["batches"],
        "answer": answer,
        "change": line["change"],
        "least": best["name"],
        "least_change": best["change"],
        "least_error": best["error"],
        "half_batch": None if line["control"] is None else line["control"]["change"],
        "signal": line["signal"],
        "live": line["live"],
        "minutes": line["minutes"],
        "seconds": line["seconds"],
        "as_expected": "" if not wanted else "yes" if wanted in answer else "no",
        "reason": line["reason"],
    }


def _cells(line: dict[str, Any]) -> list[str]:
    half = "-" if line["half_batch"] is None else number_text(line["half_batch"])
    error = math.inf if line["least_error"] is None else line["least_error"]
    least = f"{number_text(line['least_change'])} ± {number_text(error, 2)} ({line['least']})"
    return [
        line["task"], str(line["steps"]), str(line["batches"]), f"`{line['answer']}`",
        number_text(line["change"]), least, half,
        f"{line['seconds']:.0f} of {60 * line['minutes']:.0f}",
        line["as_expected"] or "-", line["reason"],
    ]  # fmt: skip


def _table(line: dict[str, Any]) -> list[list[str]]:
    shown = [*line["options"], *([line["control"]] if line["control"] else [])]
    names = ("time", "noise", "change", "error", "memory")
    return [
        [o["name"], *("-" if o[n] is None else number_text(o[n]) for n in names), o["note"]]
        for o in shown
    ]


ADVISE = AdviseStudy(
    name="advise",
    help="what advise says of real tasks, in two minutes each",
    published={"cpu": "advise"},
    settings=Settings(),
)
