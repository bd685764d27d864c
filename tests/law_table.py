"""Every public sketch, once: what the law tests run over.

A new method is listed in ``METHODS``; its variants (``root``, both samplings, ``paper``, planners)
are read off its fields, and every law is then asked of each of them. Pairs are
written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import torch
from torch import Tensor

import sketchprop as sp
from sketchprop.core.enumeration import expectation
from sketchprop.core.sampling import Atoms, Uniforms, draw_uniforms
from sketchprop.core.vjp import CompactGradient, Vjp
from sketchprop.meters.unbiased import Case, cases
from sketchprop.sketches import Every, ForwardRows, Planner

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
    ForwardRows,
)
CHOICES: dict[type[sp.Sketch], dict[str, tuple[Any, ...]]] = {
    sp.Rows: {"by": ("gradient", "gradient_input", "uniform")},
    ForwardRows: {"by": ("input", "uniform")},
}
PLANNERS: tuple[Planner, ...] = (Every(1, rows=0.5), Every(4), Every(4, rows=0.5))

BUDGETS: tuple[float | int, ...] = (0.1, 0.3, 0.5, 1, 1.0)
GRADIENTS = ("dX", "dW", "db")


@dataclass(frozen=True)
class Variant:
    """A method with all of its options but the budget, and who makes its atoms."""

    name: str
    make: Callable[[float | int], Any]
    planner: Planner | None = None

    def __call__(self, budget: float | int) -> Any:
        return self.make(budget)

    def __str__(self) -> str:
        return self.name

    @property
    def example(self) -> Any:
        return self.make(2)

    @property
    def method(self) -> type:
        return type(self.example)

    @property
    def sampling(self) -> str:
        sides = self.example.sides if self.is_pair else [self.example]
        samplings = {side.sampling for side in sides}
        return samplings.pop() if len(samplings) == 1 else "mixed"

    @property
    def is_pair(self) -> bool:
        return isinstance(self.example, sp.Split)

    def new_planner(self) -> Planner | None:
        return None if self.planner is None else self.planner.anew()

    def atoms(self, sketch: Any, vjp: Vjp) -> Atoms:
        """From a planner that has served another gradient before: what it remembers is stale."""
        planner = self.new_planner()
        if planner is None:
            return sketch.atoms(vjp)
        planner.atoms(sketch, vjp._replace(G=vjp.G.roll(1, -1).flip(-2)))
        return planner.atoms(sketch, vjp)

    def draw(self, sketch: Any, vjp: Vjp, uniforms: Uniforms = draw_uniforms) -> CompactGradient:
        if self.planner is None:
            return sketch(vjp, uniforms)
        return self.atoms(sketch, vjp).draw(vjp, uniforms)

    def gradients(
        self, sketch: Any, G: Tensor, W: Tensor, X: Tensor, uniforms: Uniforms = draw_uniforms
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dX, dW and db of one draw."""
        return products(self.draw(sketch, Vjp(G, W, X), uniforms), W, X)


def _variants(*, paper: bool) -> Iterator[Variant]:
    for method in METHODS:
        names = {field.name for field in fields(method)}
        if paper and "paper" not in names:
            continue
        choices = {"sampling": ("fixed", "independent"), **CHOICES.get(method, {})}
        if "root" in names:
            choices["root"] = (False, True)
        if paper:
            choices["paper"] = (True,)
        for values in product(*choices.values()):
            yield _variant(method, dict(zip(choices, values, strict=True)))
        if not paper and not Every(4).refusal(method(2)):
            for planner in PLANNERS:
                yield _variant(method, {"sampling": "fixed"}, planner)


def _variant(
    method: type[sp.Sketch], options: dict[str, Any], planner: Planner | None = None
) -> Variant:
    marks = [v if isinstance(v, str) else k for k, v in options.items() if v is not False]
    marks += [] if planner is None else [repr(planner)]
    name = "-".join([method.__name__, *marks])
    return Variant(name, lambda budget: method(budget, **options), planner)


SAMPLES = (Variant("Rows-sample", lambda b: sp.Rows(b, unit="sample")),)

PAIRS = (
    Variant("L1|ForwardRows", lambda b: sp.Split(input=sp.L1(b), weight=ForwardRows(b))),
    Variant(
        "Rows|ForwardRows-uniform",
        lambda b: sp.Split(input=sp.Rows(b), weight=ForwardRows(b, by="uniform")),
    ),
    Variant(
        "L1|Rows-gradient_input",
        lambda b: sp.Split(input=sp.L1(b), weight=sp.Rows(b, by="gradient_input")),
    ),
    Variant(
        "Diagonal|L2-independent",
        lambda b: sp.Split(input=sp.Diagonal(b), weight=sp.L2(b, sampling="independent")),
    ),
    Variant("exact|Rows", lambda b: sp.Split(input=None, weight=sp.Rows(b))),
    Variant("GradientSVD|exact", lambda b: sp.Split(input=sp.GradientSVD(b), weight=None)),
    Variant("exact|ForwardRows", lambda b: sp.Split(input=None, weight=ForwardRows(b))),
)
"""One sketch for dX, another for dW."""

SKETCHES = (*_variants(paper=False), *SAMPLES, *PAIRS)
"""All unbiased variants of all methods."""

PAPER = tuple(_variants(paper=True))
"""The literal formulas of the paper that are biased."""

SINGLE = tuple(v for v in SKETCHES if not v.is_pair)
FIXED = tuple(v for v in SKETCHES if v.sampling == "fixed")
INDEPENDENT = tuple(v for v in SINGLE if v.sampling == "independent")
ATOMS = tuple(v for v in SINGLE if v.method not in (sp.ElementMask, ForwardRows))
"""Those whose estimate is a Ĝ: an element mask has none, rows of X have none for dX."""
GATED = tuple(v for v in ATOMS if v.planner is None and "X" not in v.example.sees)

CASES: dict[str, Case] = {case.name: case for case in cases()}


def fixed(u: float | Tensor) -> Uniforms:
    """The same uniforms for every draw."""
    return lambda p, shape: torch.as_tensor(u, dtype=torch.float64).expand(shape)


def by_shape(seed: int = 0) -> Uniforms:
    """Uniforms that depend on their shape alone: two passes over the same draws make them alike."""

    def uniforms(p: Tensor, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(shape, dtype=torch.float64, generator=generator)

    return uniforms


def of_member(uniforms: Uniforms, stack: tuple[int, ...], member: tuple[int, ...]) -> Uniforms:
    """What one layer of a stack gets of the uniforms of all."""
    return lambda p, shape: uniforms(p, (*stack, *shape))[member]


def exact_gradients(G: Tensor, W: Tensor, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return G @ W, G.mT @ X, G.sum(-2)


def products(compact: CompactGradient, W: Tensor, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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


def all_coins(variant: Variant, sketch: sp.Sketch, vjp: Vjp) -> Iterator[tuple[float, Any]]:
    """Every outcome of an independent draw, toss by toss: nothing of ``core.enumeration``."""
    p = variant.atoms(sketch, vjp).probabilities
    for kept in product((False, True), repeat=p.numel()):
        coins = torch.tensor(kept).view(p.shape)
        chance = float(torch.where(coins, p, 1 - p).prod())
        if chance > 0:
            u = torch.where(coins, p / 2, (1 + p) / 2)
            yield chance, variant.draw(sketch, vjp, fixed(u))


def mean_of(
    sketch: sp.Sketch, G: Tensor, W: Tensor, f: Callable[[CompactGradient], Tensor]
) -> Tensor:
    """E[f(Ĝ)] for any f, over all combinations of the coins."""

    def run(uniforms: Uniforms) -> tuple[Tensor, ...]:
        return (f(sketch(Vjp(G, W), uniforms)),)

    return expectation(run, together=False)[0]


def random_feasible(n: int, rank: float, generator: torch.Generator | None = None) -> Tensor:
    """Some p with 0 < p ≤ 1 and Σ p = rank: min(1, c·v) with a random v, c by bisection."""
    v = torch.rand(n, dtype=torch.float64, generator=generator).clamp(min=1e-3) ** 3
    low, high = 0.0, float(n / v.min())
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if float((c * v).clamp(max=1).sum()) < rank else (low, c)
    return (high * v).clamp(max=1)
