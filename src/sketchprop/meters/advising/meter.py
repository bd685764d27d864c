"""Times and noise of candidates, measured on the model itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, stdev
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...core.stopwatch import clock_of, in_turns, synchronise
from ...layers.isolation import no_gradient_hooks
from ..cost.memory import bytes_of
from ..cost.timing import compare, times_of
from ..noise.metric import weighted, weights
from ..noise.passes import Gradients, Loss, scalar_loss, squared_norm
from ..noise.passes import seed as seed_generators
from ..noise.variance import visible_distance
from ..restore import Buffers, restored, tensors_in
from .answer import DROWNED, Option
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
    """One sketched gradient: ‖ĝ - g‖²/(‖g‖² + σ²), and the seconds of both passes."""

    noise: float
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
        self.optimizer = optimizer
        self.factors = weights(optimizer, self.parameters)
        self.squares: list[Tensor] = []
        """The mean square of the batches' gradients, by coordinate; where Adam divides."""
        self.bytes = bytes_of(model, loss_fn, batches[0]).total
        self.total, self.sigma2 = self._of_batches()
        if not 0 < self.total < math.inf:
            raise ValueError("the gradient is zero, or not finite, on these batches")

    @property
    def signal(self) -> float:
        """‖g‖²/σ²."""
        return max(0.0, self.total - self.sigma2) / self.sigma2 if self.sigma2 else math.inf

    def _of_batches(self) -> tuple[float, float]:
        """‖g‖² + σ², the mean of ‖g_k‖², and σ² = (Σ‖g_k‖² - M‖ḡ‖²)/(M - 1)."""
        count = len(self.batches)
        mean: list[Tensor] = []
        norms = []
        for batch in self.batches:
            seed_generators(self.parameters[0].device, self.seed)
            loss = scalar_loss(self.loss_fn, self.model, batch)
            found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
            pairs = zip(found, self.parameters, strict=True)
            plain = [torch.zeros_like(p) if x is None else x for x, p in pairs]
            if self.factors is not None:
                self.squares = self.squares or [torch.zeros_like(x) for x in plain]
                for square, x in zip(self.squares, plain, strict=True):
                    square.addcmul_(x, x, value=1 / count)
            g = weighted(plain, self.factors)
            norms.append(math.fsum(map(squared_norm, g)))
            mean = (
                [x / count + y for x, y in zip(g, mean, strict=True)]
                if mean
                else [x / count for x in g]
            )
        of_mean = math.fsum(map(squared_norm, mean))
        sigma2 = (math.fsum(norms) - count * of_mean) / (count - 1)
        return fmean(norms), max(0.0, sigma2)

    def measured(self, candidate: Candidate, seconds: float) -> Option:
        """Time, noise and bytes of a candidate, in about so many ``seconds``."""
        option = Option(candidate.name, candidate.line)
        if seconds < LEAST_PASSES * self.a_pass:
            return replace(option, note="not tried: the time was used up")
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
            times = compare([draw.exact for draw in draws], [draw.sketched for draw in draws])
            passes = len(draws) + len({draw.exact for draw in draws}) + 1
            self.a_pass = (monotonic() - begin) / passes  # a machine may get busier on the way
            if left > FOR_TIMES * self.a_pass:
                batch = self.batches[0]
                times = times_of(self.model, self.loss_fn, batch, (2, MOST_ROUNDS), left)
        added = [draw.noise for draw in draws]
        noise = fmean(added)
        if not math.isfinite(noise):
            return replace(option, note="its gradient is not finite")
        spread = stdev(added) / math.sqrt(len(added))
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
        factors, total = None, self.total
        with gradients.switch.installed():
            for batch in batches:
                exact_seconds, exact = self._timed(partial(gradients.exact, batch))
                for number in range(count):
                    seconds, drawn = self._timed(partial(gradients.sketched, batch, number))
                    if self.squares and factors is None:
                        factors, total = self._with_noise(drawn, exact)
                    a, b = weighted(drawn, factors), weighted(exact, factors)
                    noise = visible_distance(a, b) / total
                    found.append(_Draw(noise, exact_seconds, seconds))
        return found

    def _timed(self, run: Callable[[], list[Tensor]]) -> tuple[float, list[Tensor]]:
        device = self.parameters[0].device
        clock = clock_of(device)
        synchronise(device)
        begin = clock()
        found = run()
        synchronise(device)
        return clock() - begin, found

    def _with_noise(
        self, drawn: Sequence[Tensor], exact: Sequence[Tensor]
    ) -> tuple[list[Tensor] | None, float]:
        """Adam's metric as it will be with this noise, and ‖g‖² + σ² in it."""
        noise = [a - b for a, b in zip(drawn, exact, strict=True)]
        factors = weights(self.optimizer, self.parameters, noise)
        assert factors is not None
        pairs = zip(self.squares, factors, strict=True)
        return factors, math.fsum(float((s * w.square()).double().sum()) for s, w in pairs)

    def half(self, seconds: float) -> Option | None:
        """Half of the batch, exact: σ² doubles. ``None`` where the batch cannot be cut."""
        whole = self.batches[0]
        part = halved(whole)
        if part is None or seconds < FOR_HALF / 2 * self.a_pass:
            return None

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
        noise = self.sigma2 / self.total
        change, error = times.ratio * (1 + noise), (1 + noise) * times.ratio_error
        note = "the control: exact gradients of fewer samples"
        return Option("half of the batch", "", times.ratio, noise, change, error, note=note)


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
