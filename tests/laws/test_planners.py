"""Planners: atoms from a share of the rows, atoms of earlier steps; and accumulation in place."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sketchprop as sp
from law_table import exact_gradients, fixed
from sketchprop.core.cost import Size
from sketchprop.core.enumeration import expectation
from sketchprop.core.vjp import Vjp
from sketchprop.meters.unbiased import expected_gradients
from sketchprop.sketches import Every, ForwardRows
from sketchprop.sketches.planners import STALE_FLOOR

KINDS = [sp.ColumnMask, sp.L1, sp.L2, sp.Variance, sp.Diagonal, sp.GradientSVD, sp.RankConstrained]
ROWS = [sp.Rows(0.5), sp.SampleMask(0.5), ForwardRows(0.5), sp.ElementMask(0.5)]


def layer(B=12, n=8, d=6):
    return (torch.randn(*s, dtype=torch.float64) for s in ((B, n), (n, d), (B, d)))


def assert_unbiased(sketch, G, W, X, planner=None):
    means = expected_gradients(sketch, G, W, X, planner)
    for mean, true in zip(means, exact_gradients(G, W, X), strict=True):
        torch.testing.assert_close(mean, true, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_atoms_of_another_gradient_are_unbiased_for_this_one(kind):
    """The mean over the draw, exactly, with the atoms of a G that shares nothing with this one."""
    sketch, planner = kind(0.4), Every(1000)
    old, W, X = layer()
    old[:, :5] = 0  # what was zero then is not zero now
    G, _, _ = layer(B=9)
    X = X[:9]
    planner.atoms(sketch, Vjp(old, W, X))
    assert_unbiased(sketch, G, W, X, planner)


@pytest.mark.parametrize("kind", KINDS)
def test_the_floor_lies_under_every_atom(kind):
    G, W, _ = layer()
    G[:, 3:] = 0
    p = Every(1, rows=4).atoms(kind(0.5), Vjp(G, W)).probabilities
    assert p.min() >= STALE_FLOOR * 0.5 - 1e-12
    assert float(p.sum()) == pytest.approx(4.0)
    assert p.max() <= 1


def test_only_some_of_the_rows_are_looked_at():
    G, W, _ = layer(B=16)

    def probabilities(G, rows=4):
        return Every(1, rows=rows).atoms(sp.L1(0.5), Vjp(G, W)).probabilities

    changed = G.clone()
    changed[[1, 2, 3, 5, 6, 7]] *= 100
    assert torch.equal(probabilities(G), probabilities(changed))
    changed[4] *= 100
    assert not torch.equal(probabilities(G), probabilities(changed))
    assert torch.equal(probabilities(G, rows=0.25), probabilities(G))


class Count:
    """How often a kind of sketch makes lasting atoms."""

    def __init__(self, kind, monkeypatch):
        self.made = 0
        original = kind.lasting_atoms

        def counted(sketch, vjp):
            self.made += 1
            return original(sketch, vjp)

        monkeypatch.setattr(kind, "lasting_atoms", counted)


@pytest.mark.parametrize("kind", [sp.L1, sp.GradientSVD, sp.RankConstrained])
def test_a_layer_makes_atoms_every_k_steps(kind, monkeypatch):
    count = Count(kind, monkeypatch)
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 3))
    sp.sketch_(model, kind(0.5), planner=Every(4))
    for step in range(9):
        model(torch.randn(10, 6)).sum().backward()
        assert count.made == 1 + step // 4
    model(torch.randn(17, 6)).sum().backward()  # another batch size fits the same atoms
    assert count.made == 3
    other = copy.deepcopy(model)
    assert other[0].sketching.planner is not model[0].sketching.planner
    sp.sketch_(model, kind(0.25), planner=Every(4))  # another sketch needs other atoms
    model(torch.randn(10, 6)).sum().backward()
    assert count.made == 4
    assert set(model.state_dict()) == {"0.weight", "0.bias", "1.weight", "1.bias"}


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(("kernel", "padding"), [(1, 0), (3, 1)])
def test_a_convolution_makes_atoms_every_k_steps(kernel, padding, memory, monkeypatch):
    count = Count(sp.L1, monkeypatch)
    model = nn.Sequential(nn.Conv2d(3, 8, kernel, padding=padding), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(5, 3, 4, 4).to(memory_format=memory)
    model(x)
    sp.sketch_(model, sp.L1(0.5), planner=Every(4))
    for step in range(9):
        model(x).square().sum().backward()
        assert count.made == 1 + step // 4


def test_each_projection_of_attention_has_its_own_planner(monkeypatch):
    count = Count(sp.L1, monkeypatch)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    sp.sketch_(attention, sp.L1(0.5), planner=Every(4))
    x, memory = torch.randn(3, 5, 8), torch.randn(3, 4, 8)
    for step in range(9):
        attention(x, x, x)[0].square().sum().backward()
        assert count.made == 2 * (1 + step // 4)  # q, k and v together, and the output
    count.made = 0
    sp.sketch_(attention, sp.L1(0.5), planner=Every(4))
    attention(x, memory, memory)[0].square().sum().backward()
    assert count.made == 3
    planners = [attention.sketching.planner_of(part) for part in range(3)]
    assert len({id(planner) for planner in planners}) == 3


@pytest.mark.parametrize("planner", [Every(1, rows=0.5), Every(4)], ids=str)
@pytest.mark.parametrize("sketch", ROWS, ids=repr)
def test_rows_are_refused_with_a_reason(sketch, planner):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="draws from the rows of one gradient"):
        sp.sketch_(model, sketch, planner=planner)
    assert type(model[0]) is nn.Linear


def test_a_pair_plans_the_side_that_can_be():
    G, W, X = layer()
    pair = sp.Split(input=sp.L1(0.5), weight=ForwardRows(0.5))
    x, w = X.requires_grad_(), W.requires_grad_()

    def run(uniforms):
        planner = Every(9)
        for grad, source in ((G.flip(1), fixed(0.5)), (G, uniforms)):
            y = sp.sketched_linear(x, w, None, pair, planner=planner, uniforms=source)
            got = torch.autograd.grad(y, (x, w), grad)
        return got

    for mean, true in zip(expectation(run), (G @ W, G.mT @ X), strict=True):
        torch.testing.assert_close(mean, true.detach(), rtol=0, atol=1e-10)


def test_the_cost_of_atoms_is_spread_over_the_steps():
    size = Size(1000, 64, 32)
    sketch = sp.GradientSVD(0.1)
    lasting = sketch.cost(size, lasting=True)
    spread = Every(50).cost(sketch, size)
    assert spread.scoring == pytest.approx(lasting.scoring / 50)
    assert spread.scoring_products == pytest.approx(lasting.scoring_products / 50)
    assert spread.products == lasting.products
    tenth = Every(1, rows=0.1).cost(sp.L1(0.1), size)
    assert tenth.scoring == pytest.approx(sp.L1(0.1).cost(size).scoring / 10)
    model = sp.sketch_(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 2)), sketch)
    alone = model[0].sketching.cost(size)
    sp.sketch_(model, sketch, planner=Every(50))
    assert model[0].sketching.cost(size).total < alone.total


def test_a_non_finite_step_is_seen_and_does_not_poison_the_next():
    for kind in KINDS:
        planner, sketch = Every(10), kind(0.5)
        W = torch.randn(8, 6, requires_grad=True)
        for step, bad in enumerate((float("nan"), None, float("inf"), None)):
            x = torch.randn(12, 6)
            y = sp.sketched_linear(x, W, None, sketch, planner=planner)
            G = torch.randn(12, 8)
            if bad is not None:
                G[3, step] = bad
            (grad,) = torch.autograd.grad(y, W, G)
            assert bool(grad.isfinite().all()) == (bad is None), (kind, step)


def test_compiled_steps_make_their_own_atoms():
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 3))
    sp.sketch_(model, sp.L1(0.5), planner=Every(4))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(10, 6)).sum().backward()
    assert model[0].weight.grad.isfinite().all()
    assert not model[0].sketching.planner._known


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Every(1, rows=0), "rows=0"),
        (lambda: Every(1, rows=1.5), "share of the rows in"),
        (lambda: Every(4, rows=float("nan")), "rows=nan"),
        (lambda: Every(0), "at least 1"),
        (lambda: Every(2.5), "an integer"),
    ],
)
def test_bad_options_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_the_eigen_solver_may_fail(monkeypatch):
    """Then the coordinate axes serve: unbiased all the same."""

    def fails(*args):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    G, W, X = layer()
    for sketch, planner in [
        (sp.GradientSVD(0.4), None),
        (sp.RankConstrained(0.4), None),
        (sp.GradientSVD(0.4), Every(1, rows=3)),
    ]:
        assert_unbiased(sketch, G, W, X, planner)


def test_degenerate_spectra_are_no_problem():
    G, _, X = layer()
    Q, _ = torch.linalg.qr(G)
    for G in (Q, Q[:, :1].expand(12, 8).clone()):
        for sketch in (sp.GradientSVD(0.3), sp.RankConstrained(0.3)):
            assert_unbiased(sketch, G, torch.eye(8, 6, dtype=torch.float64), X)


def test_a_small_column_beside_large_ones_keeps_a_probability():
    G = torch.randn(64, 8) * 1e-6
    G[:, 0] *= 1e-6
    for sketch in (sp.Variance(0.5), sp.Variance(0.5, root=True), sp.L1(0.5), sp.L2(0.5)):
        assert sketch.atoms(Vjp(G)).probabilities[0] > 0
