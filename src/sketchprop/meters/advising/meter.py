"""Times and noise of candidates, measured on the model itself."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median, stdev
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...core.random import seed_generators
from ...core.stopwatch import clock_of, in_turns, synchronise
from ...layers.isolation import no_gradient_hooks
from ..cost.memory import bytes_of
from ..cost.timing import Times, compare, times_of
from ..noise.metric import Pace, adaptive, noise_of
from ..noise.passes import Gradients, Loss, scalar_loss, squared_norm
from ..restore import Buffers, restored, tensors_in
from .answer import DROWNED, OUT_OF_TIME, Option
from .candidates import Candidate

NOISE_BATCHES = 3
MOST_DRAWS = 4
MOST_ROUNDS = 9
LEAST_PASSES = 6
"""Passes without which a candidate is not tried: exact and a draw on two batches, bytes."""
FOR_TIMES = 7
"""Passes for two rounds of times, and one to warm up; without them those of the draws count."""
FOR_HALF = 5
"""Passes for the control: two rounds, and one to warm up."""


class _Draw(NamedTuple):
    """One sketched gradient: ‖ĝ - g‖² by parameter, and the seconds of both passes."""

    noise: list[float]
    exact: float
    sketched: float


class Meter:
    """Times and noise of candidates, inside ``restored``."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        batches: Sequence[Any],
        optimizer: Any,
        seed_: int,
        a_pass: float,
    ) -> None:
        self.model, self.loss_fn, self.batches = model, loss_fn, batches
        self.seed, self.a_pass = seed_, a_pass
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.bytes = bytes_of(model, loss_fn, batches[0]).total
        self.elsewhere = optimizer_seconds(optimizer)
        self.pace, self.between = self._of_batches(adaptive(optimizer))
        if not 0 < self.pace.total < math.inf:
            raise ValueError("the gradient is zero, or not finite, on these batches")

    @property
    def signal(self) -> float:
        """‖g‖²/σ²."""
        sigma2 = math.fsum(self.between)
        return max(0.0, self.pace.total - sigma2) / sigma2 if sigma2 else math.inf

    def _of_batches(self, divides: bool) -> tuple[Pace, list[float]]:
        """Gradients of the batches; and σ² = (Σ‖g_k‖² - M‖ḡ‖²)/(M - 1) of each parameter."""
        count = len(self.batches)
        mean = [torch.zeros_like(p) for p in self.parameters]
        squares = [0.0] * len(mean)
        for batch in self.batches:
            seed_generators(self.parameters[0].device, self.seed)
            loss = scalar_loss(self.loss_fn, self.model, batch)
            found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
            for i, g in enumerate(found):
                if g is not None:
                    mean[i] += g / count
                    squares[i] += squared_norm(g) / count
        of_mean = [squared_norm(x) for x in mean]
        between = [
            max(0.0, count * (s - m) / (count - 1)) for s, m in zip(squares, of_mean, strict=True)
        ]
        sizes = tuple(p.numel() for p in self.parameters)
        return Pace(sizes, tuple(squares), tuple(of_mean), divides), between

    def measured(self, candidate: Candidate, seconds: float) -> Option:
        """Time, noise and bytes of a candidate, in about so many ``seconds``."""
        option = Option(candidate.name, candidate.line)
        if seconds < LEAST_PASSES * self.a_pass:
            return replace(option, note=OUT_OF_TIME)
        begin = monotonic()
        with restored(self.model) as buffers:
            try:
                candidate.apply_(self.model)
            except ValueError as error:
                return replace(option, note=f"does not fit: {error}")
            draws = self._draws(buffers, seconds / self.a_pass)
            buffers.restore()
            saved = bytes_of(self.model, self.loss_fn, self.batches[0]).total
            left = seconds - (monotonic() - begin)
            times = _times_of(draws)
            passes = len(draws) + times.rounds + 1
            self.a_pass = (monotonic() - begin) / passes  # a machine may get busier on the way
            if left > FOR_TIMES * self.a_pass:
                batch = self.batches[0]
                times = times_of(self.model, self.loss_fn, batch, (2, MOST_ROUNDS), left)
            times = times.with_overhead(self.elsewhere)
        by_parameter = zip(*(draw.noise for draw in draws), strict=True)
        noise = self.pace.steps([fmean(own) for own in by_parameter]) - 1
        if not math.isfinite(noise):
            return replace(option, note="its gradient is not finite")
        spread = stdev([self.pace.steps(d.noise) for d in draws]) / math.sqrt(len(draws))
        return replace(
            option,
            time=times.ratio,
            noise=noise,
            change=times.ratio * (1 + noise),
            error=math.hypot(times.ratio * spread, (1 + noise) * times.ratio_error),
            memory=saved / max(1, self.bytes),
            note="its noise drowns the gradient" if noise > DROWNED else "",
        )

    def _draws(self, buffers: Buffers, passes: float) -> list[_Draw]:
        """Some draws on some batches; half of the passes at most."""
        gradients = Gradients(self.model, self.loss_fn, buffers, self.seed)
        batches = self.batches[:NOISE_BATCHES] if passes > 4 * LEAST_PASSES else self.batches[:2]
        count = max(1, min(MOST_DRAWS, int(passes / 2 / len(batches)) - 1))
        found = []
        with gradients.switch.installed():
            for batch in batches:
                exact_seconds, exact = self._timed(partial(gradients.exact, batch))
                for number in range(count):
                    seconds, drawn = self._timed(partial(gradients.sketched, batch, number))
                    found.append(_Draw(noise_of(drawn, exact), exact_seconds, seconds))
        return found

    def _timed(self, run: Callable[[], list[Tensor]]) -> tuple[float, list[Tensor]]:
        device = self.parameters[0].device
        clock = clock_of(device)
        synchronise(device)
        begin = clock()
        found = run()
        synchronise(device)
        return clock() - begin, found

    def half(self, seconds: float) -> Option | None:
        """Half of the batch, exact: σ² doubles. ``None`` where the batch cannot be cut."""
        whole = self.batches[0]
        part = halved(whole)
        if part is None:
            return None
        if seconds < FOR_HALF / 2 * self.a_pass:
            return Option("half of the batch", "", note=OUT_OF_TIME)

        def step(batch: Any) -> None:
            loss = scalar_loss(self.loss_fn, self.model, batch)
            torch.autograd.grad(loss, self.parameters, allow_unused=True)

        device = self.parameters[0].device
        actions = [lambda: step(whole), lambda: step(part)]
        try:
            with no_gradient_hooks(self.parameters):
                times = compare(*in_turns(actions, (2, MOST_ROUNDS), device, seconds))
        except Exception:
            return None  # a batch that means something as a whole
        times = times.with_overhead(self.elsewhere)
        noise = self.pace.steps(self.between) - 1
        change, error = times.ratio * (1 + noise), (1 + noise) * times.ratio_error
        note = "the control: exact gradients of fewer samples"
        return Option("half of the batch", "", times.ratio, noise, change, error, note=note)


def optimizer_seconds(optimizer: Any) -> float:
    """Of one step, the fastest of three, made by a copy with parameters of its own.

    0 where there is none, or none that can be copied and called alone.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return 0.0
    try:
        twin = copy.deepcopy(optimizer)
        trained = [p for group in twin.param_groups for p in group["params"] if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        device = trained[0].device
        clock, found = clock_of(device), []
        for _ in range(3):
            synchronise(device)
            begin = clock()
            twin.step()
            synchronise(device)
            found.append(clock() - begin)
    except Exception:
        return 0.0
    return max(0.0, min(found))


def _times_of(draws: Sequence[_Draw]) -> Times:
    """A ratio for each exact pass: draws that are held against the same one are one measurement."""
    found: dict[float, list[float]] = {}
    for draw in draws:
        found.setdefault(draw.exact, []).append(draw.sketched)
    return compare(list(found), [median(seconds) for seconds in found.values()])


def halved(batch: Any, second: bool = False) -> Any:
    """One half of the samples, by the first dimension of the first tensor; ``None``: it has none.

    >>> halved((torch.arange(4), "a name")), halved(torch.arange(5), second=True)
    ((tensor([0, 1]), 'a name'), tensor([2, 3, 4]))
    """
    sizes = [t.shape[0] for t in tensors_in(batch) if t.dim()]
    if not sizes or sizes[0] < 2:
        return None
    middle = sizes[0] // 2

    def cut(leaf: Any) -> Any:
        mine = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == sizes[0]
        if not mine:
            return leaf
        return leaf[middle:] if second else leaf[:middle]

    return tree_map(cut, batch)
