"""trial(): a short training, each way in turns, with the user's own optimizer and data."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...core.random import random_state_kept, seed_generators
from ...core.stopwatch import synchronise, unhurried
from ...layers.transform import unsketch_
from ...sketches import AnySketch
from ..noise.passes import Loss, scalar_loss
from ..noise.variance import Progress
from ..restore import check_model
from .candidates import Candidate
from .meter import halved
from .trial import EXACT, HALF, Moment, Trial, Way

POINTS = 10
"""Losses are taken so many times."""
HELD = 4
"""Batches that are kept apart."""
FEWEST = 8
"""Steps that each run must be able to make."""
MOST_BYTES = 2**30
"""Of batches that are held."""
TURN = 0.3
"""Seconds of one turn: shorter ones would meet caches that another model has filled."""


@dataclass
class _Run:
    """One training: a model and an optimizer of its own."""

    name: str
    model: nn.Module
    optimizer: Any
    batch: Callable[[int], Any]
    """The batch of a step."""
    seed: int
    seconds: float = 0.0
    steps: int = 0
    curve: list[Moment] = field(default_factory=list)

    def step(self, loss_fn: Loss, clock: Callable[[], float], device: torch.device) -> float:
        """One step of training; its seconds, without the time of drawing the batch."""
        batch = self.batch(self.steps)
        seed_generators(device, self.seed, self.steps)
        synchronise(device)
        start = clock()
        self.optimizer.zero_grad()
        torch.autograd.backward(scalar_loss(loss_fn, self.model, batch))
        self.optimizer.step()
        synchronise(device)
        return clock() - start


class _Stream:
    """Batches by number, drawn once, for all who train on them; begins anew where they end.

    The first ``HELD`` are kept apart: a list that begins anew leaves them out. Ways differ in
    speed, so that all that was drawn is held; where that fills ``MOST_BYTES`` it is used again.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._room = MOST_BYTES
        self._batches = batches
        self._source = iter(batches)
        self.held = list(itertools.islice(self._source, HELD))
        self._apart = set(map(_identity, self.held))
        self._drawn: list[Any] = []
        if len(self._apart) < HELD:
            raise ValueError(
                f"{len(self._apart)} different batches were given; a trial keeps {HELD} apart and "
                "trains on others: give as many as training has"
            )

    @property
    def different(self) -> int:
        """Of those that were trained on; all are held, so that an id means one object."""
        return len({_identity(batch) for batch in self._drawn})

    def __getitem__(self, number: int) -> Any:
        while len(self._drawn) <= number and (self._room > 0 or len(self._drawn) < FEWEST):
            batch = self._next()
            self._drawn.append(batch)
            self._room -= sum(t.nbytes for t in tree_leaves(batch) if isinstance(t, Tensor))
        return self._drawn[number % len(self._drawn)]

    def _next(self) -> Any:
        for _ in range(2):
            for batch in self._source:
                if _identity(batch) not in self._apart:
                    return batch
            self._source = iter(self._batches)
        raise ValueError(
            f"the batches are used up after {HELD} that are kept apart and {len(self._drawn)} to "
            "train on; give more, as a list, a loader that can begin anew, or one without an end"
        )


def _identity(batch: Any) -> tuple[int, ...]:
    return tuple(map(id, tree_leaves(batch)))


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
    """Trains exact, with ``sketch``, and exact with half of each batch, in turns, and compares.

    Copies of the model and of the optimizer train, from the weights and the state that they have
    now, on the same batches in the same order, equally many seconds each, ``repeats`` times on
    different batches. The first batches are kept apart; on them losses are taken. What else a
    loop of yours does (clipping, schedules of the rate) is not in it. Batches that were drawn are
    held in memory; when they fill a gigabyte they are used again. Where other programs have the
    cores all train on one thread, and the answer says so. ``control=False``: without half of the
    batch. ``progress`` is told the share that is done; ``seed``: of the draws; ``clock``: what
    seconds are read from.

    The model, optimizer, buffers and random state are not touched, also not by Ctrl-C.

        found = trial(model, loss_fn, loader, optimizer, sp.Tokens(0.3), minutes=5)
        print(found)                            # who is ahead, and by how much
    """
    _check(model, optimizer, minutes, repeats)
    candidate = sketch if isinstance(sketch, Candidate) else Candidate(sketch)
    device = next(p.device for p in model.parameters() if p.requires_grad)
    with (
        unhurried(device) as busy,
        random_state_kept(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        start = clock()
        end = start + 60 * minutes
        stream = _Stream(batches)
        runs = _runs(model, optimizer, candidate, stream, repeats, control, seed)
        race = _Race(runs, loss_fn, stream.held, clock, device)
        race.check_time(end, minutes)
        race.evaluate()
        for point in range(1, POINTS + 1):
            race.train_until(start + (end - start) * point / POINTS, start, end, progress)
            race.evaluate()
    names = {run.name: () for run in runs}
    ways = [
        Way(
            name,
            candidate.line if name == candidate.name else "",
            tuple(tuple(run.curve) for run in runs if run.name == name),
        )
        for name in names
    ]
    return Trial(tuple(ways), stream.different, HELD, clock() - start, busy)


class _Race:
    """Runs that train in turns: the one that has trained least goes on."""

    def __init__(
        self,
        runs: Sequence[_Run],
        loss_fn: Loss,
        held: Sequence[Any],
        clock: Callable[[], float],
        device: torch.device,
    ) -> None:
        self.runs, self.loss_fn, self.held = runs, loss_fn, held
        self.clock, self.device = clock, device

    def check_time(self, end: float, minutes: float) -> None:
        """Warms up each kind of run on a copy, and says if time is too short for a few steps."""
        longest = 0.0
        for run in {run.name: run for run in self.runs}.values():
            twin = _copied(run.model, run.optimizer)
            warm = _Run(run.name, *twin, batch=run.batch, seed=run.seed)
            warm.step(self.loss_fn, self.clock, self.device)
            longest = max(longest, warm.step(self.loss_fn, self.clock, self.device))
        needed = longest * len(self.runs) * (FEWEST + len(self.held) * POINTS / 3)
        if self.clock() + needed > end:
            raise ValueError(
                f"minutes={minutes:g} is too short for {len(self.runs)} runs: a step takes "
                f"{longest:.2g} s; give at least minutes={needed / 30:.2g}, or repeats=1"
            )

    def train_until(
        self, until: float, start: float, end: float, progress: Progress | None
    ) -> None:
        """Turns until the time, and until all have trained as long as the one that is furthest."""
        while self.clock() < until:
            self._turn(min(self.runs, key=lambda run: run.seconds))
            if progress is not None:
                progress(min(1.0, (self.clock() - start) / (end - start)))
        furthest = max(run.seconds for run in self.runs)
        for run in self.runs:
            while run.seconds + self._last(run) / 2 < furthest:
                self._turn(run, furthest - run.seconds)

    def _last(self, run: _Run) -> float:
        return run.seconds / run.steps if run.steps else 0.0

    def _turn(self, run: _Run, most: float = TURN) -> None:
        spent = 0.0
        while True:
            seconds = run.step(self.loss_fn, self.clock, self.device)
            run.steps += 1
            run.seconds += seconds
            spent += seconds
            if spent + seconds / 2 >= min(most, TURN):
                return

    @torch.no_grad()
    def evaluate(self) -> None:
        for run in self.runs:
            run.model.eval()
            losses = [float(self.loss_fn(run.model, batch)) for batch in self.held]
            run.model.train()
            loss = math.fsum(losses) / len(losses)
            run.curve.append(Moment(run.seconds, run.steps, loss))


def _runs(
    model: nn.Module,
    optimizer: Any,
    candidate: Candidate,
    stream: _Stream,
    repeats: int,
    control: bool,
    seed: int,
) -> list[_Run]:
    """Each way for each repeat, in the order of the answer."""
    cut = control and halved(stream.held[0]) is not None
    runs = []
    for name, repeat in itertools.product([EXACT, candidate.name, HALF], range(repeats)):
        if name == HALF and not cut:
            continue
        own, its_optimizer = _copied(model, optimizer)
        unsketch_(own).train()
        if name == candidate.name:
            candidate.apply_(own)

        def batch(step: int, name: str = name, repeat: int = repeat) -> Any:
            if name != HALF:
                return stream[repeats * step + repeat]
            whole = stream[repeats * (step // 2) + repeat]
            return halved(whole, second=bool(step % 2))

        runs.append(_Run(name, own, its_optimizer, batch, seed + repeat))
    return runs


def _copied(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Both at once, so that the copy of the optimizer holds the parameters of the copy."""
    try:
        twin: tuple[nn.Module, Any] = copy.deepcopy((model, optimizer))
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} and its {type(optimizer).__name__} cannot be copied for a "
            f"trial: {error}; try it in a script of its own, or without tensors that are "
            "computed and kept on a module"
        ) from error
    return twin


def _check(model: nn.Module, optimizer: Any, minutes: float, repeats: int) -> None:
    check_model(model)
    if isinstance(minutes, bool) or not minutes > 0:
        raise ValueError(f"minutes={minutes!r} is no time; give for example minutes=5")
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"repeats={repeats!r}; give 1, or 2 to know the error")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer={optimizer!r} is no optimizer; give the one that trains the model, for "
            "example torch.optim.AdamW(model.parameters(), lr=1e-3)"
        )
    own = set(model.parameters())
    if any(p not in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "the optimizer holds parameters that are not the model's: a trial copies both; give "
            "one over model.parameters()"
        )
