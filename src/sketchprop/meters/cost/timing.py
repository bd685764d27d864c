"""Times, taken in turns (exact, sketched, exact, …) so that both meet the same machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from ...core.cost import Size
from ...core.stopwatch import in_turns, synchronise
from ...core.table import Column, Table, as_text, words
from ...layers import Sketching
from ...layers.isolation import no_gradient_hooks
from ...layers.transform import exact
from ...ops import sketched_linear
from ...sketches import AnySketch
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

    @classmethod
    def given(cls, exact: float, sketched: float, ratio_error: float = 0.0) -> Times:
        """Times that were measured elsewhere, for example on another machine."""
        if not (exact > 0 and sketched > 0):
            raise ValueError(f"times must be positive seconds, not {exact!r} and {sketched!r}")
        return cls(exact, sketched, sketched / exact, ratio_error, 0)

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
    """Forward and backward over ``batch``, exact and sketched in turns; no optimizer step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    step = partial(one_pass, loss_fn, model, batch, parameters)

    def exact_step() -> None:
        with exact(model):
            step()

    with restored(model), no_gradient_hooks(parameters):
        return compare(*in_turns([exact_step, step], rounds, parameters[0].device, seconds))


def seconds_of_a_pass(model: nn.Module, loss_fn: Loss, batch: Any) -> float:
    """Forward and backward, the fastest of three: the first ones warm up. Two will do if slow."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    seconds = math.inf
    for number in range(3):
        begin = monotonic()
        one_pass(loss_fn, model, batch, parameters)
        synchronise(parameters[0].device)
        seconds = min(seconds, monotonic() - begin)
        if number and seconds > SLOW:
            break
    return max(seconds, 1e-6)


@dataclass(frozen=True)
class BenchLine:
    """The backward of one linear layer: ``B × d × n``."""

    shape: tuple[int, int, int]
    sketch: str
    times: Times
    flops: float
    """Sketched over exact FLOPs, planning included."""


@dataclass(frozen=True)
class BenchReport:
    """Printable; ``.as_dict()`` for logs."""

    lines: tuple[BenchLine, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def headline(self) -> str:
        faster = sum(line.times.ratio < 1 for line in self.lines)
        return f"{faster} of {len(self.lines)} are faster than exact."

    def tables(self) -> list[Table]:
        """A row for each shape and sketch."""
        columns = (
            *(words("B × d × n"), words("sketch")),
            *(Column(title, ".3f", scale=1e3) for title in ("exact ms", "sketched ms")),
            *(Column(title, ".3f") for title in ("ratio", "±", "FLOPs")),
        )
        rows = [
            (
                *(line.shape, line.sketch, line.times.exact, line.times.sketched),
                *(line.times.ratio, line.times.ratio_error, line.flops),
            )
            for line in self.lines
        ]
        return [Table("Backward of a linear layer", columns, rows)]

    def __str__(self) -> str:
        return as_text(self)


def bench(
    shapes: Sequence[tuple[int, int, int]],
    sketches: Sequence[AnySketch],
    rounds: int = 15,
    device: str | torch.device = "cpu",
) -> BenchReport:
    """Backward of a linear layer with bias, exact against sketched, for shapes ``(B, d, n)``."""
    device = torch.device(device)
    lines = []
    for B, d, n in shapes:
        for sketch in sketches:
            seconds = in_turns(_backwards(B, d, n, sketch, device), rounds, device)
            size = Size(B, n, d)
            shown = Sketching(sketch).cost(size).total / size.exact_flops
            lines.append(BenchLine((B, d, n), repr(sketch), compare(*seconds), shown))
    return BenchReport(tuple(lines))


def _backwards(
    B: int, d: int, n: int, sketch: AnySketch, device: torch.device
) -> list[Callable[[], Any]]:
    shapes = ((B, d), (n, d), (n,), (B, n))
    x, W, b, G = (torch.randn(*shape, device=device) for shape in shapes)
    leaves = [t.requires_grad_() for t in (x, W, b)]
    outputs = [torch.nn.functional.linear(x, W, b), sketched_linear(x, W, b, sketch)]

    def backward(y: Tensor) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(y, leaves, G, retain_graph=True)

    return [backward(y) for y in outputs]
