"""What a step of each way costs: all of them timed in turns, in one process, on one thread."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from functools import partial
from statistics import fmean, median, quantiles
from typing import Any

import torch
from torch import nn

from sketchprop.core.stopwatch import in_turns
from sketchprop.meters import saved_bytes

from ..lab.engine import one_thread
from ..lab.pages import made_on
from ..lab.problem import Problem
from ..lab.trainer import Batch, generator, initialised
from ..tasks.table import PAD, TASKS
from .contest import Contest
from .ways import TUNER, find_way

DRAWN, STEPS = 1500, 3
"""Batches of each size that are looked at, and those of them that are timed together."""
LEAST, MOST = 5, 60
"""Rounds of turns."""
RATE = 1e-6
"""So small that the timed model stays what it is."""


def missing_kinds(contest: Contest, known: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Sketches and batch sizes whose steps were not timed."""
    stored = known.get("costs", {})
    return [kind for kind in contest.kinds if "{}/{}".format(*kind) not in stored]


def measure_times(
    contest: Contest, known: Mapping[str, Any], seconds: float, quiet: bool = False
) -> dict[str, Any]:
    """Seconds of a step by ``sketch/batch``, and its ratio to an exact one at the middle size.

    A ratio is the median over rounds, in each of which all are timed once, in random order.
    What is ``known`` stays; the rest is timed beside an exact step.
    """
    problem = TASKS[contest.task].problem(contest.size == "small")
    batches = {size: typical(problem.draw, size) for size in contest.batches}
    kinds = list(dict.fromkeys([("", contest.middle), *missing_kinds(contest, known)]))
    models = {sketch: initialised(partial(problem.prepared, sketch), 0) for sketch, _ in kinds}
    if not quiet:
        sys.stderr.write(f"{contest.task}: {len(kinds)} kinds of steps are timed in turns\n")
    with one_thread():
        actions = [steps_of(models[sketch], problem, batches[size]) for sketch, size in kinds]
        found = in_turns(actions, (LEAST, MOST), torch.device("cpu"), seconds)
        machine = made_on()
    times = dict(zip((f"{sketch}/{size}" for sketch, size in kinds), found, strict=True))
    new = compared(times, f"/{contest.middle}")
    return {
        "task": contest.task, "machine": machine, "title": problem.title,
        "rounds": min(len(found[0]), known.get("rounds", MOST)),
        **{name: {**values, **known.get(name, {})} for name, values in new.items()},
    }  # fmt: skip


def measure_memory(contest: Contest, known: Mapping[str, Any]) -> dict[str, int]:
    """Bytes that a forward pass at the middle batch size keeps for backward, by sketch; of a tuner
    at each rung."""
    problem = TASKS[contest.task].problem(contest.size == "small")
    batch = typical(problem.draw, contest.middle)[STEPS // 2]
    found = dict(known.get("saved", {}))
    ways = [find_way(name) for name in contest.ways]
    sketches = [w.timed if w.control == TUNER else (w.sketch,) for w in ways]
    for sketch in dict.fromkeys(itertools.chain.from_iterable(sketches)):
        if sketch not in found:
            model = initialised(partial(problem.prepared, sketch), 0)
            found[sketch] = saved_bytes(model, problem.loss_of, batch).total
    return found


def typical(draw: Callable[[torch.Generator, int], Batch], size: int) -> list[Batch]:
    """Batches that stand for all: texts differ in length, and a few drawn at random would make one
    size of batches dearer than another.

    Many are drawn and sorted by their elements, of equal ones by what is padding (a mask takes
    time, too); of each part of them comes the one that is nearest to the part's mean.
    """
    source = generator("times", 0)
    drawn = (draw(source, size)[0] for _ in range(DRAWN))
    sizes = [x.numel() + float((x != PAD).float().mean()) for x in drawn]
    order = sorted(range(DRAWN), key=lambda i: sizes[i])
    count = DRAWN // STEPS
    chosen = []
    for part in (order[k * count : (k + 1) * count] for k in range(STEPS)):
        mean = fmean(sizes[i] for i in part)
        chosen.append(min(part, key=lambda i: abs(sizes[i] - mean)))
    source = generator("times", 0)  # the same again: all of them would not fit into memory
    kept = {}
    for i in range(DRAWN):
        batch = draw(source, size)
        if i in chosen:
            kept[i] = batch
    return [kept[i] for i in chosen]


def steps_of(model: nn.Module, problem: Problem, batches: list[Batch]) -> Callable[[], None]:
    """So many whole steps: forward, backward, optimizer."""
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0
    )

    def run() -> None:
        for batch in batches:
            optimizer.zero_grad()
            problem.loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return run


def compared(times: Mapping[str, list[float]], base: str) -> dict[str, Any]:
    """Median seconds of a step, ratios to ``base`` taken round by round, and their quartiles."""
    ratios = {
        key: [a / b for a, b in zip(taken, times[base], strict=True)]
        for key, taken in times.items()
    }
    return {
        "seconds": {key: round(median(taken) / STEPS, 5) for key, taken in times.items()},
        "costs": {key: round(median(own), 4) for key, own in ratios.items()},
        "quartiles": {
            key: [round(q, 4) for q in (own * 2 if len(own) < 2 else quantiles(own, n=4))[::2]]
            for key, own in ratios.items()
        },
    }  # fmt: skip
