"""What noise costs an optimizer in steps.

SGD moves along the gradient, and what limits its rate is the mean square of it: with the noise V
it needs (‖g‖² + σ² + V)/(‖g‖² + σ²) times the steps.

Adam and its kin divide by √v, v the mean square of each coordinate, and noise is part of v. With
V in v a parameter moves as far as without it; only less of that is signal: the progress of a step
is Σ ‖g‖²/√(s + V) over the parameters, s the mean square without V. Where the curvature is like
the Fisher information, H ∝ s, what the rate is limited by, Σ H (s + V)/(s + V), does not change. At
its best rate the progress is the square of the first over the second, so it needs

    (Σ ‖g‖²/√s)² / (Σ ‖g‖²/√(s + V))²

times the steps. For noise in proportion to s both are 1 + V/s. But a fine-tuned encoder has much of
its signal in parameters next to the loss, whose gradients are exact, and most of V elsewhere, where
it has little to drown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..restore import check_optimizer
from .estimate import divide
from .gradients import squared_norms
from .variance import visible_distance

DROWNED = 1 / 3
"""Steps that noise adds, V/(‖g‖² + σ²) with SGD, from which on training is known to stall."""

HUGE = 4.0
"""A batch counts at most as so many usual ones, by ‖g‖²: one with a huge gradient would otherwise
be all that counts, in V and in σ²."""


def adaptive(optimizer: Any) -> bool:
    """Whether the optimizer divides gradients by the root of their running square."""
    if optimizer is None:
        return False
    check_optimizer(optimizer)
    return any("betas" in group or _squares(optimizer) for group in optimizer.param_groups)


def ready(optimizer: Any) -> bool:
    """Whether it has made a step, as far as can be told: True for one that does not divide."""
    return not adaptive(optimizer) or bool(optimizer.state)


def steps_made(optimizer: Any) -> int | None:
    """As many as it counts itself; ``None`` where it does not."""
    states = getattr(optimizer, "state", {}).values()
    return max((int(state["step"]) for state in states if "step" in state), default=None)


def _squares(optimizer: Any) -> bool:
    return any("exp_avg_sq" in s or "square_avg" in s for s in optimizer.state.values())


@dataclass(frozen=True)
class Pace:
    """What an optimizer is given in each step, parameter by parameter, and what noise makes of it.

    ``squares``: the mean of ‖g_k‖² over batches; ``signal``: ‖ḡ‖² of their mean, which has some of
    their noise in it: of few batches without a clear signal all parameters count alike.
    """

    sizes: tuple[int, ...]
    squares: tuple[float, ...]
    signal: tuple[float, ...]
    divides: bool

    @classmethod
    def of(cls, gradient: Sequence[Tensor], divides: bool) -> Pace:
        """From one batch alone."""
        squares = tuple(squared_norms(gradient))
        return cls(tuple(g.numel() for g in gradient), squares, squares, divides)

    @property
    def total(self) -> float:
        """‖g‖² + σ²."""
        return math.fsum(self.squares)

    @property
    def scales(self) -> list[float]:
        """What a parameter's gradient is multiplied by: 1/√(its mean square) by Adam, else 1."""
        pairs = zip(self.sizes, self.squares, strict=True)
        return [math.sqrt(size / s) if self.divides and s else 1.0 for size, s in pairs]

    def steps(self, noise: Sequence[float]) -> float:
        """How many times the steps are needed with E‖ĝ - g‖² = ``noise``, by parameter.

        >>> Pace((4, 4), (1.0, 1.0), (1.0, 1.0), divides=False).steps((0.0, 3.0))
        2.5
        >>> Pace((4, 4), (1.0, 1.0), (1.0, 1.0), divides=True).steps((3.0, 3.0))
        4.0
        >>> Pace((4, 4), (1.0, 1.0), (1.0, 0.0), divides=True).steps((0.0, 3.0))
        1.0
        """
        if not self.divides or not all(map(math.isfinite, noise)):
            return 1 + divide(math.fsum(noise), self.total)
        plain = noisy = 0.0
        for scale, square, signal, added in zip(
            self.scales, self.squares, self.signal, noise, strict=True
        ):
            if square > 0:
                plain += scale * signal
                noisy += scale * signal / math.sqrt(1 + added / square)
        return (plain / noisy) ** 2 if noisy else 1.0


def noise_by_parameter(drawn: list[Tensor], exact: list[Tensor]) -> list[float]:
    """‖ĝ - g‖² of each parameter; 0 in all where that is what rounding leaves."""
    if not visible_distance(drawn, exact):
        return [0.0] * len(exact)
    return squared_norms(a - b for a, b in zip(drawn, exact, strict=True))
