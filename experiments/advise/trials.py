"""What ``advise`` predicted beside a trial: the best of what it tried, and exact training."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sketchprop as sp
from sketchprop.meters import Moment, Option, Trial, Way
from sketchprop.meters.advising.candidates import candidates
from sketchprop.meters.noise.estimate import Estimate
from sketchprop.meters.noise.variance import Progress

from ..lab.pages import made_on, number_text
from ..lab.problem import Problem
from ..lab.trainer import Batch, Trainer, generator
from ..pay.outcome import Ratio
from ..pay.predictions import Pair, read_option

REPEATS = 3


def least(line: Mapping[str, Any]) -> dict[str, Any]:
    """Of the options of an answer the one with the smallest predicted change."""
    measured: list[dict[str, Any]] = [o for o in line["options"] if o["change"] is not None]
    return min(measured, key=lambda option: option["change"])


def said(answer: Mapping[str, Any], way: str) -> Option | None:
    """What an answer predicts of a way; ``None``: it was not tried."""
    options = {o["name"]: read_option(o) for o in answer["options"] if o["change"] is not None}
    return options.get(way)


def try_out(
    problem: Problem,
    trainer: Trainer,
    line: Mapping[str, Any],
    minutes: float,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Trains from where ``advise`` was asked, in turns; the clock counts this process alone."""
    option = least(line)
    known = {c.name: c for c in candidates(trainer.model, line["live"])[0]}
    found = sp.trial(
        trainer.model, problem.loss_of, _endless(problem), trainer.optimizer,
        known[option["name"]], minutes=minutes, repeats=REPEATS, control=False,
        clock=time.process_time, progress=progress,
    )  # fmt: skip
    return {
        "way": option["name"], "minutes": minutes, "machine": made_on(),
        "curves": {way.name: [_rounded(curve) for curve in way.curves] for way in found.ways},
    }  # fmt: skip


def _rounded(curve: Sequence[Moment]) -> list[list[float]]:
    """Seconds, steps and losses."""
    return [[round(m.seconds, 3), m.steps, round(m.loss, 8)] for m in curve]


def stored(line: Mapping[str, Any]) -> Trial:
    """The trial of a stored line."""
    ways = (
        Way(name, tuple(tuple(Moment(*m) for m in curve) for curve in curves))
        for name, curves in line["curves"].items()
    )
    return Trial(tuple(ways), 0, 0, 60 * line["minutes"])


def _endless(problem: Problem) -> Iterator[Batch]:
    source = generator("tried", 0)
    return (problem.draw(source, problem.batch_size) for _ in itertools.count())


def pairs(
    trials: Mapping[str, Mapping[str, Any]], answers: Mapping[str, Mapping[str, Any]]
) -> list[Pair]:
    """Those in which a loss fell far enough to compare times."""
    found = []
    for task, line in trials.items():
        change, told = stored(line).change(line["way"]), said(answers[task], line["way"])
        if change is not None and told is not None:
            spread = 2 * change.error
            ratio = Ratio(change.value, change.value - spread, change.value + spread, 0.0)
            found.append(Pair(task, line["way"], told, ratio))
    return found


def cells(task: str, line: Mapping[str, Any], answer: Mapping[str, Any]) -> list[str]:
    def with_error(found: Estimate | None) -> str:
        return (
            "-" if found is None else f"{number_text(found.value)} ± {number_text(found.error, 2)}"
        )

    trial, name = stored(line), line["way"]
    gain, change, told = trial.gain(name), trial.change(name), said(answer, line["way"])
    place = "ahead" if gain.value > 0 else "behind"
    return [
        task, f"`{line['way']}`", with_error(told.in_all if told else None), with_error(change),
        with_error(gain), place if trial.certain(name) else "not certain",
        " / ".join(f"{way.steps:.0f}" for way in trial.ways),
    ]  # fmt: skip
