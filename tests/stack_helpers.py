"""A small network, its gradients, and a seeded test of their mean: shared by the stack's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import sketchprop as sp
from sketchprop.layers import SketchedBlock, SketchedModule

Z_LIMIT = 5.0
"""Largest deviation of a mean, in standard errors; a normal variable passes it in 6e-7 of cases."""

SKETCHES = (
    sp.L1(0.3),
    sp.L2(0.3),
    sp.Diagonal(0.3),
    sp.Variance(0.3),
    sp.ColumnMask(0.3),
    sp.SampleMask(0.3),
)


def net(dropout: float = 0.0) -> nn.Sequential:
    """The same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(12, 24),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(24, 20),
            nn.GELU(),
            nn.Linear(20, 4),
        )


def batch(rows: int = 16, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 12, generator=generator)
    return x, torch.randint(0, 4, (rows,), generator=generator)


def gradients(parameters: Iterable[Tensor], loss: Callable[[], Tensor], seed: int) -> list[Tensor]:
    """One seeded forward and backward pass: the ``.grad`` of each parameter, as new tensors."""
    parameters = list(parameters)
    for p in parameters:
        p.grad = None
    torch.manual_seed(seed)
    loss().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]


def largest_z(truth: list[Tensor], draw: Callable[[int], list[Tensor]], draws: int) -> float:
    """How far the mean of ``draw(0), draw(1), …`` is from ``truth``, in standard errors.

    Parameter by parameter, along the true gradient and along four fixed random directions.
    """
    generator = torch.Generator().manual_seed(7)
    directions = []
    for t in truth:
        signs = torch.randint(0, 2, (5, t.numel()), generator=generator).double() * 2 - 1
        signs[0] = t.flatten().double()
        directions.append(signs / signs.norm(dim=1, keepdim=True).clamp(min=1e-30))
    errors = []
    for k in range(draws):
        sample = draw(k)
        assert all(bool(g.isfinite().all()) for g in sample)
        errors.append(
            torch.cat(
                [
                    d @ (g - t).flatten().double()
                    for d, g, t in zip(directions, sample, truth, strict=True)
                ]
            )
        )
    along = torch.stack(errors)
    spread = along.std(0) / draws**0.5
    sizes = torch.cat([t.double().norm().expand(5) for t in truth])
    # Rounding is no bias: neither of a gradient that is exact, nor of one that is zero but for
    # rounding (a key's bias before softmax), which only the size of the others can tell.
    whole = sum(float(t.double().square().sum()) for t in truth) ** 0.5
    rounding = torch.clamp(1e-5 * sizes, min=1e-9 * whole)
    z = torch.where(along.mean(0).abs() <= rounding, 0.0, along.mean(0).abs() / spread)
    return float(z.max())


def equal(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    """Bitwise, tensor by tensor."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def blocks(model: nn.Module) -> list[Any]:
    """The blocks that were sketched."""
    return [m for m in model.modules() if isinstance(m, SketchedBlock)]


def wide() -> nn.Sequential:
    """Two sketched layers and an exact one, with the same weights each time."""
    torch.manual_seed(3)
    layers = [nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)]
    return sp.sketch_(nn.Sequential(*layers), sp.Rows(0.5))


class BudgetClock:
    """Each reading is later by 4 and by 4 times the mean budget: no test depends on real time."""

    def __init__(self, model: nn.Module, rest: float = 4, slope: float = 4) -> None:
        self.model, self.rest, self.slope = model, rest, slope
        self.now = 0.0

    def __call__(self) -> float:
        states = [m.sketching for m in self.model.modules() if isinstance(m, SketchedModule)]
        kept = [1.0 if state.exact else state.sketch.budget for state in states]
        self.now += self.rest + self.slope * sum(kept) / len(kept)
        return self.now
