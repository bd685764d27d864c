"""A sketch, a layer and a planner of your own, each in at most 15 lines, and each unbiased."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sketchprop as sp
from sketchprop.meters.unbiased import cases, expected_gradients

# --- what a user writes ---


@dataclass(frozen=True, repr=False)
class LargestEntry(sp.ColumnSketch):
    """p ∝ the largest entry of each column."""

    def importance(self, vjp):
        return vjp.G.abs().amax(-2).square()


class Normalised(nn.Linear):
    def forward(self, x):
        return F.linear(x, F.normalize(self.weight), self.bias)


@sp.sketchable(Normalised)
class SketchedNormalised(sp.SketchedModule, Normalised):
    def forward(self, x):
        if not self.is_sketching():
            return super().forward(x)
        state = self.sketching
        weight = F.normalize(self.weight)
        return sp.sketched_linear(x, weight, self.bias, state.sketch, planner=state.planner)


class Tempered(sp.Planner):
    """Halfway between the sketch's own probabilities and equal ones."""

    def atoms(self, sketch, vjp):
        atoms = sketch.atoms(vjp)
        p = atoms.probabilities
        return replace(atoms, probabilities=(p + atoms.rank / p.shape[-1]) / 2)


# --- and what is then true ---


@pytest.mark.parametrize("budget", [1, 0.3, 1.0])
@pytest.mark.parametrize("sampling", ["fixed", "independent"])
def test_the_sketch_is_unbiased_exactly(budget, sampling):
    report = sp.check_unbiased(LargestEntry(budget, sampling=sampling))
    assert report.ok, str(report)


@pytest.mark.parametrize("sketch", [LargestEntry(0.4), sp.L1(0.4), sp.Rows(0.4)], ids=repr)
def test_the_planner_is_unbiased_exactly(sketch):
    for case in cases():
        means = expected_gradients(sketch, case.G, case.W, case.X, Tempered())
        truth = (case.G @ case.W, case.G.mT @ case.X, case.G.sum(0))
        for mean, true in zip(means, truth, strict=True):
            torch.testing.assert_close(mean, true, rtol=0, atol=1e-10 * max(1, float(true.norm())))


@pytest.mark.parametrize("planner", [None, Tempered(), sp.Every(3)], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("sketch", [LargestEntry(0.4), sp.Diagonal(0.4)], ids=repr)
def test_the_layer_is_unbiased_with_any_of_them(sketch, planner):
    model = nn.Sequential(Normalised(6, 8), nn.Tanh(), Normalised(8, 5), nn.Linear(5, 2)).double()
    sp.sketch_(model, sketch, planner=planner)
    assert type(model[0]) is SketchedNormalised
    x = torch.randn(10, 6).double()
    report = sp.check_unbiased(model, lambda m, x: m(x).square().mean(), x, draws=300)
    assert report.ok, str(report)
    sp.unsketch_(model)
    assert type(model[0]) is Normalised
