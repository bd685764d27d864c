"""Times, taken in turns (exact, sketched, exact, …) so that both meet the same machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from torch import nn

from ...core.proof import no_gradient_hooks
from ...core.stopwatch import in_turns, timed
from ...layers.transform import exact
from ..noise.gradients import Loss, one_pass
from ..restore import restored

SLOW = 0.5
"""Seconds of a pass, from which on warming up is a small part of it."""


@dataclass(frozen=True)
class Times:
    """Two ways to compute the same, timed in turns."""

    exact: float
    """Seconds, the median."""
    sketched: float
    ratio: float
    """The median of sketched over exact, pair by pair."""
    ratio_error: float
    rounds: int

    def with_overhead(self, seconds: float) -> Times:
        """The same with ``seconds`` of work in each step that sketches do not touch."""
        whole = self.exact + seconds
        share = self.exact / whole
        ratio = (self.ratio * self.exact + seconds) / whole
        return Times(whole, self.sketched + seconds, ratio, self.ratio_error * share, self.rounds)


def compare(exact_seconds: Sequence[float], sketched_seconds: Sequence[float]) -> Times:
    """Medians, and the median of the pairs' ratios with its error from their spread."""
    ratios = [s / max(e, 1e-12) for e, s in zip(exact_seconds, sketched_seconds, strict=True)]
    ratio = median(ratios)
    # 1.4826 MAD estimates a normal σ, and the median's error is 1.2533 σ/√rounds.
    spread = 1.4826 * median(abs(r - ratio) for r in ratios)
    error = 1.2533 * spread / len(ratios) ** 0.5
    return Times(median(exact_seconds), median(sketched_seconds), ratio, error, len(ratios))


def step_times(
    model: nn.Module,
    loss_fn: Loss,
    batch: Any,
    rounds: int | tuple[int, int] = 7,
    seconds: float = 0.0,
) -> Times:
    """Forward and backward over ``batch``, exact and sketched in turns; no optimizer step.

    Blocks that are compiled are so on both sides.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    step = partial(one_pass, loss_fn, model, batch, parameters)

    def exact_step() -> None:
        with exact(model):
            step()

    with restored(model, compiled=True), no_gradient_hooks(parameters):
        return compare(*in_turns([exact_step, step], rounds, parameters[0].device, seconds))


def seconds_of_a_pass(model: nn.Module, loss_fn: Loss, batch: Any) -> float:
    """Forward and backward, the fastest of three: the first ones warm up. Two will do if slow."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    run = partial(one_pass, loss_fn, model, batch, parameters)
    seconds = [timed(run, parameters[0].device, perf_counter)[0] for _ in range(2)]
    if min(seconds) < SLOW:
        seconds.append(timed(run, parameters[0].device, perf_counter)[0])
    return max(min(seconds), 1e-6)
