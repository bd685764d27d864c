"""How good a model is, where accuracy does not say it; higher is better."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ..lab.trainer import Batch


def _outputs(model: nn.Module, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    """What the model says and what was wanted, sample by sample; in eval mode."""
    was = model.training
    model.eval()
    with torch.no_grad():
        pairs = [(model(x), y) for x, y in batches]
    model.train(was)
    return torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])


def r_squared(model: nn.Module, batches: Iterable[Batch]) -> float:
    """1 - Σ(y - ŷ)²/Σ(y - ȳ)², in percent."""
    found, wanted = _outputs(model, batches)
    missed = (wanted - found).square().sum() / (wanted - wanted.mean()).square().sum()
    return 100.0 * (1 - float(missed))


def f1(model: nn.Module, batches: Iterable[Batch]) -> float:
    """2·right/(found + wanted) of the class 1, in percent."""
    logits, wanted = _outputs(model, batches)
    found = logits.argmax(-1)
    right = int(((found == 1) & (wanted == 1)).sum())
    return 200.0 * right / max(1, int((found == 1).sum()) + int((wanted == 1).sum()))


def negative_loss(
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[nn.Module, Iterable[Batch]], float]:
    """-loss over all samples at once."""

    def score(model: nn.Module, batches: Iterable[Batch]) -> float:
        return -float(loss(*_outputs(model, batches)))

    return score
