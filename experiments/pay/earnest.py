"""The winner of a task against its control by the clock: both run in turns to their full time."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from ..lab.checkpoints import Checkpoints
from ..lab.engine import one_thread
from ..lab.pages import made_on
from ..lab.sweep import Run
from .outcome import Curve, Outcome

TURNS = 20


def run_in_earnest(
    outcome: Outcome,
    curve: Curve,
    share: float,
    known: dict[str, Any],
    quiet: bool,
    keep: Callable[[dict[str, Any]], object],
    saved: Checkpoints,
) -> None:
    """Exact training for the whole time, the way for ``share`` of it; seconds of steps alone.

    One process, one thread. By seed, each of which is kept as soon as it is done, and its state on
    the way; what is ``known`` of the same way and share is not run again. Where batches differ in
    length one seed may meet longer ones than another, so that several are needed.
    """
    told = {"way": curve.way.name, "batch": curve.batch, "share": round(share, 6)}
    seeds = known.get("seeds", {}) if told.items() <= known.items() else {}
    with one_thread():
        for seed in outcome.contest.clocked:
            if str(seed) in seeds:
                continue
            seeds = {**seeds, str(seed): _one_seed(outcome, curve, share, seed, quiet, saved)}
            exact, own = (sum(one["seconds"][i] for one in seeds.values()) for i in (0, 1))
            keep({**told, "machine": made_on(), "ratio": own / exact, "seeds": seeds})


def _one_seed(
    outcome: Outcome, curve: Curve, share: float, seed: int, quiet: bool, saved: Checkpoints
) -> dict[str, Any]:
    """A twentieth of one run after a twentieth of the other, so that a slow minute meets both."""
    control = outcome.control
    assert control is not None
    runs = []
    for side, length in ((control, 1.0), (curve, share)):
        cell = outcome.contest.cell(side.way, side.batch, length, outcome.costs, tested=1)
        runs.append(Run(cell, outcome.contest.rates.index(side.rate), seed))
    trainers = [run.cell.trainer(run)[0] for run in runs]  # type: ignore[attr-defined]
    states = [saved.of(run.identity) for run in runs]
    for trainer, state in zip(trainers, states, strict=True):
        if (found := state.load()) is not None:
            trainer.load_state(found)
    for turn in range(1, TURNS + 1):
        for trainer, state in zip(trainers, states, strict=True):
            trainer.run_to(math.ceil(trainer.marks[-1] * turn / TURNS), state)
        if not quiet:
            told = f"{outcome.contest.task}, in earnest, seed {seed}: {turn / TURNS:.0%}\n"
            sys.stderr.write(told)
    saved.remove({run.identity for run in runs})
    ends = [trainer.found() for trainer in trainers]
    return {
        "seconds": [sum(one["seconds_curve"]) for one in ends],
        "quality": [one["test_curve"][-1] for one in ends],
    }
