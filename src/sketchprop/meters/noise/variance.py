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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...layers.isolation import SKETCHING
from ..restore import restored
from .estimate import Estimate, divide, minibatch_variance, over_draws, variance_ratio
from .gradients import Gradients, Loss, numbers, squared_distance, squared_norms, wide

Progress = Callable[[float], object]
"""Told from time to time which share of the work is done."""

SURPRISE = 5.0
"""Standard errors that an alignment may be off; by chance once in a million parameters."""

ELSEWHERE = "elsewhere"
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
class FeltNoise:
    """What all draws together do to the gradients of one layer's or block's own parameters."""

    layer: str
    """``ELSEWHERE``: all parameters that are in no sketched layer."""
    relative: Estimate
    """V/σ², both of these parameters."""
    share: float
    """V/(‖g‖² + σ²) of these parameters."""


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
    """V - Σ of the layers, draw by draw: zero within its error; ``None`` without ``split``."""
    signal: float
    """‖g‖², of the mean gradient g: ‖ḡ‖² of the batches without the σ²/M that is noise."""
    felt: tuple[FeltNoise, ...]
    """By the layer or block whose parameters they are, in the order of forward. A sum over all
    parameters hides a block: heads are exact and may hold most of σ²."""
    missed: dict[str, Estimate]
    """⟨ĝ - g, g⟩/‖g‖² of each parameter where it is not zero within its error: -1 where the draws
    never brought a gradient."""

    @property
    def relative_signal(self) -> float:
        """‖g‖²/σ²; 0 where there is no σ²."""
        sigma2 = self.sigma2.value
        return self.signal / sigma2 if sigma2 > 0 else 0.0

    @property
    def worst(self) -> FeltNoise | None:
        """The layer or block that feels most noise for its own gradient."""
        felt = [each for each in self.felt if each.layer != ELSEWHERE]
        return max(felt, key=lambda each: each.share, default=None)

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
        with gradients.switch.installed():
            start, units = monotonic(), Units(model, gradients.parameters)
            mean = _mean_gradient(gradients, batches)
            count = draws or _pilot(gradients, units, batches)
            if seconds < math.inf:
                spent = monotonic() - start
                a_pass = spent / (len(batches) + (0 if draws else PILOT_DRAWS + 1))
                # As many draws for each batch as the passes that are left allow.
                passes = (seconds - spent) / a_pass / len(batches)
                uses = max(1, len(gradients.switch.uses))
                split = split and passes >= 2 * uses
                count = max(2, min(count, int(passes / (uses if split else 1))))
            deviations: list[list[float]] = []
            squares: list[list[float]] = []
            drawn: list[list[_Draw]] = []
            for place, batch in enumerate(batches):
                exact = gradients.exact(batch, place)
                apart = [wide(g) - m for g, m in zip(exact, mean, strict=True)]
                deviations.append(units.sums(squared_norms(apart)))
                squares.append(units.sums(squared_norms(exact)))
                drawn.append([])
                for number in range(count):
                    drawn[-1].append(_draw(gradients, units, batch, number, exact, split))
                    if progress is not None:
                        progress((len(drawn) - 1 + (number + 1) / count) / len(batches))
    return _report(gradients, units, mean, deviations, squares, drawn, split)


def _mean_gradient(gradients: Gradients, batches: Sequence[Any]) -> list[Tensor]:
    mean = [torch.zeros_like(wide(p)) for p in gradients.parameters]
    for place, batch in enumerate(batches):
        for total, g in zip(mean, gradients.exact(batch, place), strict=True):
            total.add_(wide(g) / len(batches))
    return mean


class Units:
    """Which sketched layer or block each parameter belongs to, the outermost; the last: none."""

    def __init__(self, model: nn.Module, parameters: Sequence[Tensor]) -> None:
        owners: dict[Tensor, str] = {}
        for name, module in model.named_modules():
            for parameter in module.parameters() if SKETCHING in vars(module) else ():
                owners.setdefault(parameter, name)
        own = [owners.get(parameter) for parameter in parameters]
        self.names = list(dict.fromkeys(name for name in own if name is not None))
        places = {name: place for place, name in enumerate(self.names)}
        self.places = [-1 if name is None else places[name] for name in own]

    def sums(self, values: Sequence[float]) -> list[float]:
        """Of numbers by parameter those of each unit together."""
        sums = [0.0] * (len(self.names) + 1)
        for place, value in zip(self.places, values, strict=True):
            sums[place] += value
        return sums

    def worst(self, noise: Sequence[float], squares: Sequence[float]) -> float:
        """The largest noise of a unit over its own square, of numbers by parameter."""
        pairs = list(zip(self.sums(noise), self.sums(squares), strict=True))[:-1]
        return max((v / s for v, s in pairs if s > 0), default=0.0)


class _Draw(NamedTuple):
    """One sketched gradient against the exact one of its batch."""

    added: float
    """‖ĝ - g‖²."""
    felt: list[float]
    """The same by unit."""
    alignments: list[float]
    injected: dict[str, float]
    """‖Mₖ - Mₖ₋₁‖² by layer; all of it by the first where it is not split."""


def _draw(
    gradients: Gradients, units: Units, batch: Any, number: int, exact: list[Tensor], split: bool
) -> _Draw:
    uses = gradients.switch.uses
    if not uses:
        raise ValueError("loss_fn never called a sketched layer; nothing can be measured")
    injected = dict.fromkeys(uses, 0.0)
    before = exact
    # The first use in forward is the last in backward: from the top of the network down.
    for first in reversed(range(len(uses))) if split else (0,):
        after = gradients.sketched(batch, number, first)
        injected[uses[first]] += visible_distance(after, before)
        before = after
    added = visible_distance(before, exact)
    if not math.isfinite(added):
        raise ValueError("a gradient is not finite; the variance of such gradients means nothing")
    felt = squared_norms(a - b for a, b in zip(before, exact, strict=True)) if added else []
    return _Draw(added, units.sums(felt or [0.0] * len(exact)), alignment(before, exact), injected)


def _pilot(gradients: Gradients, units: Units, batches: Sequence[Any]) -> int:
    """How many draws for each batch bring the error of V below the target."""
    exact = gradients.exact(batches[0])
    drawn = [_draw(gradients, units, batches[0], -1 - i, exact, False) for i in range(PILOT_DRAWS)]
    estimate = over_draws([[draw.added for draw in drawn]])
    if estimate.value == 0:
        return 2
    by_parameter = zip(*(draw.alignments for draw in drawn), strict=True)
    if any(surprising([values]) for values in by_parameter):
        return MAX_DRAWS
    spread = estimate.draw_error / estimate.value * math.sqrt(PILOT_DRAWS)
    needed = math.ceil((spread / TARGET_ERROR) ** 2 / len(batches))
    return min(MAX_DRAWS, max(PILOT_DRAWS, needed))


def _report(
    gradients: Gradients,
    units: Units,
    mean: list[Tensor],
    by_unit: list[list[float]],
    squares: list[list[float]],
    drawn: list[list[_Draw]],
    split: bool,
) -> VarianceReport:
    def each(read: Callable[[_Draw], float]) -> list[list[float]]:
        return [[read(draw) for draw in of_batch] for of_batch in drawn]

    deviations = list(map(math.fsum, by_unit))
    added, sigma2 = each(lambda draw: draw.added), minibatch_variance(deviations)
    felt = []
    for place, name in enumerate([*units.names, ELSEWHERE]):
        own = each(lambda draw, place=place: draw.felt[place])  # type: ignore[misc]
        ratio = variance_ratio(own, [of_batch[place] for of_batch in by_unit])
        square = fmean(of_batch[place] for of_batch in squares)
        if square > 0:
            felt.append(FeltNoise(name, ratio, divide(over_draws(own).value, square)))
    layers = []
    sketches = {name: repr(m.sketch) for m, name in gradients.switch.layers.items()}
    names = dict.fromkeys(name for of_batch in drawn for name in of_batch[0].injected)
    for name in names if split else ():
        parts = each(lambda draw, name=name: draw.injected.get(name, 0.0))  # type: ignore[misc]
        injected, relative = over_draws(parts), variance_ratio(parts, deviations)
        layers.append(LayerVariance(name, sketches[name], injected, relative))
    missed = {}
    for i, name in enumerate(gradients.names):
        values = each(lambda draw, i=i: draw.alignments[i])  # type: ignore[misc]
        if surprising(values):
            missed[name] = over_draws(values)
    rest = each(lambda draw: draw.added - math.fsum(draw.injected.values()))
    norm = math.fsum(squared_norms(mean))
    return VarianceReport(
        batches=len(drawn),
        draws=len(drawn[0]),
        sigma2=sigma2,
        added=over_draws(added),
        relative=variance_ratio(added, deviations),
        layers=tuple(layers),
        remainder=over_draws(rest) if split else None,
        signal=max(0.0, norm - sigma2.value / len(drawn)),
        felt=tuple(felt),
        missed=missed,
    )


def visible_distance(a: list[Tensor], b: list[Tensor]) -> float:
    """‖a - b‖², and 0 where that is what rounding leaves."""
    distance = squared_distance(a, b)
    eps = max(torch.finfo(g.dtype).eps for g in b)
    rounding = (4 * eps) ** 2 * sum(squared_norms(b))
    return 0.0 if distance <= rounding else distance


def alignment(sketched: list[Tensor], exact: list[Tensor]) -> list[float]:
    """⟨ĝ - g, g⟩/‖g‖² of each parameter; 0 where g is what rounding leaves of zero.

    The bias of attention's keys has such a gradient: softmax does not see it.
    """
    dots = numbers((wide(a - b) * b).sum() for a, b in zip(sketched, exact, strict=True))
    sizes = squared_norms(exact)
    eps = max(torch.finfo(g.dtype).eps for g in exact)
    rounding = eps**2 * math.fsum(sizes)
    return [dot / size if size > rounding else 0.0 for dot, size in zip(dots, sizes, strict=True)]
