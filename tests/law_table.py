"""Every built-in sketch, once: what the law tests run over.

A new method is listed in ``METHODS``; its variants (``root``, both samplings, ``paper``, a plan
from a part of G) are read off its fields, and every law is then asked of each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

import sketchprop as sp
from sketchprop.meters.unbiased import Case, cases

METHODS: tuple[type[sp.Sketch], ...] = (
    sp.ColumnMask,
    sp.SampleMask,
    sp.ElementMask,
    sp.L1,
    sp.L2,
    sp.Variance,
    sp.Diagonal,
    sp.GradientSVD,
    sp.RankConstrained,
    sp.Rows,
)

BUDGETS: tuple[float | int, ...] = (0.1, 0.3, 0.5, 1, 1.0)
GRADIENTS = ("dX", "dW", "db")


@dataclass(frozen=True)
class Variant:
    """A method with all of its options but the budget."""

    method: type[sp.Sketch]
    options: tuple[tuple[str, Any], ...]

    def __call__(self, budget: float | int) -> Any:
        return self.method(budget, **dict(self.options))

    def __str__(self) -> str:
        marks = [v if isinstance(v, str) else k for k, v in self.options if v is not False]
        return "-".join([self.method.__name__, *marks])

    @property
    def sampling(self) -> str:
        return dict(self.options)["sampling"]


def _variants(*, paper: bool) -> Iterator[Variant]:
    for method in METHODS:
        names = {field.name for field in fields(method)}
        if paper and "paper" not in names:
            continue
        choices = {"sampling": ("exact", "independent")}
        if "root" in names:
            choices["root"] = (False, True)
        if paper:
            choices["paper"] = (True,)
        for values in product(*choices.values()):
            yield Variant(method, tuple(zip(choices, values, strict=True)))
        if "refresh_every" in names and not paper:
            partial = (("sampling", "exact"), ("score_rows", 0.5), ("refresh_every", 4))
            yield Variant(method, partial)


SKETCHES = tuple(_variants(paper=False))
"""All unbiased variants of all methods."""

PAPER = tuple(_variants(paper=True))
"""The literal formulas of the paper that are biased."""

EXACT = tuple(v for v in SKETCHES if v.sampling == "exact")
INDEPENDENT = tuple(v for v in SKETCHES if v.sampling == "independent")
ATOMS = tuple(v for v in SKETCHES if v.method is not sp.ElementMask)
"""Those whose estimate is a Ĝ (an element mask has none)."""

CASES: dict[str, Case] = {case.name: case for case in cases()}


def exact_gradients(G: Tensor, W: Tensor, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return G @ W, G.mT @ X, G.sum(-2)


def products(compact: sp.CompactGradient, W: Tensor, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return compact.input_grad(W), compact.weight_grad(X), compact.bias_grad()


def relative_error(mean: Tensor, true: Tensor) -> float:
    return float((mean - true).norm() / true.norm().clamp(min=1e-300))


def layer(
    B: int, n: int, d: int, *, stack: tuple[int, ...] = (), dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """G, W, X of a random layer, from the default generator."""
    return (
        torch.randn(*stack, B, n, dtype=dtype),
        torch.randn(*stack, n, d, dtype=dtype),
        torch.randn(*stack, B, d, dtype=dtype),
    )


def enumerate_outcomes(sketch: sp.Sketch, G: Tensor, W: Tensor) -> Iterator[tuple[float, Tensor]]:
    """Every outcome of an independent draw: its probability and uniforms that lead to it."""
    shape = sketch.uniform_shape(G, W)
    p = sketch.probabilities(G, W).double().expand(shape).flatten()
    for kept in product((False, True), repeat=p.numel()):
        coins = torch.tensor(kept)
        chance = float(torch.where(coins, p, 1 - p).prod())
        if chance > 0:
            yield chance, torch.where(coins, p / 2, (1 + p) / 2).view(shape)


def expectation(
    sketch: sp.Sketch, G: Tensor, W: Tensor, f: Callable[[sp.CompactGradient], Tensor]
) -> Tensor:
    """E[f(Ĝ)] for any f: over the pieces of the one uniform, or over all outcomes of the coins."""
    if sketch.sampling == "independent":
        parts = [chance * f(sketch(G, W, u)) for chance, u in enumerate_outcomes(sketch, G, W)]
        return torch.stack(parts).sum(0)
    sums = sketch.probabilities(G, W).double().cumsum(0)
    points = torch.cat([sums - sums.floor(), torch.tensor([0.0, 1.0])]).sort().values
    pieces = [(low, high) for low, high in pairwise(points) if high > low]
    parts = [(high - low) * f(sketch(G, W, (low + high) / 2)) for low, high in pieces]
    return torch.stack(parts).sum(0)


def random_feasible(n: int, rank: float, generator: torch.Generator | None = None) -> Tensor:
    """Some p with 0 < p ≤ 1 and Σ p = rank: min(1, c·v) with a random v, c by bisection."""
    v = torch.rand(n, dtype=torch.float64, generator=generator).clamp(min=1e-3) ** 3
    low, high = 0.0, float(n / v.min())
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if float((c * v).clamp(max=1).sum()) < rank else (low, c)
    return (high * v).clamp(max=1)
