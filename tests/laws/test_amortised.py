"""Plans from a share of the rows, plans of earlier steps, and accumulation in place."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sketchprop as sp
from sketchprop.meters.unbiased import expected_gradients
from sketchprop.sketches import PlanMemory
from sketchprop.sketches.amortised import STALE_FLOOR

KINDS = [sp.ColumnMask, sp.L1, sp.L2, sp.Variance, sp.Diagonal, sp.GradientSVD, sp.RankConstrained]


def layer(B=12, n=8, d=6):
    return (torch.randn(*s, dtype=torch.float64) for s in ((B, n), (n, d), (B, d)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_of_another_gradient_is_unbiased_for_this_one(kind):
    """The mean over the draw, exactly, with the plan of a G that shares nothing with this one."""
    sketch = kind(0.4, refresh_every=3)
    old, W, X = layer()
    old[:, :5] = 0  # what was zero then is not zero now
    G, _, _ = layer(B=9)
    X = X[:9]
    plan = sketch.plan(old, W)

    class Stale(kind):
        def plan(self, G, W):
            return plan

    stale = Stale(0.4, refresh_every=3)
    means = expected_gradients(stale, G, W, X)
    for mean, true in zip(means, (G @ W, G.mT @ X, G.sum(0)), strict=True):
        torch.testing.assert_close(mean, true, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_floor_lies_under_every_atom(kind):
    G, W, _ = layer()
    G[:, 3:] = 0
    p = kind(0.5, score_rows=4).probabilities(G, W)
    assert p.min() >= STALE_FLOOR * 0.5 - 1e-12
    assert float(p.sum()) == pytest.approx(4.0)
    assert p.max() <= 1


def test_only_the_scored_rows_are_looked_at():
    G, W, _ = layer(B=16)
    sketch = sp.L1(0.5, score_rows=4)
    assert sketch.scored_rows(16) == 4
    changed = G.clone()
    changed[[1, 2, 3, 5, 6, 7]] *= 100
    assert torch.equal(sketch.probabilities(G, W), sketch.probabilities(changed, W))
    changed[4] *= 100
    assert not torch.equal(sketch.probabilities(G, W), sketch.probabilities(changed, W))
    assert torch.equal(sp.L1(0.5, score_rows=0.25).probabilities(G, W), sketch.probabilities(G, W))


@pytest.mark.parametrize("kind", [sp.L1, sp.GradientSVD, sp.RankConstrained])
def test_a_layer_makes_a_plan_every_k_steps(kind, monkeypatch):
    made = []
    original = kind.partial_plan
    monkeypatch.setattr(
        kind, "partial_plan", lambda self, G, W: made.append(1) or original(self, G, W)
    )
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 3))
    sp.sketch_(model, kind(0.5, refresh_every=4))
    for step in range(9):
        model(torch.randn(10, 6)).sum().backward()
        assert len(made) == 1 + step // 4
    model(torch.randn(17, 6)).sum().backward()  # another batch size fits the same plan
    assert len(made) == 3
    other = copy.deepcopy(model)
    assert other[0].memory is not model[0].memory
    sp.sketch_(model, kind(0.25, refresh_every=4))  # another sketch needs another plan
    model(torch.randn(10, 6)).sum().backward()
    assert len(made) == 4
    assert set(model.state_dict()) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_a_non_finite_step_is_seen_and_does_not_poison_the_next():
    for kind in KINDS:
        memory, sketch = PlanMemory(), kind(0.5, refresh_every=10)
        W = torch.randn(8, 6, requires_grad=True)
        for step, bad in enumerate((float("nan"), None, float("inf"), None)):
            x = torch.randn(12, 6)
            y = sp.sketched_linear(x, W, None, sketch, memory=memory)
            G = torch.randn(12, 8)
            if bad is not None:
                G[3, step] = bad
            (grad,) = torch.autograd.grad(y, W, G)
            assert bool(grad.isfinite().all()) == (bad is None), (kind, step)


def test_compiled_steps_make_their_own_plan():
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 3))
    sp.sketch_(model, sp.L1(0.5, refresh_every=4))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(10, 6)).sum().backward()
    assert model[0].weight.grad.isfinite().all()
    assert model[0].memory._plan is None


@pytest.mark.parametrize("sketch", [sp.L1(0.3), sp.Diagonal(2), sp.GradientSVD(0.3)])
def test_accumulation_in_place_gives_the_same_gradient(sketch):
    plain = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    added = copy.deepcopy(plain)
    sp.sketch_(plain, sketch)
    sp.sketch_(added, sketch, accumulate=True)
    batches = [torch.randn(10, 6) for _ in range(3)]
    for model in (plain, added):
        torch.manual_seed(0)
        for x in batches:
            model(x).square().sum().backward()
    for a, b in zip(plain.parameters(), added.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_accumulation_keeps_the_tensor_and_makes_no_dense_gradient():
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 3))
    sp.sketch_(model, sp.L1(2), accumulate=True)
    model(torch.randn(4, 6)).sum().backward()
    grad = model[0].weight.grad
    seen = []
    model[0].weight.register_hook(seen.append)
    model(torch.randn(4, 6)).sum().backward()
    assert model[0].weight.grad is grad
    assert all(g is None for g in seen)  # nothing dense came by
    sp.unsketch_(model)
    assert "accumulate" not in model[0].__dict__


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"score_rows": 0}, "score_rows=0"),
        ({"score_rows": 1.5}, "share of the rows in"),
        ({"score_rows": float("nan")}, "score_rows=nan"),
        ({"refresh_every": 0}, "at least 1"),
        ({"refresh_every": 2.5}, "an integer"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        sp.L1(0.1, **options)


def test_the_eigen_solver_may_fail(monkeypatch):
    """Then the coordinate axes serve: unbiased all the same."""

    def fails(*args):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    G, W, X = layer()
    for sketch in (sp.GradientSVD(0.4), sp.RankConstrained(0.4), sp.GradientSVD(0.4, score_rows=3)):
        for mean, true in zip(
            expected_gradients(sketch, G, W, X), (G @ W, G.mT @ X, G.sum(0)), strict=True
        ):
            torch.testing.assert_close(mean, true, rtol=1e-10, atol=1e-10)


def test_degenerate_spectra_are_no_problem():
    Q, _ = torch.linalg.qr(torch.randn(12, 8, dtype=torch.float64))
    W = torch.eye(8, 6, dtype=torch.float64)
    X = torch.randn(12, 6, dtype=torch.float64)
    for G in (Q, Q[:, :1].expand(12, 8).clone(), torch.zeros(12, 8, dtype=torch.float64)):
        for sketch in (sp.GradientSVD(0.3), sp.RankConstrained(0.3)):
            means = expected_gradients(sketch, G, W, X)
            for mean, true in zip(means, (G @ W, G.mT @ X, G.sum(0)), strict=True):
                torch.testing.assert_close(mean, true, rtol=1e-9, atol=1e-9)
