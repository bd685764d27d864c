"""Times and noise of candidates, measured on the model itself."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median, median_low, stdev
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import nn

from ...core.proof import no_gradient_hooks
from ...core.random import seed_generators
from ...core.stopwatch import in_turns, timed
from ...layers import SketchedBlock
from ...layers.isolation import evaluated
from ...layers.transform import exact
from ..batches import halved
from ..cost.memory import saved_bytes
from ..cost.timing import Times, compare, step_times
from ..noise.estimate import divide
from ..noise.gradients import (
    Gradients,
    Loss,
    numbers,
    one_pass,
    scalar_loss,
    settle,
    squared_norms,
    wide,
)
from ..noise.pace import DROWNED, HUGE, Pace, adaptive, noise_by_parameter
from ..noise.variance import Units
from ..restore import Buffers, restored
from .advice import OUT_OF_TIME, Option
from .candidates import Candidate
from .trial import HALF

MOST_DRAWS = 4
MOST_ROUNDS = 9
LEAST_PASSES = 6
"""Passes without which a candidate is not tried: exact and a draw on two batches, bytes."""
FOR_TIMES = 7
"""Passes for two rounds of times, and one to warm up; without them those of the draws count."""
FOR_HALF = 5
"""Passes for the control: two rounds, and one to warm up."""
OF_HALVES = 6
"""Batches whose loss is held against that of their halves."""
COMPILED = "compiled"
OUTLYING = 10
"""Times the usual ‖g‖² that counts at most: from here on a batch is told of."""


class Meter:
    """Times and noise of candidates, inside ``restored``."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        batches: Sequence[Any],
        optimizer: Any,
        seed: int,
        a_pass: float,
    ) -> None:
        self.model, self.loss_fn, self.batches = model, loss_fn, batches
        self.seed, self.a_pass, self.divides = seed, a_pass, adaptive(optimizer)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.device = self.parameters[0].device
        self.bytes = saved_bytes(model, loss_fn, batches[0]).total
        self.elsewhere = optimizer_seconds(optimizer)
        self.weights = [1.0] * len(batches)
        self.squares, self.of_mean, self.along = self._of_batches()
        norms = list(map(math.fsum, self.squares))
        limit = HUGE * median_low(norms) or math.inf
        self.weights = [min(1.0, limit / max(norm, limit)) for norm in norms]
        if min(self.weights) < 1:
            self.squares, self.of_mean, self.along = self._of_batches()
        self.pace = self.pace_of(len(batches))
        if not math.isfinite(self.pace.total):
            odd = [i + 1 for i, norm in enumerate(norms) if not math.isfinite(norm)]
            raise ValueError(
                f"{len(odd)} of {len(norms)} batches have a gradient that is not finite, the first "
                f"is batch {odd[0]}: look at its data, or whether training has diverged"
            )
        if self.pace.total == 0:
            raise ValueError(
                "the gradient is zero on these batches: nothing is left to learn on them, or the "
                "loss does not depend on what trains; check loss_fn"
            )

    def _of_batches(self) -> tuple[list[list[float]], list[float], list[list[float]]]:
        """By parameter: ‖g_k‖² of each batch, ‖ḡ‖² of their mean, with their weights; and
        g_k · (g_1 + … + g_{k-1}) over √(k - 1)."""
        squares, along = [], []
        mean = [torch.zeros_like(p) for p in self.parameters]
        for k, (batch, weight) in enumerate(zip(self.batches, self.weights, strict=True)):
            seed_generators(self.device, self.seed, k)  # noise in common would look like a gradient
            gradient = one_pass(self.loss_fn, self.model, batch, self.parameters)
            own = [
                torch.zeros_like(m) if g is None else g for m, g in zip(mean, gradient, strict=True)
            ]
            squares.append([weight * square for square in squared_norms(own)])
            products = numbers((wide(m) * wide(g)).sum() for m, g in zip(mean, own, strict=True))
            along.append([math.sqrt(weight / max(k, 1)) * product for product in products])
            for total, g in zip(mean, own, strict=True):
                total.add_(math.sqrt(weight) * g / len(self.batches))
        return squares, squared_norms(mean), along

    @property
    def visible(self) -> float:
        """How clearly the batches show a gradient, in standard errors.

        Where they share none, g_k · (g_1 + … + g_{k-1}) has the mean 0 whatever came before, and a
        variance in proportion to k - 1. So the sum of what is left over √(k - 1), each
        parameter as the optimizer scales it, is held against the root of its squares.
        """
        scales = self.pace.scales
        sums = [
            math.fsum(s * c for s, c in zip(scales, of_one, strict=True)) for of_one in self.along
        ]
        return divide(math.fsum(sums), math.hypot(*sums))

    def pace_of(self, count: int) -> Pace:
        """Of the first ``count`` batches, with the signal of all."""
        squares = tuple(fmean(of_one) for of_one in zip(*self.squares[:count], strict=True))
        sizes = tuple(p.numel() for p in self.parameters)
        return Pace(sizes, squares, tuple(self.of_mean), self.divides)

    @property
    def between(self) -> list[float]:
        """σ² = M(Σ‖g_k‖²/M - ‖ḡ‖²)/(M - 1) of each parameter."""
        count = len(self.batches)
        pairs = zip(self.pace.squares, self.of_mean, strict=True)
        return [max(0.0, count * (s - m) / (count - 1)) for s, m in pairs]

    @property
    def signal(self) -> float:
        """‖g‖²/σ²."""
        sigma2 = math.fsum(self.between)
        return max(0.0, self.pace.total - sigma2) / sigma2 if sigma2 else math.inf

    def outliers(self) -> list[str]:
        """What there is to say of batches with a huge gradient."""
        return [
            f"batch {i + 1} of {len(self.weights)} has a gradient {math.sqrt(HUGE / weight):.2g} "
            f"times as long as usual: it counts as {HUGE:g} usual ones; look at what is in it"
            for i, weight in enumerate(self.weights)
            if OUTLYING * weight < 1
        ]

    def measured(self, candidate: Candidate, seconds: float) -> Option:
        """Time, noise and bytes of a candidate, in about so many ``seconds``."""
        option = Option(candidate.name, candidate.line)
        if seconds < LEAST_PASSES * self.a_pass:
            return replace(option, note=OUT_OF_TIME)
        try:
            return self._measured(candidate, option, seconds)
        except RuntimeError as error:  # the loss may do what no sketch can, as differentiate twice
            return replace(option, note=f"does not run: {error}")

    def _measured(self, candidate: Candidate, option: Option, seconds: float) -> Option:
        begin = monotonic()
        with restored(self.model) as buffers:
            try:
                candidate.apply_(self.model)
            except ValueError as error:
                return replace(option, note=f"does not fit: {error}")
            settle(self.model, self.loss_fn, self.batches[0])
            buffers.restore()
            note = self._compile() if candidate.compile else ""
            # What was compiled is measured, even if that took all of the time.
            least = (LEAST_PASSES + 2 * FOR_TIMES) * self.a_pass if note else 0.0
            seconds, begin = max(seconds - (monotonic() - begin), least), monotonic()
            draws, times, pace = self._draws(buffers, seconds / self.a_pass)
            units = Units(self.model, self.parameters)
            buffers.restore()
            saved = saved_bytes(self.model, self.loss_fn, self.batches[0]).total
            spent = monotonic() - begin
            # A machine may get busier on the way.
            self.a_pass = spent / (len(draws) + times.rounds + 1)
            if seconds - spent > FOR_TIMES * self.a_pass:
                rounds, rest = (2, MOST_ROUNDS), seconds - spent
                times = step_times(self.model, self.loss_fn, self.batches[0], rounds, rest)
            times = times.with_overhead(self.elsewhere)
        added = list(map(fmean, zip(*draws, strict=True)))
        noise = pace.steps(added) - 1
        if not math.isfinite(noise):
            return replace(option, note="its gradient is not finite")
        spread = stdev(map(pace.steps, draws)) / math.sqrt(len(draws))
        return replace(
            option,
            time=times.ratio,
            noise=noise,
            worst=units.worst(added, pace.squares),
            change=times.ratio * (1 + noise),
            error=math.hypot(times.ratio * spread, (1 + noise) * times.ratio_error),
            memory=saved / max(1, self.bytes),
            note="its noise drowns the gradient" if noise > DROWNED else note,
        )

    def _compile(self) -> str:
        """Compiles the blocks: how long that takes, and after how many steps it has paid."""
        run = partial(one_pass, self.loss_fn, self.model, self.batches[0], self.parameters)
        states = [m.sketching for m in self.model.modules() if isinstance(m, SketchedBlock)]

        def fastest() -> float:
            return min(timed(run, self.device, perf_counter)[0] for _ in range(3))

        for state in states:
            state.compiled = False
        eager = fastest()  # the first of them proves the blocks
        for state in states:
            state.compiled = True
        first, _ = timed(run, self.device, perf_counter)
        later = fastest()
        if not all(state.compiled for state in states):
            return "does not compile: see the warning"
        with exact(self.model):
            run()
        took, gained = max(0.0, first - later), eager - later
        paid = f"paid back after {took / gained:,.0f} steps" if gained > 0 else "not faster"
        return f"{COMPILED} in {took:.0f} s, {paid}"

    def _draws(self, buffers: Buffers, passes: float) -> tuple[list[list[float]], Times, Pace]:
        """‖ĝ - g‖² by parameter of draws on as many batches as half of the passes allow, their
        times, and the pace of these batches: V is held against their own ‖g‖², weighted alike."""
        gradients = Gradients(self.model, self.loss_fn, buffers, self.seed)
        count = min(len(self.batches), max(2, int(passes / 4)))
        numbers = range(max(1, min(MOST_DRAWS, int(passes / 2 / count) - 1)))
        draws, exact_seconds, sketched_seconds = [], [], []
        with gradients.switch.installed():
            for batch, weight in zip(self.batches[:count], self.weights, strict=False):
                seconds, exact = timed(partial(gradients.exact, batch), self.device)
                exact_seconds.append(seconds)
                of_draws = []
                for number in numbers:
                    run = partial(gradients.sketched, batch, number)
                    seconds, drawn = timed(run, self.device)
                    of_draws.append(seconds)
                    draws.append([weight * v for v in noise_by_parameter(drawn, exact)])
                # Draws that are held against the same exact pass are one measurement.
                sketched_seconds.append(median(of_draws))
        return draws, compare(exact_seconds, sketched_seconds), self.pace_of(count)

    def half(self, seconds: float) -> Option | None:
        """Half of the batch, exact: σ² doubles. ``None`` where the batch cannot be cut."""
        part = halved(self.batches[0])
        if part is None:
            return None
        if seconds < FOR_HALF / 2 * self.a_pass:
            return Option(HALF, "", note=OUT_OF_TIME)
        actions = [
            partial(one_pass, self.loss_fn, self.model, batch, self.parameters)
            for batch in (self.batches[0], part)
        ]
        try:
            if self._of_whole_batches():
                return Option(HALF, "", note="not tried: half of a batch has another loss")
            with no_gradient_hooks(self.parameters):
                times = compare(*in_turns(actions, (2, MOST_ROUNDS), self.device, seconds))
        except Exception:
            return None  # a batch that means something as a whole
        times = times.with_overhead(self.elsewhere)
        noise = self.pace.steps(self.between) - 1
        change, error = times.ratio * (1 + noise), (1 + noise) * times.ratio_error
        note = "the control: exact gradients of fewer samples"
        return Option(HALF, "", times.ratio, noise, change, error, note=note)

    def _of_whole_batches(self) -> bool:
        """Whether the loss of a batch is always above, or always below, the mean of its halves':
        then samples are compared with each other, as in-batch negatives are."""
        sides = []
        with evaluated(self.model):
            for batch in self.batches[:OF_HALVES]:
                parts = (batch, halved(batch), halved(batch, second=True))
                losses = [scalar_loss(self.loss_fn, self.model, part) for part in parts]
                whole, *halves = numbers(loss.detach() for loss in losses)
                above, slack = whole - fmean(halves), 1e-3 * abs(whole)
                added_up = abs(whole - math.fsum(halves)) <= slack
                sides.append(0 if added_up or abs(above) <= slack else math.copysign(1, above))
        return len(sides) == OF_HALVES and abs(math.fsum(sides)) == OF_HALVES


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
        return max(0.0, min(timed(twin.step, trained[0].device)[0] for _ in range(3)))
    except Exception:
        return 0.0
