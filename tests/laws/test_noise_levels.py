"""Noise does not creep: V/σ² of every method on three small problems is what it was.

``STORE_NOISE=1 python -m pytest -n 0 tests/laws/test_noise_levels.py`` writes the stored values
anew; a change of more than a tenth belongs into the changelog.

V is a mean over draws whose uniforms are stratified (a Latin hypercube: the k-th pass takes a
number from the k-th of so many strata, in an order of its own for each draw), so that another
order of draws moves it by little. σ² is exact: over all samples of the problem, one by one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sketchprop as sp
from law_table import METHODS
from sketchprop.layers.choose import refusal, units
from sketchprop.layers.select import blocks_of
from sketchprop.sketches import ForwardRows
from sketchprop.zoo import ViT

STORED = Path(__file__).with_name("noise_levels.json")
TOLERANCE = 0.1
PASSES = 100
MORE, MOST = 600, 2500
"""Passes for methods whose V sits in few draws, where another order of draws moved the mean of
fewer by more than a tenth; the most for samples drawn anew, and uniformly, in each layer."""
SAMPLES, BATCH = 32, 8


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 1), nn.GELU(),
        nn.Conv2d(12, 8, 3, stride=2), nn.Flatten(), nn.Linear(72, 4),
    )  # fmt: skip


def transformer() -> nn.Module:
    return ViT(8, 2, 1, 12, depth=1, heads=2, hidden=20, classes=4)


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (12,)),
    "convolutions": (convolutions, (1, 8, 8)),
    "transformer": (transformer, (1, 8, 8)),
}
SKETCHES: dict[str, Any] = {
    **{repr(method(0.3)): method(0.3) for method in METHODS},
    **{
        repr(s): s
        for s in (
            sp.L1(0.3, sampling="independent"),
            sp.Rows(0.3, by="gradient_input"),
            sp.Rows(0.3, by="uniform"),
            sp.Rows(0.3, unit="sample"),
            sp.Split(input=sp.L1(0.3), weight=ForwardRows(0.3)),
            sp.Tokens(0.3),
            sp.Tokens(0.3, queries=0.3, keys=0.3, save="input"),
        )
    },
}
RESTLESS = {
    **{f"{name}(0.3)": MORE for name in ("ColumnMask", "ElementMask", "Variance")},
    "RankConstrained(0.3)": MORE,
    "L1(0.3, sampling='independent')": MORE,
    "Rows(0.3, by='uniform')": MORE,
    "Tokens(0.3, queries=0.3, keys=0.3, save='input')": MORE,
    "SampleMask(0.3)": MOST,
}


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model at its start with made-up data: classes are shifted means, samples differ in size."""
    build, shape = PROBLEMS[name]
    torch.manual_seed(0)
    labels = torch.arange(SAMPLES) % 4
    x = torch.randn(SAMPLES, *shape) * torch.rand(SAMPLES, *[1] * len(shape)).mul(2)
    x = x + torch.randn(4, *shape)[labels]
    return build(), x, labels


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def sigma2(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The variance of a minibatch's gradient, over all samples of the problem."""
    each = torch.stack(
        [
            gradient(model, F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]))
            for i in range(SAMPLES)
        ]
    )
    return float(each.var(0).sum()) / BATCH


class Strata:
    """In place of ``torch.rand``: which the library calls for draws alone."""

    def __init__(self, seed: int, passes: int) -> None:
        self.passes = passes
        self.orders: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self.generator = torch.Generator().manual_seed(seed)
        self.pass_number = self.draw_number = 0

    def start(self, pass_number: int) -> None:
        self.pass_number, self.draw_number = pass_number, 0

    def __call__(self, shape: tuple[int, ...], **options: Any) -> Tensor:
        key = (self.draw_number, tuple(shape))
        self.draw_number += 1
        if key not in self.orders:
            noise = torch.empty(self.passes, *shape).uniform_(generator=self.generator)
            self.orders[key] = noise.argsort(0)
        place = self.orders[key][self.pass_number].to(torch.float64)
        return ((place + 0.5) / self.passes).to(**options)


def variance(
    model: nn.Module, loss: Callable[[], Tensor], truth: Tensor, strata: Strata, patch: Any
) -> float:
    total = 0.0
    patch.setattr(torch, "rand", strata)
    for number in range(strata.passes):
        strata.start(number)
        total += float((gradient(model, loss()) - truth).square().sum())
    assert strata.orders
    return total / strata.passes


def takes(model: nn.Module, sketch: Any) -> bool:
    if isinstance(sketch, sp.Tokens):
        return bool(blocks_of(model))
    layers, _ = units(model, sketch)
    return all(not refusal(layer, sketch) for layer in layers.values())


def level(name: str, method: str, patch: pytest.MonkeyPatch, seed: int = 0) -> float:
    """V/σ² of a method."""
    model, x, y = problem(name)
    noise, batch = sigma2(model, x, y), (x[:BATCH], y[:BATCH])
    truth = gradient(model, F.cross_entropy(model(batch[0]), batch[1]))
    sp.sketch_(model, SKETCHES[method])
    loss = lambda: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    strata = Strata(seed, RESTLESS.get(method, PASSES))
    return variance(model, loss, truth, strata, patch) / noise


LEVELS = [
    (name, method)
    for name in PROBLEMS
    for method in SKETCHES
    if takes(problem(name)[0], SKETCHES[method])
    and (name == "mlp" or method not in RESTLESS or method.startswith("Tokens"))
]
"""What needs many passes is watched on the smallest problem that takes it."""


@pytest.mark.parametrize("name", PROBLEMS)
def test_noise_is_what_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    found = {}
    for problem_name, method in LEVELS:
        if problem_name == name:
            with monkeypatch.context() as patch:
                found[method] = level(name, method, patch)
    if os.environ.get("STORE_NOISE"):
        stored[name] = {method: float(f"{value:.4g}") for method, value in found.items()}
        STORED.write_text(json.dumps(stored, indent=1) + "\n")
    assert found.keys() == stored[name].keys()
    changed = {
        method: (was, found[method])
        for method, was in stored[name].items()
        if abs(found[method] / was - 1) > TOLERANCE
    }
    assert not changed, "V/σ² as stored and as found"


def test_every_method_is_watched() -> None:
    watched = {method for _, method in LEVELS}
    assert {repr(method(0.3)) for method in METHODS} <= watched
    assert {"Tokens(0.3)", *RESTLESS} <= watched


def test_another_order_of_draws_moves_a_level_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tenth is a change of the method and not of its luck."""
    stored = json.loads(STORED.read_text())["mlp"]
    for method in ("L1(0.3)", "Rows(0.3)", "GradientSVD(0.3)"):
        with monkeypatch.context() as patch:
            assert level("mlp", method, patch, seed=1) == pytest.approx(stored[method], rel=0.06)
