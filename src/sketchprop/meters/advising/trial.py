"""trial(): a short training, each way in turns, with the user's own optimizer and data."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, stdev
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch import nn

from ...core.checks import check_count
from ...core.random import random_state_kept, seed_generators
from ...core.stopwatch import timed, unhurried
from ...core.table import Column, Report, Table, words
from ...layers.isolation import evaluated
from ...layers.transform import unsketch_
from ...sketches import AnySketch
from ..batches import MOST_BYTES, contents, halved, handed
from ..noise.estimate import Estimate, jackknife
from ..noise.gradients import Loss, scalar_loss
from ..noise.variance import Progress
from ..restore import check_minutes, check_model, check_optimizer
from ..words import change_in_words, with_error
from .candidates import Candidate
from .curves import time_ratio

EXACT = "exact"
HALF = "half of the batch"
CERTAIN = 2
"""Standard errors from which on a difference counts."""
POINTS = 10
"""Losses are taken so many times."""
HELD = 4
"""Batches that are kept apart."""
FEWEST = 8
"""Steps that each run must be able to make."""
TURN = 0.3
"""Seconds of one turn: shorter ones would meet caches that another model has filled."""


@dataclass(frozen=True)
class Moment:
    """A point of a run: its training seconds and steps so far, and its loss on held-out data."""

    seconds: float
    steps: int
    loss: float


@dataclass(frozen=True)
class Way:
    """One method of training, with a loss curve for each repeat, all from the same weights."""

    name: str
    curves: tuple[tuple[Moment, ...], ...]

    @property
    def loss(self) -> Estimate:
        """At the end, the mean over repeats."""
        return _estimate([curve[-1].loss for curve in self.curves])

    @property
    def steps(self) -> float:
        return fmean(curve[-1].steps for curve in self.curves)

    def curve(self, without: int | None = None) -> list[tuple[float, float]]:
        """Seconds and losses, the mean of all repeats but one: all have trained equally long."""
        repeats = [curve for i, curve in enumerate(self.curves) if i != without]
        return [
            (fmean(m.seconds for m in moments), fmean(m.loss for m in moments))
            for moments in zip(*repeats, strict=True)
        ]


@dataclass(frozen=True)
class Trial(Report):
    """The answer of ``trial``: printable, ``.ways``, ``.ahead``, ``.change(name)``."""

    ANSWERS: ClassVar[tuple[str, ...]] = ("ahead", "compared")

    ways: tuple[Way, ...]
    """Exact training first."""
    different: int
    """Batches that were trained on; each method got them in the same order."""
    held: int
    """Held-out batches, on which losses are measured."""
    seconds: float
    busy: str = ""
    """A note if other programs used the machine at the same time."""

    def way(self, name: str) -> Way:
        for way in self.ways:
            if way.name == name:
                return way
        names = ", ".join(repr(way.name) for way in self.ways)
        raise KeyError(f"{name!r} was not tried; there are {names}")

    @property
    def ahead(self) -> str:
        """The method with the lowest loss at the end, after equal training times."""
        losses = {way.name: way.loss.value for way in self.ways}
        return min(losses, key=lambda name: losses[name] if losses[name] < math.inf else math.inf)

    def gain(self, name: str) -> Estimate:
        """The final loss of exact training minus that of ``name``; above 0 ``name`` is ahead."""
        pairs = zip(self.ways[0].curves, self.way(name).curves, strict=True)
        return _estimate([exact[-1].loss - other[-1].loss for exact, other in pairs])

    def change(self, name: str) -> Estimate | None:
        """The time to a loss that both reach, relative to exact training; ``None`` if none fell.

        It is averaged over most of the run, on the mean curves of all repeats. The error is the
        jackknife's over repeats.
        """
        exact, other = self.ways[0], self.way(name)
        value = time_ratio(exact.curve(), other.curve())
        if value is None:
            return None
        count = len(exact.curves)
        parts = [time_ratio(exact.curve(i), other.curve(i)) for i in range(count) if count > 1]
        ratios = [part for part in parts if part is not None]
        if len(ratios) < count:
            return Estimate(value, math.inf)
        return jackknife(count, ratios.__getitem__, value)

    def certain(self, name: str) -> bool:
        """Whether ``name`` and exact differ at the end by more than two standard errors."""
        gain = self.gain(name)
        return math.isfinite(gain.error) and abs(gain.value) > CERTAIN * gain.error

    @property
    def compared(self) -> dict[str, dict[str, Estimate | None]]:
        """Of each way but exact training: ``gain`` and ``change``."""
        names = [way.name for way in self.ways[1:]]
        return {name: {"gain": self.gain(name), "change": self.change(name)} for name in names}

    def headline(self) -> str:
        return "\n".join(map(self._said, self.ways[1:]))

    def _said(self, way: Way) -> str:
        gain, change = self.gain(way.name), self.change(way.name)
        seconds = fmean(curve[-1].seconds for curve in way.curves)
        if not math.isfinite(gain.value):
            who = way.name if math.isfinite(self.ways[0].loss.value) else "exact training itself"
            return f"Tried: {who} diverged: its loss is not finite; give a lower learning rate."
        place = "ahead of" if gain.value > 0 else "behind"
        doubt = "" if self.certain(way.name) else ", within its error"
        text = (
            f"Tried: {way.name} is {place} exact{doubt}: after {seconds:.0f} s of training its "
            f"loss is {replace(gain, value=abs(gain.value))} "
            f"{'lower' if gain.value > 0 else 'higher'}"
        )
        if change is None:
            return f"{text}. No loss fell far enough to compare times."
        return (
            f"{text}; to the same loss it takes {change_in_words(change.value, 'time')} "
            f"({with_error(change.value, change.error)})."
        )

    def tables(self) -> list[Table]:
        columns = (words("run"), Column("steps", ".0f"), Column("loss"), Column("time to its loss"))
        rows = [(way.name, way.steps, way.loss, self.change(way.name)) for way in self.ways]
        note = (
            "All methods trained in turns from the same weights, equally long, "
            f"{len(self.ways[0].curves)} times. Losses are on {self.held} held-out batches; "
            f"{self.different} batches were trained on; {self.seconds:.0f} s in all."
        )
        if self.busy:
            note += f" Note: {self.busy}."
        return [Table("The trial", columns, rows, note)]


def _estimate(values: Sequence[float]) -> Estimate:
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return Estimate(fmean(values), math.inf)
    return Estimate(fmean(values), stdev(values) / math.sqrt(len(values)))


def trial(
    model: nn.Module,
    loss_fn: Loss,
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    sketch: AnySketch | Candidate,
    *,
    minutes: float = 5,
    repeats: int = 2,
    control: bool = True,
    progress: Progress | None = None,
    seed: int = 0,
    clock: Callable[[], float] = perf_counter,
) -> Trial:
    """Compares short training runs: exact, with ``sketch``, and exact with half of each batch.

    Copies of the model and the optimizer train in turns from their current state, on the same
    batches in the same order, each for the same time, ``repeats`` times on different batches. The
    loss is measured on the first four batches. These are held out: batches that share a sample
    with them are skipped. Clipping and learning-rate schedules of your loop are not included. One
    pass over ``batches`` is held in memory, at most a gigabyte, and is repeated when it ends. If
    other programs use the cores, all runs train on one thread, and the answer says so.
    ``control=False``: without half of each batch. ``progress``: called with the share of the work
    that is done. ``seed``: of the draws. ``clock``: the function that seconds are read from.

    The model, optimizer, buffers and random state are not touched, also not by Ctrl-C.

        found = trial(model, loss_fn, loader, optimizer, sp.Tokens(0.3), minutes=5)
        print(found)                            # who is ahead, and by how much
    """
    check_model(model)
    check_minutes(minutes, 5)
    _check_training(model, optimizer, repeats)
    candidate = sketch if isinstance(sketch, Candidate) else Candidate(sketch)
    device = next(p.device for p in model.parameters() if p.requires_grad)
    with (
        unhurried(device) as busy,
        random_state_kept(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        start = clock()
        stream = _Stream(batches)
        cut = control and halved(stream.held[0]) is not None
        names = [EXACT, candidate.name, *([HALF] if cut else [])]
        runs = []
        for name, repeat in itertools.product(names, range(repeats)):
            twins = _copied(model, optimizer)
            if not unsketch_(twins[0]).training:  # else parts in eval mode are meant to be
                twins[0].train()
            if name == candidate.name:
                candidate.apply_(twins[0])
            draw = stream.halves if name == HALF else stream.whole
            batch_of = partial(draw, repeat=repeat, repeats=repeats)
            runs.append(_Run(name, *twins, loss_fn, batch_of, seed + repeat, clock, device))
        _check_time(runs, start, minutes)
        for point in range(POINTS + 1):
            # The one that has trained least goes on; then all, as long as the one that is furthest.
            while clock() < start + 60 * minutes * point / POINTS:
                min(runs, key=lambda run: run.seconds).turn(TURN)
                if progress is not None:
                    progress(min(1.0, (clock() - start) / 60 / minutes))
            furthest = max(run.seconds for run in runs)
            for run in runs:
                while run.seconds + run.seconds / max(1, run.steps) / 2 < furthest:
                    run.turn(furthest - run.seconds)
            for run in runs:
                run.look(stream.held)
    curves = {name: tuple(tuple(r.curve) for r in runs if r.name == name) for name in names}
    ways = tuple(Way(name, curves[name]) for name in names)
    return Trial(ways, len(stream.drawn), HELD, clock() - start, busy)


class _Stream:
    """Batches by number, drawn once, for all who train on them; used again where they end.

    The first ``HELD`` are kept apart. Ways differ in speed, so that all that was drawn is held.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        source = iter(batches)
        self.held = list(itertools.islice(source, HELD))
        self.drawn: list[Any] = []
        """Those that were trained on."""
        apart = [contents(batch) for batch in self.held]
        seen = {each.whole for each in apart}
        if len(seen) < HELD:
            raise ValueError(
                f"{len(seen)} different batches were given; a trial holds out {HELD} and trains "
                "on others: give all batches of your training"
            )
        samples = [sample for each in apart for sample in each.samples]
        # Of samples that are not all different, as rows of few bits, none is known again.
        known = set(samples) if len(set(samples)) == len(samples) else set()
        self._fresh = _fresh(source, seen, known)

    def whole(self, step: int, repeat: int, repeats: int) -> Any:
        """The batch of a step of one of some repeats."""
        number = repeats * step + repeat
        self.drawn.extend(itertools.islice(self._fresh, max(0, number + 1 - len(self.drawn))))
        if not self.drawn:
            raise ValueError(
                f"no batch is left to train on: the first {HELD} are held out, and each other one "
                "shares a sample with them; give all batches of your training"
            )
        return self.drawn[number % len(self.drawn)]

    def halves(self, step: int, repeat: int, repeats: int) -> Any:
        """The same for steps with half of a batch each."""
        return halved(self.whole(step // 2, repeat, repeats), second=bool(step % 2))


def _fresh(source: Iterator[Any], seen: set[int], apart: set[int]) -> Iterator[Any]:
    """Each batch once that shares no sample with those kept apart, as long as there is room.

    A source without an end that brings nothing new for long seems to begin anew.
    """
    room, missed = MOST_BYTES, 0
    for batch in source:
        inside = contents(batch)
        if inside.whole not in seen and apart.isdisjoint(inside.samples):
            seen.add(inside.whole)
            room, missed = room - inside.nbytes, 0
            yield batch
        missed += 1
        if missed > 10 * len(seen) or (room <= 0 and len(seen) >= HELD + FEWEST):
            return


@dataclass
class _Run:
    """One training: a model and an optimizer of its own."""

    name: str
    model: nn.Module
    optimizer: Any
    loss_fn: Loss
    batch_of: Callable[[int], Any]
    """The batch of a step."""
    seed: int
    clock: Callable[[], float]
    device: torch.device
    seconds: float = 0.0
    steps: int = 0
    curve: list[Moment] = field(default_factory=list)

    def step(self) -> float:
        """One step of training; its seconds, without the time of drawing the batch."""
        batch = self.batch_of(self.steps)
        seed_generators(self.device, self.seed, self.steps)

        def step() -> None:
            self.optimizer.zero_grad()
            torch.autograd.backward(scalar_loss(self.loss_fn, self.model, batch))
            self.optimizer.step()

        seconds, _ = timed(step, self.device, self.clock)
        self.steps += 1
        self.seconds += seconds
        return seconds

    def turn(self, most: float) -> None:
        """Steps for about ``most`` seconds, at least one and no longer than a turn."""
        begin = self.seconds
        while True:
            seconds = self.step()
            if self.seconds - begin + seconds / 2 >= min(most, TURN):
                return

    @torch.no_grad()
    def look(self, held: Sequence[Any]) -> None:
        """Takes the loss on batches kept apart."""
        with evaluated(self.model):
            loss = fmean(float(self.loss_fn(self.model, handed(batch))) for batch in held)
        self.curve.append(Moment(self.seconds, self.steps, loss))


def _check_time(runs: Sequence[_Run], start: float, minutes: float) -> None:
    """Warms up each kind of run on a copy, and says if time is too short for a few steps."""
    longest = 0.0
    for run in {run.name: run for run in runs}.values():
        twin, its_optimizer = _copied(run.model, run.optimizer)
        warm = replace(run, model=twin, optimizer=its_optimizer)
        warm.step()
        warm.steps = 0  # the same batch again
        longest = max(longest, warm.step())
    needed = longest * len(runs) * (FEWEST + HELD * POINTS / 3)
    if runs[0].clock() + needed > start + 60 * minutes:
        raise ValueError(
            f"minutes={minutes:g} is too short for {len(runs)} runs: a step takes "
            f"{longest:.2g} s; give at least minutes={needed / 30:.2g}, or repeats=1"
        )


def _copied(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Both at once, so that the copy of the optimizer holds the parameters of the copy."""
    try:
        twin: tuple[nn.Module, Any] = copy.deepcopy((model, optimizer))
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} and its {type(optimizer).__name__} cannot be copied for a "
            f"trial: {error}; keep no computed tensors on a module, or compare in a script of "
            "your own"
        ) from error
    return twin


def _check_training(model: nn.Module, optimizer: Any, repeats: int) -> None:
    check_count("repeats", repeats, "1, or 2 to know the error")
    check_optimizer(optimizer)
    parameters = set(model.parameters())
    if any(p not in parameters for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "the optimizer holds parameters that are not the model's: a trial copies both; give "
            "one over model.parameters()"
        )
