"""What ``advise`` predicted beside a trial: the best of what it tried, and exact training."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sketchprop as sp
from sketchprop.meters import Moment
from sketchprop.meters.advising.candidates import candidates
from sketchprop.meters.noise.variance import Progress

from ..lab.pages import made_on, number_text
from ..lab.problem import Problem
from ..lab.trainer import Batch, Trainer, generator
from ..pay.outcome import Ratio
from ..pay.predictions import Pair

REPEATS = 3


def least(line: Mapping[str, Any]) -> dict[str, Any]:
    """Of the options of an answer the one with the smallest predicted change."""
    measured: list[dict[str, Any]] = [o for o in line["options"] if o["change"] is not None]
    return min(measured, key=lambda option: option["change"])


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
    gain, change = found.gain(option["name"]), found.change(option["name"])
    return {
        "way": option["name"], "predicted": option["change"], "error": option["error"],
        "found": None if change is None else change.value,
        "found_error": None if change is None else change.error,
        "gain": gain.value, "gain_error": gain.error,
        "steps": [way.steps for way in found.ways], "minutes": minutes, "machine": made_on(),
        "curves": {way.name: [_rounded(curve) for curve in way.curves] for way in found.ways},
    }  # fmt: skip


def _rounded(curve: Sequence[Moment]) -> list[list[float]]:
    """Seconds and losses."""
    return [[round(moment.seconds, 3), round(moment.loss, 5)] for moment in curve]


def _endless(problem: Problem) -> Iterator[Batch]:
    source = generator("tried", 0)
    return (problem.draw(source, problem.batch_size) for _ in itertools.count())


def pairs(trials: Mapping[str, Mapping[str, Any]]) -> list[Pair]:
    """Those in which a loss fell far enough to compare times."""
    found = []
    for task, line in trials.items():
        if line["found"] is not None:
            value, spread = line["found"], 2 * line["found_error"]
            ratio = Ratio(value, value - spread, value + spread, 0.0)
            found.append(Pair(task, line["way"], line["predicted"], line["error"], ratio))
    return found


def cells(task: str, line: Mapping[str, Any]) -> list[str]:
    def with_error(value: float | None, error: float | None) -> str:
        if value is None or error is None:
            return "-"
        return f"{number_text(value)} ± {number_text(error, 2)}"

    certain = math.isfinite(line["gain_error"]) and abs(line["gain"]) > 2 * line["gain_error"]
    place = "ahead" if line["gain"] > 0 else "behind"
    return [
        task, f"`{line['way']}`", with_error(line["predicted"], line["error"]),
        with_error(line["found"], line["found_error"]),
        with_error(line["gain"], line["gain_error"]), place if certain else "not certain",
        " / ".join(f"{steps:.0f}" for steps in line["steps"]),
    ]  # fmt: skip
