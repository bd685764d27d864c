"""σ² and V: the noise of minibatches, and what the sketches add to it, layer by layer.

V = E‖ĝ - g‖² over the draws, ĝ the sketched and g the exact gradient of a batch, all trainable
parameters together. It is split by the layer that injected it:

    M₀ = g,  Mₖ = the gradient with the k uses sketched that backward meets first, the others
    exact, Vₖ = E‖Mₖ - Mₖ₋₁‖².

Backward is linear in what arrives from above and every draw is unbiased, so Mₖ is the mean of ĝ
given the first k draws: a martingale. Its increments are uncorrelated, and Σ Vₖ = V exactly, in
any network (a branch only needs some order, here that of backward). Vₖ holds all that the draw
of layer k does to the gradients of its own and of all lower layers, for gradients that arrive
noisy from above, as in training. That is not the V of sketching layer k alone.

**Rare draws.** Where sketches compound (a uniform mask redrawn at each of many layers) V may come
almost wholly from draws so rare that none is met: the sample then looks calm and its error small.
But it betrays itself: a mean gradient that is not g. For each parameter ⟨ĝ - g, g⟩/‖g‖² is zero in
the mean; where it is not, the report is not ``reliable`` and V a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from ..restore import restored
from .estimate import Estimate, minibatch_variance, over_draws, variance_ratio
from .gradients import Gradients, Loss, squared_distance, squared_norm

Progress = Callable[[float], object]
"""Told from time to time which share of the work is done."""

SURPRISE = 5.0
"""Standard errors that an alignment may be off; by chance once in a million parameters."""

PILOT_DRAWS = 8
MAX_DRAWS = 64
TARGET_ERROR = 0.05


@dataclass(frozen=True)
class LayerVariance:
    """What one layer's draws inject into the gradient."""

    layer: str
    sketch: str
    injected: Estimate
    relative: Estimate
    """injected/σ²."""


@dataclass(frozen=True)
class VarianceReport:
    """σ² and V of a sketched model at its present parameters."""

    batches: int
    draws: int
    """Draws for each batch."""
    sigma2: Estimate
    added: Estimate
    """V, in total."""
    relative: Estimate
    """V/σ²."""
    layers: tuple[LayerVariance, ...]
    """In the order of forward; empty without ``split``."""
    remainder: Estimate | None
    """V - Σ of the layers, draw by draw: zero within its error."""
    signal: float
    """‖g‖², of the mean gradient g: ‖ḡ‖² of the batches without the σ²/M that is noise."""
    missed: dict[str, Estimate]
    """⟨ĝ - g, g⟩/‖g‖² of each parameter where it is not zero within its error: -1 where the draws
    never brought a gradient."""

    @property
    def relative_signal(self) -> float:
        """‖g‖²/σ²; 0 where there is no σ²."""
        sigma2 = self.sigma2.value
        return self.signal / sigma2 if sigma2 > 0 else 0.0

    @property
    def reliable(self) -> bool:
        """Whether the mean of the draws is the exact gradient, as far as they can tell.

        If not, either a sketch is biased (``check_unbiased`` knows), or V comes from draws too
        rare to be met, and is larger than reported.
        """
        return not self.missed


def surprising(values: Sequence[Sequence[float]]) -> bool:
    """Whether a mean that should be zero is not; the limit is Student's, wider for few draws."""
    estimate = over_draws(values)
    limit = _student(SURPRISE, sum(len(draws) - 1 for draws in values)) * estimate.draw_error
    return abs(estimate.value) > max(limit, 1e-4)


def _student(z: float, freedom: int) -> float:
    """The t that is as rare as a normal z: t² ≈ f(exp(cz²) - 1) for f degrees of freedom.

    c = (f - 5/6)/(f - 2/3 + 1/(10f))², to 6 % from f = 6 on at z = 5 and wider below.
    """
    f = max(1, freedom)
    c = (f - 5 / 6) / (f - 2 / 3 + 0.1 / f) ** 2
    return math.sqrt(f * math.expm1(c * z * z))


def measure_variance(
    model: nn.Module,
    loss_fn: Loss,
    batches: Sequence[Any],
    *,
    draws: int | None = None,
    split: bool = True,
    seed: int = 0,
    seconds: float = math.inf,
    progress: Progress | None = None,
) -> VarianceReport:
    """σ², V and where V comes from. Costs (uses of sketched layers) × draws × batches steps.

    ``draws=None`` lets eight pilot draws on the first batch choose how many bring the error of V
    below 5 % (at most 64 for each batch). ``split=False`` measures only the total, one step for
    each draw. All sums run in float64; nothing of the size of draws × parameters is stored.
    ``seconds``, about: a time limit lowers the draws, down to two; where these would still take
    too long, it gives up the split by layer.
    """
    if len(batches) < 2:
        raise ValueError(
            f"{len(batches)} batch was given; σ² is the variance between batches: give at least "
            "two, better eight, as training draws them"
        )
    if draws is not None and draws < 2:
        raise ValueError(f"draws={draws} has no spread; give at least 2, or None to let it choose")
    with restored(model) as buffers:
        gradients = Gradients(model, loss_fn, buffers, seed)
        return _variance(gradients, batches, draws, split, seconds, progress)


def _variance(
    gradients: Gradients,
    batches: Sequence[Any],
    draws: int | None,
    split: bool,
    seconds: float,
    progress: Progress | None,
) -> VarianceReport:
    meter = _VarianceMeter(gradients, split)
    with gradients.switch.installed():
        start = monotonic()
        mean = _mean_gradient(gradients, batches)
        meter.mean_norm = math.fsum(map(squared_norm, mean))
        count = draws or meter.pilot(batches[0], len(batches))
        if seconds < math.inf:
            passes = len(batches) + (0 if draws else PILOT_DRAWS + 1)
            a_pass = (monotonic() - start) / passes
            left = seconds - (monotonic() - start)
            count = meter.within(left / a_pass / len(batches), count)
        for i, batch in enumerate(batches):
            for draw in meter.add_batch(batch, mean, count):
                if progress is not None:
                    progress((i + (draw + 1) / count) / len(batches))
    sketches = {name: repr(m.sketch) for m, name in gradients.switch.layers.items()}
    return meter.report(count, sketches)


def _mean_gradient(gradients: Gradients, batches: Sequence[Any]) -> list[Tensor]:
    mean: list[Tensor] = []
    for i, batch in enumerate(batches):
        exact = [_wide(g) for g in gradients.exact(batch)]
        if not mean:
            mean = [torch.zeros_like(g) for g in exact]
        for total, g in zip(mean, exact, strict=True):
            total.add_((g - total) / (i + 1))
    return mean


def _wide(g: Tensor) -> Tensor:
    return g if g.device.type == "mps" else g.double()


class _VarianceMeter:
    def __init__(self, gradients: Gradients, split: bool) -> None:
        self.gradients = gradients
        self.split = split
        self.mean_norm = 0.0
        self.deviations: list[float] = []
        self.totals: list[list[float]] = []
        self.remainders: list[list[float]] = []
        self.alignments: list[list[list[float]]] = [[] for _ in gradients.parameters]
        self.layers: dict[str, list[list[float]]] = {}

    def pilot(self, batch: Any, batches: int) -> int:
        """How many draws for each batch bring the error of V below the target."""
        exact = self.gradients.exact(batch)
        values, alignments = [], []
        for draw in range(PILOT_DRAWS):
            sketched = self.gradients.sketched(batch, -1 - draw)
            values.append(squared_distance(sketched, exact))
            alignments.append(alignment(sketched, exact))
        estimate = over_draws([values])
        if estimate.value == 0 or not math.isfinite(estimate.value):
            return 2
        if any(surprising([of_parameter]) for of_parameter in zip(*alignments, strict=True)):
            return MAX_DRAWS
        spread = estimate.draw_error / estimate.value * math.sqrt(PILOT_DRAWS)
        needed = math.ceil((spread / TARGET_ERROR) ** 2 / batches)
        return min(MAX_DRAWS, max(PILOT_DRAWS, needed))

    def within(self, passes: float, draws: int) -> int:
        """As many draws for each batch as so many ``passes`` over it allow."""
        uses = len(self.gradients.switch.uses)
        if self.split and passes / max(1, uses) < 2:
            self.split = False
        return max(2, min(draws, int(passes / (max(1, uses) if self.split else 1))))

    def add_batch(self, batch: Any, mean: list[Tensor], draws: int) -> Iterator[int]:
        """Measures one batch, and yields after each draw."""
        exact = self.gradients.exact(batch)
        self.deviations.append(squared_distance([_wide(g) for g in exact], mean))
        self.totals.append([])
        for batches in self.alignments:
            batches.append([])
        self.remainders.append([])
        uses = self.gradients.switch.uses
        if not uses:
            raise ValueError("loss_fn never called a sketched layer; nothing can be measured")
        for name in uses:
            self.layers.setdefault(name, [[] for _ in self.totals[1:]])
        for values in self.layers.values():
            values.append([])
        for draw in range(draws):
            self._add_draw(batch, draw, exact, uses)
            yield draw

    def _add_draw(self, batch: Any, draw: int, exact: list[Tensor], uses: list[str]) -> None:
        injected = dict.fromkeys(self.layers, 0.0)
        before = exact
        # The first use in forward is the last in backward: from the top of the network down.
        for first in reversed(range(1, len(uses))) if self.split else ():
            after = self.gradients.sketched(batch, draw, first)
            injected[uses[first]] += visible_distance(after, before)
            before = after
        final = self.gradients.sketched(batch, draw)
        injected[uses[0]] += visible_distance(final, before)
        total = visible_distance(final, exact)
        if not math.isfinite(total):
            raise ValueError(
                "a gradient is not finite; the variance of such gradients means nothing"
            )
        self.totals[-1].append(total)
        for batches, value in zip(self.alignments, alignment(final, exact), strict=True):
            batches[-1].append(value)
        self.remainders[-1].append(total - math.fsum(injected.values()))
        for name, value in injected.items():
            self.layers[name][-1].append(value)

    def report(self, draws: int, sketches: dict[str, str]) -> VarianceReport:
        layers = tuple(
            LayerVariance(
                name, sketches[name], over_draws(values), variance_ratio(values, self.deviations)
            )
            for name, values in self.layers.items()
        )
        sigma2 = minibatch_variance(self.deviations)
        return VarianceReport(
            batches=len(self.deviations),
            draws=draws,
            sigma2=sigma2,
            added=over_draws(self.totals),
            relative=variance_ratio(self.totals, self.deviations),
            layers=layers if self.split else (),
            remainder=over_draws(self.remainders) if self.split else None,
            signal=max(0.0, self.mean_norm - sigma2.value / len(self.deviations)),
            missed={
                name: over_draws(values)
                for name, values in zip(self.gradients.names, self.alignments, strict=True)
                if surprising(values)
            },
        )


def visible_distance(a: list[Tensor], b: list[Tensor]) -> float:
    """‖a - b‖², and 0 where that is what rounding leaves."""
    distance = squared_distance(a, b)
    eps = max(torch.finfo(g.dtype).eps for g in b)
    rounding = (4 * eps) ** 2 * sum(map(squared_norm, b))
    return 0.0 if distance <= rounding else distance


def alignment(sketched: list[Tensor], exact: list[Tensor]) -> list[float]:
    """⟨ĝ - g, g⟩/‖g‖² of each parameter; 0 where g is what rounding leaves of zero.

    The bias of attention's keys has such a gradient: softmax does not see it.
    """
    pairs = list(zip(sketched, exact, strict=True))
    dots = [float((_wide(a - b) * b).sum()) for a, b in pairs]
    sizes = [float(_wide(b).square().sum()) for b in exact]
    eps = max(torch.finfo(g.dtype).eps for g in exact)
    rounding = eps**2 * math.fsum(sizes)
    return [dot / size if size > rounding else 0.0 for dot, size in zip(dots, sizes, strict=True)]
