"""check_unbiased finds biased estimators biased, and leaves everything as it was."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import sketchprop as sp
from law_table import CASES, SKETCHES, layer
from sketchprop.core.compact import ColumnAtoms, KeptColumns
from sketchprop.meters.unbiased import expected_gradients
from sketchprop.sketches import ColumnSketch, ForwardRows, RowSketch


@dataclass(frozen=True, repr=False)
class LInf(ColumnSketch):
    """A user's own method, as the docstring of ColumnSketch shows it."""

    def importance(self, vjp):
        return vjp.G.abs().amax(-2).square()


@dataclass(frozen=True, repr=False)
class RowNorm(RowSketch):
    def importance(self, vjp):
        return vjp.G.square().sum(-1)


class LargestAtoms(ColumnAtoms):
    """meProp: the largest columns, unscaled. Deterministic and biased."""

    def draw(self, vjp, uniforms):
        index = vjp.G.abs().sum(-2).topk(int(self.rank)).indices.sort().values
        return KeptColumns(index, vjp.G[:, index], vjp.G.shape[-1])


@dataclass(frozen=True, repr=False)
class TopK(sp.L1):
    def atoms(self, vjp):
        right = super().atoms(vjp)
        return LargestAtoms(right.probabilities, right.rank, right.sampling)


class UnscaledAtoms(ColumnAtoms):
    def keep(self, vjp, index, scale):
        return super().keep(vjp, index, torch.ones_like(scale))


@dataclass(frozen=True, repr=False)
class Unscaled(sp.L1):
    """Forgets 1/p."""

    def atoms(self, vjp):
        right = super().atoms(vjp)
        return UnscaledAtoms(right.probabilities, right.rank, right.sampling)


@pytest.mark.parametrize("sampling", ["fixed", "independent"])
@pytest.mark.parametrize("method", [LInf, RowNorm])
def test_a_users_own_method_is_unbiased(method, sampling):
    report = sp.check_unbiased(method(0.3, sampling=sampling))
    assert report.ok, str(report)
    assert report.subject.startswith(method.__name__ + "(0.3")


@pytest.mark.parametrize("method", [TopK, Unscaled])
@pytest.mark.parametrize("draws", [None, 300])
def test_a_biased_method_is_found(method, draws):
    report = sp.check_unbiased(method(2), draws=draws)
    assert not report.ok
    found = {(e.case, e.gradient) for e in report.biased}
    for gradient in ("dX", "dW", "db"):
        assert ("contracting, B > n", gradient) in found
    # Where the kept columns are all there is, even these are exact.
    assert not {case for case, _ in found} & {"G = 0", "one column", "one of each"}
    assert "BIASED" in str(report)


WITHOUT_PLANNER = [variant for variant in SKETCHES if variant.planner is None]


@pytest.mark.parametrize("variant", WITHOUT_PLANNER, ids=str)
def test_monte_carlo_of_built_in_sketches(variant):
    # |z| below a limit of about six standard errors; the seed is fixed besides.
    report = sp.check_unbiased(variant(0.5), draws=250)
    assert report.ok, str(report)
    assert "250 draws" in report.method
    assert 5 < report.limit < 8
    assert all(e.z is not None for e in report.entries)


def test_a_callable():
    def half_of_the_columns(vjp):
        return sp.ColumnMask(0.5)(vjp)

    report = sp.check_unbiased(half_of_the_columns, draws=200)
    assert report.ok, str(report)
    assert "half_of_the_columns" in report.subject

    def shrunk(vjp):
        kept = sp.ColumnMask(0.5)(vjp)
        return KeptColumns(kept.index, 0.5 * kept.values, kept.n)

    assert not sp.check_unbiased(shrunk, draws=200).ok


def test_the_same_seed_gives_the_same_report():
    first, again, other = (sp.check_unbiased(sp.L1(2), draws=20, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_the_random_state_is_restored_after_sketches_and_callables():
    state = torch.get_rng_state()
    sp.check_unbiased(sp.L1(2))
    sp.check_unbiased(sp.L1(2), draws=5)
    assert torch.equal(torch.get_rng_state(), state)


# --- models ---


def square_sum(model, x):
    return model(x).square().sum()


def noisy_model():
    return nn.Sequential(
        nn.Linear(5, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Dropout(0.4),
        nn.Linear(8, 6),
        nn.Tanh(),
        nn.Linear(6, 2),
    )


@pytest.mark.parametrize(
    "sketch", [sp.L1(0.5), sp.GradientSVD(0.5), sp.SampleMask(0.5), ForwardRows(0.4)], ids=str
)
def test_a_model_with_dropout_and_batch_norm(sketch):
    model = sp.sketch_(noisy_model(), sketch)
    x, y = torch.randn(12, 5), torch.randn(12, 2)
    # The bias before the BatchNorm has a gradient of zero: no rounding may be taken for bias.
    report = sp.check_unbiased(
        model, lambda m, b: (m(b[0]) - b[1]).square().mean(), (x, y), draws=300
    )
    assert report.ok, str(report)
    assert [e.gradient for e in report.entries] == [n for n, _ in model.named_parameters()]
    assert report.subject == "Sequential"


def test_a_biased_sketch_in_a_model_is_found():
    model = sp.sketch_(nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 2)), TopK(2))
    x = torch.randn(12, 5)
    report = sp.check_unbiased(model, square_sum, x, draws=50)
    assert {e.gradient for e in report.biased} == {"0.weight"}  # the bias is exact by default
    paper = sp.sketch_(nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 2)), TopK(2, exact_bias=False))
    report = sp.check_unbiased(paper, square_sum, x, draws=50)
    assert {e.gradient for e in report.biased} == {"0.weight", "0.bias"}


def test_frozen_and_unused_parameters():
    model = sp.sketch_(noisy_model(), sp.L1(0.5))
    model[0].weight.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    x = torch.randn(12, 5)
    report = sp.check_unbiased(model, square_sum, x, draws=50)
    assert report.ok, str(report)
    names = {e.gradient for e in report.entries}
    assert "unused" in names
    assert "0.weight" not in names


# --- the report ---


def test_report_text_of_a_biased_sketch():
    report = sp.check_unbiased(sp.Diagonal(1, paper=True))
    text = str(report)
    assert f"BIASED in 2 of {3 * len(CASES)}" in text.splitlines()[0]
    assert sum(line.endswith("BIASED") for line in text.splitlines()) == 2
    assert len(text.splitlines()) == 1 + 1 + 2 + 2  # verdict, space, head of the table, two rows
    data = report.as_dict()
    assert (data["ok"], data["subject"]) == (False, "Diagonal(1, paper=True)")
    assert len(data["entries"]) == len(report.entries)
    assert set(data["entries"][0]) == {"case", "gradient", "error", "z", "ok"}


# --- expected_gradients ---


def test_nan_probabilities_are_an_error():
    @dataclass(frozen=True, repr=False)
    class Negative(ColumnSketch):
        def importance(self, vjp):
            return -torch.ones(vjp.G.shape[-1], dtype=vjp.G.dtype)

    G, W, X = layer(4, 5, 3)
    with pytest.raises(ValueError, match="NaN probabilities"):
        expected_gradients(Negative(2), G, W, X)
