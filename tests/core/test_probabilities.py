"""optimal_probabilities: the solution of the convex program, whatever the weights look like."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pseudo_code import p_star_from_weights
from sketchprop.core.probabilities import optimal_probabilities

positive = st.floats(1e-12, 1e12, allow_nan=False)
weight_lists = st.lists(positive, min_size=2, max_size=40)


def assert_kkt(w, p, rank, tolerance=1e-9):
    """Feasible; one level λ with w/p² = λ where p < 1 and w ≥ λ where p = 1."""
    assert float(p.double().sum()) == pytest.approx(rank, rel=tolerance)
    assert ((p >= 0) & (p <= 1)).all()
    assert (p[w > 0] > 0).all()
    free = (p < 1) & (w > 0)
    if free.any():
        roots = w[free].double().sqrt() / p[free].double()
        level = float(roots.mean())
        assert (roots / level - 1).abs().max() <= tolerance
        assert (w[p == 1].double().sqrt() >= level * (1 - tolerance)).all()


@given(weight_lists, st.data())
def test_kkt_conditions(values, data):
    w = torch.tensor(values, dtype=torch.float64)
    rank = data.draw(st.integers(1, len(values) - 1) | st.floats(0.05, len(values) - 0.05))
    assert_kkt(w, optimal_probabilities(w, rank), rank)


@given(weight_lists, st.data())
def test_agrees_with_the_papers_algorithm(values, data):
    w = torch.tensor(values, dtype=torch.float64)
    rank = data.draw(st.integers(1, len(values) - 1))
    expected = p_star_from_weights(w, rank)
    torch.testing.assert_close(optimal_probabilities(w, rank), expected, rtol=1e-10, atol=1e-12)


def test_a_case_by_hand():
    # √w = 4, 1, 1 and r = 2: the first is clipped, the others share what is left.
    p = optimal_probabilities(torch.tensor([16.0, 1.0, 1.0], dtype=torch.float64), 2)
    assert p.tolist() == [1.0, 0.5, 0.5]
    p = optimal_probabilities(torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64), 1)
    torch.testing.assert_close(p, torch.tensor([1.0, 2.0, 3.0]).double() / 6)


@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1e-20, 1.0, 1e20, 1e37])
def test_zero_weights_get_zero_at_every_scale(scale):
    w = torch.tensor([0.0, 1.0, 0.7, 0.0, 0.4]) * scale
    p = optimal_probabilities(w, 2)
    assert (p[[0, 3]] == 0).all()
    torch.testing.assert_close(p, optimal_probabilities(w / scale, 2), rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [1e-37, 1.0, 1e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fewer_positive_weights_than_the_rank(dtype, scale):
    w = torch.tensor([0.0, 3.0, 0.0, 2.0, 0.0, 0.0], dtype=dtype) * scale
    p = optimal_probabilities(w, 4)
    expected = torch.tensor([0.5, 1.0, 0.5, 1.0, 0.5, 0.5], dtype=dtype)
    torch.testing.assert_close(p, expected)
    assert (p[[1, 3]] == 1).all()


@pytest.mark.parametrize("rank", [1, 3, 2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_zero_weights_share_the_budget(dtype, rank):
    p = optimal_probabilities(torch.zeros(5, dtype=dtype), rank)
    torch.testing.assert_close(p, torch.full((5,), rank / 5, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "exponents", "tolerance"),
    [(torch.float64, 140, 1e-9), (torch.float32, 30, 1e-5)],
)
@pytest.mark.parametrize("rank", [1, 2, 7, 19])
def test_huge_dynamic_range(dtype, exponents, tolerance, rank):
    powers = torch.linspace(-exponents, exponents, 20, dtype=torch.float64)
    w = (10**powers).to(dtype)[torch.randperm(20)]
    p = optimal_probabilities(w, rank)
    assert p.isfinite().all()
    assert float(p.double().sum()) == pytest.approx(rank, rel=tolerance)
    wide = w.double()
    expected = p_star_from_weights(wide, rank)
    seen = expected > 1e-25  # far below, float32 has no such number
    torch.testing.assert_close(p.double()[seen], expected[seen], rtol=tolerance, atol=0)
    if dtype == torch.float64:
        assert_kkt(w, p, rank)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_solved_in_float32_or_better(dtype):
    w = (torch.rand(1000) * 100).to(dtype)
    p = optimal_probabilities(w, 300)
    assert p.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = p_star_from_weights(w.double(), 300)
    torch.testing.assert_close(p.double(), exact, rtol=1e-5, atol=0)
    assert float(p.double().sum()) == pytest.approx(300, rel=1e-6)


def test_many_atoms_add_up():
    w = torch.rand(100_000) ** 8
    p = optimal_probabilities(w, 10_000)
    assert float(p.double().sum()) == pytest.approx(10_000, rel=1e-4)
    wide = optimal_probabilities(w.double(), 10_000)
    torch.testing.assert_close(p.double(), wide, rtol=1e-4, atol=0)


@pytest.mark.parametrize("rank", [5, 6, 5.0, 100])
def test_rank_of_all_atoms_keeps_everything(rank):
    assert optimal_probabilities(torch.tensor([0.0, 1.0, 2.0, 3.0, 0.0]), rank).tolist() == [1] * 5


@pytest.mark.parametrize("rank", [1, 3, 2.5, 5])
def test_nan_weights_make_every_probability_nan(rank):
    w = torch.tensor([1.0, math.nan, 2.0, 0.0, 4.0])
    p = optimal_probabilities(w, rank)
    assert p[1].isnan()
    if rank < 5:
        assert p.isnan().all()


def test_an_infinite_weight_is_kept():
    w = torch.tensor([1.0, math.inf, 2.0, 0.0, 4.0])
    p = optimal_probabilities(w, 2)
    assert p[1] == 1
    torch.testing.assert_close(p[[0, 2, 3, 4]], optimal_probabilities(w[[0, 2, 3, 4]], 1))


@pytest.mark.parametrize("rank", [1, 2])
def test_as_many_infinite_weights_as_the_rank_are_nan(rank):
    w = torch.tensor([1.0, math.inf, 2.0, math.inf, 4.0])
    assert optimal_probabilities(w, rank)[[1, 3]].isnan().all()


@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 7), (0, 7)])
@pytest.mark.parametrize("rank", [3, 2.5])
def test_leading_dimensions(shape, rank):
    w = torch.rand(shape, dtype=torch.float64)
    p = optimal_probabilities(w, rank)
    assert p.shape == w.shape
    for line, expected in zip(p.view(-1, 7), w.view(-1, 7), strict=True):
        torch.testing.assert_close(line, optimal_probabilities(expected, rank))
