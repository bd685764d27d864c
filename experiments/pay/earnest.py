"""The winner of a task against its control by the clock: both run in turns to their full time."""

from __future__ import annotations

import math
import sys
from typing import Any

from ..lab.engine import one_thread
from ..lab.pages import made_on
from ..lab.sweep import Run
from .outcome import Curve, Outcome

TURNS = 20


def run_in_earnest(outcome: Outcome, curve: Curve, share: float, quiet: bool) -> dict[str, Any]:
    """Exact training for the whole time, the way for ``share`` of it; seconds of steps alone.

    One process, one thread, a twentieth of one run after a twentieth of the other, so that a slow
    minute meets both.
    """
    control, seed = outcome.control, outcome.contest.seeds[0]
    assert control is not None
    runs = []
    for side, length in ((control, 1.0), (curve, share)):
        chosen = outcome.plan.chosen(side.way, side.batch)
        assert chosen is not None
        cell = outcome.contest.cell(side.way, side.batch, length, outcome.costs, tested=1)
        runs.append(Run(cell, chosen.rate_index, seed))
    with one_thread():
        trainers = [run.cell.trainer(run)[0] for run in runs]  # type: ignore[attr-defined]
        for turn in range(1, TURNS + 1):
            for trainer in trainers:
                trainer.run_to(math.ceil(trainer.marks[-1] * turn / TURNS))
            if not quiet:
                sys.stderr.write(f"{outcome.contest.task}, in earnest: {turn / TURNS:.0%}\n")
        machine = made_on()
    found = [trainer.found() for trainer in trainers]
    seconds = [sum(one["seconds_curve"]) for one in found]
    return {
        "way": curve.way.name, "batch": curve.batch, "share": share, "machine": machine,
        "seconds": seconds, "ratio": seconds[1] / seconds[0],
        "quality": [one["test_curve"][-1] for one in found],
    }  # fmt: skip
