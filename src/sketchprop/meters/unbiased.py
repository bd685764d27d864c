"""Is it unbiased? A proof where the draw is a known function of uniforms, statistics elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from ..core.enumeration import expectation
from ..core.random import random_state_kept
from ..core.sampling import Uniforms
from ..core.table import Column, Table, words
from ..core.vjp import Vjp
from ..sketches import AnySketch, Planner, Sketch, Split, Tokens
from .noise.passes import Gradients, Loss
from .restore import restored

TOLERANCE = 1e-10
"""Largest relative error of an exact mean in float64."""


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
class UnbiasedReport:
    """The answer of ``check_unbiased``: printable, ``.ok``, ``.as_dict()``."""

    subject: str
    method: str
    limit: float
    entries: tuple[MeanError, ...]

    @property
    def ok(self) -> bool:
        return all(entry.ok for entry in self.entries)

    @property
    def biased(self) -> tuple[MeanError, ...]:
        return tuple(entry for entry in self.entries if not entry.ok)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}

    def headline(self) -> str:
        """The verdict, how it was reached, and the limit."""
        monte_carlo = any(e.z is not None for e in self.entries)
        limit = f"|z| ≤ {self.limit:.1f}" if monte_carlo else f"error ≤ {self.limit:.0e}"
        count = f"BIASED in {len(self.biased)} of {len(self.entries)}"
        return f"{self.subject}: {'unbiased' if self.ok else count} ({self.method}; {limit})"

    def tables(self) -> list[Table]:
        """A row for each case and gradient."""
        return [_entry_table(self.entries)]

    def biased_tables(self) -> list[Table]:
        """The rows that are biased alone."""
        return [_entry_table(self.biased)]

    def __str__(self) -> str:
        """The verdict, and the rows that are biased; ``tables()`` has all rows."""
        return "\n\n".join([self.headline(), *(str(t) for t in self.biased_tables() if t.rows)])


def _entry_table(entries: Sequence[MeanError]) -> Table:
    columns = (
        *(words("case"), words("gradient"), Column("error of the mean", ".1e")),
        *(Column("z", ".1f"), words("")),
    )
    rows = [(e.case, e.gradient, e.error, e.z, "ok" if e.ok else "BIASED") for e in entries]
    return Table("", columns, rows)


@dataclass(frozen=True)
class Case:
    """A layer: ``X: [B, d]``, ``W: [n, d]`` and the gradient ``G: [B, n]`` of its output."""

    name: str
    G: Tensor
    W: Tensor
    X: Tensor


def cases(dtype: torch.dtype = torch.float64) -> tuple[Case, ...]:
    """Layers on which an estimator may fail: shapes and degenerate contents."""
    generator = torch.Generator().manual_seed(0)

    def case(name: str, B: int, n: int, d: int) -> Case:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=dtype, generator=generator)

        return Case(name, normal(B, n), normal(n, d), normal(B, d))

    shapes = [
        case("contracting, B > n", 12, 6, 9),
        case("expanding (n > d)", 12, 10, 4),
        case("expanding, B < n", 5, 12, 3),
        case("B < n", 4, 9, 11),
        case("one row", 1, 8, 5),
        case("one column", 7, 1, 5),
        case("one input", 7, 6, 1),
        case("one of each", 1, 1, 1),
    ]
    zero_rows = case("zero rows of W", 8, 7, 6)
    zero_rows.W[[1, 4]] = 0
    zero_weight = case("W = 0", 8, 7, 6)
    zero_weight.W.zero_()
    zero_columns = case("zero columns of G", 8, 7, 6)
    zero_columns.G[:, [0, 3]] = 0
    nearly_empty = case("one non-zero column of G", 8, 7, 6)
    nearly_empty.G[:, 1:] = 0
    constant_columns = case("constant columns of G", 8, 7, 6)
    constant_columns.G[:, 0] = 2.0
    constant_columns.G[:, 5] = -0.5
    zero_gradient = case("G = 0", 8, 7, 6)
    zero_gradient.G.zero_()
    sums_to_zero = case("rows of G sum to zero", 9, 6, 8)
    sums_to_zero.G.sub_(sums_to_zero.G.mean(-1, keepdim=True))
    heavy = case("one heavy atom", 10, 8, 6)
    heavy.G[2] *= 1e3
    heavy.G[:, 3] *= 1e3
    return (
        *shapes,
        zero_rows,
        zero_weight,
        zero_columns,
        nearly_empty,
        constant_columns,
        zero_gradient,
        sums_to_zero,
        heavy,
    )


def expected_gradients(
    sketch: AnySketch, G: Tensor, W: Tensor, X: Tensor, planner: Planner | None = None
) -> tuple[Tensor, ...]:
    """E[dX], E[dW], E[db] over the draw of ``sketch``, as a finite sum: exact to rounding.

    The sum runs over every draw, and every draw that depends on another: see
    ``core.enumeration``.
    """
    vjp = Vjp(G, W, X)

    def gradients(uniforms: Uniforms) -> tuple[Tensor, ...]:
        if planner is None or not isinstance(sketch, Sketch):
            compact = sketch(vjp, uniforms)
        else:
            compact = planner.atoms(sketch, vjp).draw(vjp, uniforms)
        return compact.input_grad(W), compact.weight_grad(X), compact.bias_grad()

    return expectation(gradients)


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
    standard errors; the limit allows one false alarm in a million checks, as long as every atom
    is drawn often: atoms of probability p need many times 1/p ``draws``. ``seed`` is theirs.

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
    if isinstance(subject, Sketch | Split | Tokens) and draws is None:
        entries = tuple(e for c in cases() for e in _exact_entries(subject, c, planner))
        return UnbiasedReport(repr(subject), "exact mean over the draw", TOLERANCE, entries)
    if not callable(subject):
        raise TypeError(
            f"{subject!r} is neither a sketch nor a model; give for example Rows(0.3), a callable "
            "Vjp -> CompactGradient, or a sketched model and its loss"
        )
    return _check_callable(subject, draws or 2000, seed)


def _exact_entries(sketch: AnySketch, case: Case, planner: Planner | None) -> Iterator[MeanError]:
    own = None if planner is None else planner.anew()
    means = expected_gradients(sketch, case.G, case.W, case.X, own)
    truth = (case.G @ case.W, case.G.mT @ case.X, case.G.sum(0))
    for name, mean, true in zip(("dX", "dW", "db"), means, truth, strict=True):
        error = _relative(mean - true, true)
        yield MeanError(case.name, name, error, None, error <= TOLERANCE)


def _check_callable(subject: Callable[..., Any], draws: int, seed: int) -> UnbiasedReport:
    tallies: list[tuple[str, str, _Tally]] = []
    with random_state_kept():
        torch.manual_seed(seed)
        for case in cases():
            G, W, X = case.G, case.W, case.X
            truth = (G @ W, G.mT @ X, G.sum(0))
            batch = [
                (case.name, name, _Tally(t))
                for name, t in zip(("dX", "dW", "db"), truth, strict=True)
            ]
            for _ in range(draws):
                compact = subject(Vjp(G, W, X))
                parts = (compact.input_grad(W), compact.weight_grad(X), compact.bias_grad())
                for (_, _, tally), part in zip(batch, parts, strict=True):
                    tally.add(part)
            tallies += batch
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
            tallies = [("model", n, _Tally(g)) for n, g in zip(gradients.names, exact, strict=True)]
            for draw in range(draws):
                for (_, _, tally), grad in zip(
                    tallies, gradients.sketched(batch, draw), strict=True
                ):
                    tally.add(grad)
    return _monte_carlo_report(type(model).__name__, tallies, draws)


class _Tally:
    """Running mean of a gradient, and of its error along a few fixed directions."""

    DIRECTIONS = 8

    def __init__(self, truth: Tensor) -> None:
        self.eps = torch.finfo(truth.dtype).eps
        self.truth = truth.detach().double()
        signs = torch.randint(0, 2, (self.DIRECTIONS, truth.numel()), dtype=torch.bool)
        signs = signs.to(truth.device).double() * 2 - 1
        signs[0] = self.truth.flatten()
        self.directions = signs / signs.norm(dim=1, keepdim=True).clamp(min=1e-300)
        self.sum = torch.zeros_like(self.truth)
        self.along: list[Tensor] = []

    def add(self, estimate: Tensor) -> None:
        estimate = estimate.detach().double()
        self.sum += estimate
        self.along.append(self.directions @ (estimate - self.truth).flatten())

    def result(self, rounding: float) -> tuple[float, float]:
        """The relative error of the mean, and the largest |z|.

        Below ``rounding`` there is no deviation to speak of: a bias before a BatchNorm has a
        gradient of zero, and of what rounding leaves of it no mean can be judged.
        """
        along = torch.stack(self.along)
        mean, spread = along.mean(0).abs(), along.std(0) / len(self.along) ** 0.5
        noise = max(1e-6 * float(self.truth.norm()), rounding)
        z = torch.where(mean <= noise, 0.0, mean / spread)
        return _relative(self.sum / len(self.along) - self.truth, self.truth), float(z.max())


def _monte_carlo_report(
    subject: str, tallies: list[tuple[str, str, _Tally]], draws: int
) -> UnbiasedReport:
    limit = NormalDist().inv_cdf(1 - 0.5e-6 / (_Tally.DIRECTIONS * len(tallies)))
    largest: dict[str, float] = {}
    for case, _, tally in tallies:
        rounding = 16 * tally.eps * float(tally.truth.norm())
        largest[case] = max(rounding, largest.get(case, 1e-12))
    entries = []
    for case, name, tally in tallies:
        error, z = tally.result(largest[case])
        entries.append(MeanError(case, name, error, z, z <= limit))
    return UnbiasedReport(subject, f"Monte Carlo, {draws} draws", limit, tuple(entries))


def _relative(error: Tensor, truth: Tensor) -> float:
    size = float(truth.norm())
    return float(error.norm()) / size if size else float(error.norm())
