"""How good outputs are, where accuracy does not say it; higher is better."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def r_squared(found: Tensor, wanted: Tensor) -> float:
    """1 - Σ(y - ŷ)²/Σ(y - ȳ)², in percent."""
    missed = (wanted - found).square().sum() / (wanted - wanted.mean()).square().sum()
    return 100.0 * (1 - float(missed))


def f1(logits: Tensor, wanted: Tensor) -> float:
    """2·right/(found + wanted) of the class 1, in percent."""
    found = logits.argmax(-1)
    right = int(((found == 1) & (wanted == 1)).sum())
    return 200.0 * right / max(1, int((found == 1).sum()) + int((wanted == 1).sum()))


def negative_loss(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], float]:
    """-loss over all samples at once."""
    return lambda found, wanted: -float(loss(found, wanted))
