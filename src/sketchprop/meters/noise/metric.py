"""Gradients as the optimizer sees them: Adam divides by √v̂ + ε, and noise with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def adaptive(optimizer: Any) -> bool:
    """Whether the optimizer divides gradients by the root of their running square."""
    return any("betas" in group or _squares(optimizer) for group in optimizer.param_groups)


def ready(optimizer: Any) -> bool:
    """Whether what it divides by is known; True for an optimizer that does not divide."""
    return not adaptive(optimizer) or _squares(optimizer)


def weights(
    optimizer: Any, parameters: Sequence[Tensor], noise: Sequence[Tensor] | None = None
) -> list[Tensor] | None:
    """1/(√(v̂ + n) + ε) for each parameter, and 0 for one that has had no gradient yet.

    ``noise``: a draw of ĝ - g; n is the mean of its squares in a parameter, which v̂ will have in
    it once one trains so. Without n noise in a parameter whose gradient is next to zero, as that
    of the bias of keys in attention, would count as if Adam never learnt of it.
    ``None`` for an optimizer that does not divide, such as SGD: its metric is Euclidean.
    """
    if optimizer is None or not _squares(optimizer):
        return None
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    added: Sequence[Tensor | None] = noise or [None] * len(parameters)
    return [
        _weight(optimizer.state.get(p, {}), groups.get(p, {}), p, n)
        for p, n in zip(parameters, added, strict=True)
    ]


def weighted(gradient: Sequence[Tensor], factors: Sequence[Tensor] | None) -> list[Tensor]:
    if factors is None:
        return list(gradient)
    return [g * w for g, w in zip(gradient, factors, strict=True)]


def _squares(optimizer: Any) -> bool:
    return any("exp_avg_sq" in s or "square_avg" in s for s in optimizer.state.values())


def _weight(state: Any, group: Any, parameter: Tensor, noise: Tensor | None) -> Tensor:
    v = state.get("exp_avg_sq", state.get("square_avg"))
    if v is None or v.shape != parameter.shape:
        return torch.zeros_like(parameter)
    if "exp_avg_sq" in state and "step" in state and "betas" in group:
        v = v / (1 - group["betas"][1] ** torch.as_tensor(state["step"], device=v.device))
    if noise is not None:
        v = v + noise.square().mean()
    weight: Tensor = 1 / (v.sqrt() + group.get("eps", 1e-8))
    return weight
