"""Is it unbiased? A proof where the draw is a known function of uniforms, statistics elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.enumeration import expectation
from ..core.random import random_state_kept
from ..core.sampling import Uniforms
from ..core.table import Column, Report, Table, as_text, words
from ..core.vjp import Vjp
from ..sketches import AnySketch, LayerSketch, Planner, Sketch, Split
from .noise.gradients import Gradients, Loss
from .restore import restored

TOLERANCE = 1e-10
"""Largest relative error of an exact mean in float64."""
GRADIENTS = ("dX", "dW", "db")


@dataclass(frozen=True)
class MeanError:
    """The mean of one gradient against the exact one."""

    case: str
    gradient: str
    error: float
    """‖mean - exact‖ / ‖exact‖ (absolute where the exact gradient is zero)."""
    z: float | None
    """Monte Carlo: the largest deviation of the mean, in standard errors. ``None``: exact mean."""
    ok: bool


@dataclass(frozen=True)
class UnbiasedReport(Report):
    """The answer of ``check_unbiased``: printable, ``.ok``, ``.as_dict()``."""

    ANSWERS: ClassVar[tuple[str, ...]] = ("ok",)

    subject: str
    method: str
    limit: float
    entries: tuple[MeanError, ...]

    @property
    def ok(self) -> bool:
        return not self.biased

    @property
    def biased(self) -> tuple[MeanError, ...]:
        return tuple(entry for entry in self.entries if not entry.ok)

    def headline(self) -> str:
        """The verdict, how it was reached, and the limit."""
        monte_carlo = any(e.z is not None for e in self.entries)
        limit = f"|z| ≤ {self.limit:.1f}" if monte_carlo else f"error ≤ {self.limit:.0e}"
        count = f"BIASED in {len(self.biased)} of {len(self.entries)}"
        return f"{self.subject}: {'unbiased' if self.ok else count} ({self.method}; {limit})"

    def tables(self) -> list[Table]:
        """A row for each case and gradient."""
        columns = (
            *(words("case"), words("gradient"), Column("error of the mean", ".1e")),
            *(Column("z", ".1f"), words("")),
        )
        rows = [
            (e.case, e.gradient, e.error, e.z, "ok" if e.ok else "BIASED") for e in self.entries
        ]
        return [Table("", columns, rows)]

    def __str__(self) -> str:
        """The verdict, and the rows that are biased; ``tables()`` has all rows."""
        return as_text(self, replace(self, entries=self.biased).tables())


@dataclass(frozen=True)
class Case:
    """A layer: ``X: [B, d]``, ``W: [n, d]`` and the gradient ``G: [B, n]`` of its output."""

    name: str
    G: Tensor
    W: Tensor
    X: Tensor

    @property
    def truth(self) -> tuple[Tensor, ...]:
        """dX, dW, db."""
        return self.G @ self.W, self.G.mT @ self.X, self.G.sum(0)


SIZE = 8, 7, 6
CASES: dict[str, tuple[tuple[int, int, int], Callable[[Case], object] | None]] = {
    "contracting, B > n": ((12, 6, 9), None),
    "expanding (n > d)": ((12, 10, 4), None),
    "expanding, B < n": ((5, 12, 3), None),
    "B < n": ((4, 9, 11), None),
    "one row": ((1, 8, 5), None),
    "one column": ((7, 1, 5), None),
    "one input": ((7, 6, 1), None),
    "one of each": ((1, 1, 1), None),
    "zero rows of W": (SIZE, lambda case: case.W[1:5:3].zero_()),
    "W = 0": (SIZE, lambda case: case.W.zero_()),
    "zero columns of G": (SIZE, lambda case: case.G[:, 0:4:3].zero_()),
    "one non-zero column of G": (SIZE, lambda case: case.G[:, 1:].zero_()),
    "constant columns of G": (SIZE, lambda case: case.G[:, 0:6:5].copy_(torch.tensor([2, -0.5]))),
    "G = 0": (SIZE, lambda case: case.G.zero_()),
    "rows of G sum to zero": ((9, 6, 8), lambda case: case.G.sub_(case.G.mean(-1, keepdim=True))),
    "one heavy atom": ((10, 8, 6), lambda case: (case.G[2].mul_(1e3), case.G[:, 3].mul_(1e3))),
}
"""Layers on which an estimator may fail: ``B, n, d``, and what makes their contents degenerate."""


def cases() -> tuple[Case, ...]:
    """``CASES`` with numbers, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for name, ((B, n, d), change) in CASES.items():
        G, W, X = (
            torch.randn(shape, dtype=torch.float64, generator=generator)
            for shape in ((B, n), (n, d), (B, d))
        )
        made.append(Case(name, G, W, X))
        if change is not None:
            change(made[-1])
    return tuple(made)


def expected_gradients(
    sketch: LayerSketch, G: Tensor, W: Tensor, X: Tensor, planner: Planner | None = None
) -> tuple[Tensor, ...]:
    """E[dX], E[dW], E[db] over the draw of ``sketch``, as a finite sum: exact to rounding.

    The sum runs over every draw, and every draw that depends on another: see
    ``core.enumeration``.
    """
    vjp = Vjp(G, W, X)

    def gradients(uniforms: Uniforms) -> tuple[Tensor, ...]:
        if planner is None or not isinstance(sketch, Sketch):
            return _gradients(sketch(vjp, uniforms), W, X)
        return _gradients(planner.atoms(sketch, vjp).draw(vjp, uniforms), W, X)

    return expectation(gradients)


def _gradients(compact: Any, W: Tensor, X: Tensor) -> tuple[Tensor, ...]:
    return compact.input_grad(W), compact.weight_grad(X), compact.bias_grad()


def check_unbiased(
    subject: AnySketch | nn.Module | Callable[..., Any],
    loss_fn: Loss | None = None,
    batch: Any = None,
    *,
    planner: Planner | None = None,
    draws: int | None = None,
    seed: int = 0,
) -> UnbiasedReport:
    """Answers whether the mean of every gradient of ``subject`` is the exact one.

    **A sketch**, built-in or your own: tried on a table of layers with hard shapes and contents.
    The mean is exact (a finite sum over the breakpoints of the uniforms), unless ``draws`` asks
    for Monte Carlo; ``planner`` makes the atoms, as in a layer. Any callable ``Vjp ->
    CompactGradient`` works too, by Monte Carlo.

    **A sketched model** with ``loss_fn(model, batch)`` and a batch: by Monte Carlo, for every
    parameter. Everything is left as it was; randomness in forward (dropout) is held fixed, and
    only the sketches draw.

    Monte Carlo compares the mean along the exact gradient and along random directions, in
    standard errors. The limit allows one false alarm in a million checks if every atom is drawn
    often: for a probability p, give many times 1/p ``draws``. ``seed``: of the draws.

    >>> from sketchprop import L1, sketch_
    >>> check_unbiased(L1(0.3)).ok
    True
    >>> model = sketch_(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), L1(0.5))
    >>> check_unbiased(model, lambda m, x: m(x).square().mean(), torch.ones(3, 4), draws=100).ok
    True
    """
    if isinstance(subject, nn.Module):
        return _check_model(subject, loss_fn, batch, draws or 500, seed)
    if loss_fn is not None:
        raise TypeError(
            "loss_fn goes with a model: check_unbiased(model, loss_fn, batch) or "
            "check_unbiased(sketch)"
        )
    if isinstance(subject, Sketch | Split) and draws is None:
        entries = tuple(e for c in cases() for e in _exact_entries(subject, c, planner))
        return UnbiasedReport(repr(subject), "exact mean over the draw", TOLERANCE, entries)
    if not callable(subject):
        raise TypeError(
            f"{subject!r} is neither a sketch of layers nor a model; give for example Rows(0.3), "
            "a callable Vjp -> CompactGradient, or a sketched model and its loss, as for Tokens"
        )
    return _check_callable(subject, draws or 2000, seed)


def _exact_entries(sketch: LayerSketch, case: Case, planner: Planner | None) -> Iterator[MeanError]:
    fresh = None if planner is None else planner.anew()
    means = expected_gradients(sketch, case.G, case.W, case.X, fresh)
    for name, mean, true in zip(GRADIENTS, means, case.truth, strict=True):
        error = _relative(mean - true, true)
        yield MeanError(case.name, name, error, None, error <= TOLERANCE)


def _check_callable(subject: Callable[..., Any], draws: int, seed: int) -> UnbiasedReport:
    tallies: list[_Tally] = []
    with random_state_kept():
        torch.manual_seed(seed)
        for case in cases():
            drawn = (
                _gradients(subject(Vjp(case.G, case.W, case.X)), case.W, case.X)
                for _ in range(draws)
            )
            tallies += _tallied(case.name, GRADIENTS, case.truth, drawn)
    return _monte_carlo_report(repr(subject), tallies, draws)


def _check_model(
    model: nn.Module, loss_fn: Loss | None, batch: Any, draws: int, seed: int
) -> UnbiasedReport:
    if loss_fn is None:
        raise TypeError(
            "a model needs its loss and a batch: check_unbiased(model, loss_fn, batch) with "
            "loss_fn(model, batch) a scalar"
        )
    with restored(model) as buffers:
        gradients = Gradients(model, loss_fn, buffers, seed)
        with gradients.switch.installed():
            exact = gradients.exact(batch)
            drawn = (gradients.sketched(batch, draw) for draw in range(draws))
            tallies = _tallied("model", gradients.names, exact, drawn)
    return _monte_carlo_report(type(model).__name__, tallies, draws)


class _Tally:
    """Running mean of a gradient, and of its error along a few fixed directions."""

    DIRECTIONS = 8

    def __init__(self, case: str, gradient: str, truth: Tensor) -> None:
        self.case, self.gradient = case, gradient
        self.truth = truth.detach().double()
        self.size = float(self.truth.norm())
        self.rounding = 16 * torch.finfo(truth.dtype).eps * self.size
        signs = torch.randint(0, 2, (self.DIRECTIONS, truth.numel()), dtype=torch.bool)
        signs = signs.to(truth.device).double() * 2 - 1
        signs[0] = self.truth.flatten()
        self.directions = signs / signs.norm(dim=1, keepdim=True).clamp(min=1e-300)
        self.error = torch.zeros_like(self.truth)
        self.along: list[Tensor] = []

    def add(self, estimate: Tensor) -> None:
        error = estimate.detach().double() - self.truth
        self.error += error
        self.along.append(self.directions @ error.flatten())

    def entry(self, rounding: float, limit: float) -> MeanError:
        """The relative error of the mean, and the largest |z|.

        Below ``rounding`` there is no deviation to speak of: a bias before a BatchNorm has a
        gradient of zero, and of what rounding leaves of it no mean can be judged.
        """
        along = torch.stack(self.along)
        mean, spread = along.mean(0).abs(), along.std(0) / len(self.along) ** 0.5
        noise = max(1e-6 * self.size, rounding)
        z = float(torch.where(mean <= noise, 0.0, mean / spread).max())
        error = _relative(self.error / len(self.along), self.truth)
        return MeanError(self.case, self.gradient, error, z, z <= limit)


def _tallied(
    case: str, names: Sequence[str], truth: Sequence[Tensor], drawn: Iterable[Sequence[Tensor]]
) -> list[_Tally]:
    tallies = [_Tally(case, name, true) for name, true in zip(names, truth, strict=True)]
    for estimates in drawn:
        for tally, estimate in zip(tallies, estimates, strict=True):
            tally.add(estimate)
    return tallies


def _monte_carlo_report(subject: str, tallies: Sequence[_Tally], draws: int) -> UnbiasedReport:
    limit = NormalDist().inv_cdf(1 - 0.5e-6 / (_Tally.DIRECTIONS * len(tallies)))
    entries = tuple(
        tally.entry(max(1e-12, *(t.rounding for t in tallies if t.case == tally.case)), limit)
        for tally in tallies
    )
    return UnbiasedReport(subject, f"Monte Carlo, {draws} draws", limit, entries)


def _relative(error: Tensor, truth: Tensor) -> float:
    size = float(truth.norm())
    return float(error.norm()) / size if size else float(error.norm())
