"""The methods attain what the paper proves to be the least possible."""

import math

import pytest
import torch

import sketchprop as sp
from law_table import layer, mean_of, random_feasible
from pseudo_code import lower_bound, p_star_from_weights
from sketchprop.core.importance import FLOOR
from sketchprop.core.vjp import Vjp

SHAPES = [(9, 6, 8), (5, 8, 12), (12, 7, 7), (6, 10, 4)]
RANKS = [1, 2, 3]


def second_moment(sketch, G, W, f):
    return float(mean_of(sketch, G, W, lambda c: f(c).square().sum()))


def singular_values(M):
    return torch.linalg.svdvals(M)


def alpha(W):
    """The share of what W cannot see: FLOOR · mean ‖Wᵢ‖²."""
    return FLOOR * float(W.square().sum(1).mean())


def spiked(B, n, d):
    """A layer with a few strong directions: some probabilities are clipped at 1."""
    G, W, _ = layer(B, n, d)
    G += 6 * torch.outer(torch.randn(B), torch.randn(n)).double()
    return G, W


@pytest.mark.parametrize("sampling", ["fixed", "independent"])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [lambda *s: layer(*s)[:2], spiked])
def test_literal_rcs_attains_the_lower_bound_on_dx(shape, rank, sampling, make):
    G, W = make(*shape)
    sketch = sp.RankConstrained(rank, sampling=sampling, paper=True)
    attained = second_moment(sketch, G, W, lambda c: c.input_grad(W))
    sigma = singular_values(G @ W)
    assert attained == pytest.approx(lower_bound(sigma, rank), rel=1e-9)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [lambda *s: layer(*s)[:2], spiked])
def test_rcs_and_gradient_svd_attain_the_lower_bounds_of_their_objectives(shape, rank, make):
    # E‖ĜW‖² + α E‖Ĝ‖² is the second moment of a sketch of [GW, √α G].
    G, W = make(*shape)
    a = alpha(W)
    attained = second_moment(
        sp.RankConstrained(rank), G, W, lambda c: torch.cat([c.dense() @ W, a**0.5 * c.dense()], 1)
    )
    sigma = singular_values(torch.cat([G @ W, a**0.5 * G], 1))
    assert attained == pytest.approx(lower_bound(sigma, rank), rel=1e-9)
    attained = second_moment(sp.GradientSVD(rank), G, W, lambda c: c.dense())
    assert attained == pytest.approx(lower_bound(singular_values(G), rank), rel=1e-9)


@pytest.mark.parametrize("rank", RANKS)
def test_no_other_method_is_below_the_bound(rank):
    G, W, _ = layer(8, 6, 9)
    bound_dx = lower_bound(singular_values(G @ W), rank)
    bound_g = lower_bound(singular_values(G), rank)
    for method in (sp.ColumnMask, sp.L1, sp.L2, sp.Variance, sp.Diagonal, sp.GradientSVD):
        sketch = method(rank)
        assert second_moment(sketch, G, W, lambda c: c.input_grad(W)) >= bound_dx * (1 - 1e-12)
        assert second_moment(sketch, G, W, lambda c: c.dense()) >= bound_g * (1 - 1e-12)


def test_the_guard_costs_dx_little():
    # What RCS gives away on dX for an unbiased dW, where W hides most directions.
    G, W, _ = layer(12, 10, 4)
    for rank in RANKS:
        guarded = second_moment(sp.RankConstrained(rank), G, W, lambda c: c.input_grad(W))
        assert guarded <= 1.5 * lower_bound(singular_values(G @ W), rank)


# --- diagonal sketches ---


def diagonal_weights(G, W, paper):
    a = 0.0 if paper else alpha(W)
    return G.square().sum(0) * (W.square().sum(1) + a)


def diagonal_objective(sketch, G, W, paper):
    """E‖(Ĝ - G)W‖² + α E‖Ĝ - G‖², over all outcomes of the coins."""
    a = 0.0 if paper else alpha(W)

    def error(compact):
        E = compact.dense() - G
        return (E @ W).square().sum() + a * E.square().sum()

    return float(mean_of(sketch, G, W, error))


@pytest.mark.parametrize("paper", [True, False])
@pytest.mark.parametrize("budget", [1, 3, 0.3])
def test_diagonal_has_the_closed_form_and_the_least_of_all_column_probabilities(paper, budget):
    G, W, _ = layer(6, 7, 4)
    G[:, 0] *= 8  # one column is clipped at p = 1
    sketch = sp.Diagonal(budget, sampling="independent", paper=paper)
    p = sketch.atoms(Vjp(G, W)).probabilities
    a = diagonal_weights(G, W, paper)
    rank = budget if isinstance(budget, int) else budget * 7
    torch.testing.assert_close(p, p_star_from_weights(a, rank))
    least = diagonal_objective(sketch, G, W, paper)
    assert least == pytest.approx(float((a / p - a).sum()), rel=1e-9)
    for _ in range(300):
        other = random_feasible(7, rank)
        assert least <= float((a / other - a).sum()) * (1 + 1e-12)


@pytest.mark.parametrize("paper", [True, False])
def test_diagonal_is_no_worse_than_other_column_methods(paper):
    G, W, _ = layer(6, 7, 4)
    W[2] *= 20
    best = diagonal_objective(sp.Diagonal(2, sampling="independent", paper=paper), G, W, paper)
    for method in (sp.ColumnMask, sp.L1, sp.L2, sp.Variance):
        other = diagonal_objective(method(2, sampling="independent"), G, W, paper)
        assert best < other


def test_l2_minimises_the_error_of_the_gradient_among_columns():
    G, W, _ = layer(6, 7, 4)
    a = G.square().sum(0)
    sketch = sp.L2(2, sampling="independent")
    least = float(mean_of(sketch, G, W, lambda c: (c.dense() - G).square().sum()))
    assert least == pytest.approx(
        float((a / sketch.atoms(Vjp(G, W)).probabilities - a).sum()), rel=1e-9
    )
    for _ in range(300):
        assert least <= float((a / random_feasible(7, 2) - a).sum()) * (1 + 1e-12)


def test_lower_bound_by_hand():
    # σ = 3, 1, 1 and r = 2: 3 lies above the level (1 + 1)/1 = 2 and is kept, 9 + 2².
    assert lower_bound(torch.tensor([3.0, 1.0, 1.0]), 2) == pytest.approx(13)
    # r = 1: nothing is clipped, (3 + 1 + 1)².
    assert lower_bound(torch.tensor([3.0, 1.0, 1.0]), 1) == pytest.approx(25)
    assert not math.isnan(lower_bound(torch.tensor([1.0, 1.0, 1.0]), 2))
