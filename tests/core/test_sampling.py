"""Samplers: exactly r distinct atoms, with exactly the given probabilities."""

import math
from fractions import Fraction
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pseudo_code import correlated_exact_r_sample
from sketchprop.core.probabilities import optimal_probabilities
from sketchprop.core.sampling import sample_fixed, sample_independent

LAST = math.nextafter(1, 0)
dtypes = st.sampled_from([torch.float32, torch.float64])
uniforms = st.one_of(st.sampled_from([0.0, LAST, 0.5]), st.floats(0, LAST))


def assert_proper(index, p, rank):
    """Exactly ``rank`` distinct indices, ascending; none with p = 0, all with p = 1."""
    assert index.dtype == torch.int64
    assert index.shape[-1] == rank
    assert (index[..., 1:] > index[..., :-1]).all()
    assert ((index >= 0) & (index < p.shape[-1])).all()
    p = p.expand(*index.shape[:-1], p.shape[-1])
    assert (p.gather(-1, index) > 0).all()
    kept = torch.zeros_like(p, dtype=torch.bool).scatter(-1, index, True)
    assert kept[p == 1].all()


# What rounding is cruel to: a hair below 1, a hair above 0, exact ones and zeros in between.
cruel = st.sampled_from(
    [0.0, 1.0, LAST, 1 - 2**-24, 1 - 1e-6, 1 - 1e-9, 2**-24, 1e-9, 1e-30, 5e-324, 0.5, 1 / 3, 0.1]
)


@given(st.lists(cruel, min_size=1, max_size=40), uniforms, dtypes)
def test_adversarial_probabilities(values, u, dtype):
    p = torch.tensor(values, dtype=dtype)
    # One more atom (or a few) brings the sum to an integer, up to the rounding of its dtype.
    missing = math.ceil(float(p.double().sum())) - float(p.double().sum())
    p = torch.cat([p, torch.tensor([missing], dtype=dtype)])
    rank = round(float(p.double().sum()))
    if rank == 0:
        p, rank = torch.cat([p, torch.ones(1, dtype=dtype)]), 1
    assert_proper(sample_fixed(p, torch.tensor(u, dtype=torch.float64), rank), p, rank)


@given(
    st.lists(st.floats(1e-3, 1), min_size=3, max_size=30),
    st.floats(-1, 1),
    uniforms,
    dtypes,
    st.data(),
)
def test_sums_that_miss_the_rank_by_rounding(values, miss, u, dtype, data):
    w = torch.tensor(values, dtype=dtype)
    rank = data.draw(st.integers(1, len(values) - 1))
    p = optimal_probabilities(w.square(), rank)
    eps = torch.finfo(dtype).eps
    p = (p * (1 + 4 * miss * eps)).clamp(max=1)
    assert_proper(sample_fixed(p, torch.tensor(u, dtype=torch.float64), rank), p, rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 1000, 100_000])
@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.9])
def test_large_sets(n, fraction, dtype):
    rank = max(1, round(fraction * n))
    for w in (torch.rand(n), torch.rand(n) ** 40, torch.ones(n), torch.randn(n).exp() ** 4):
        p = optimal_probabilities(w.to(dtype), rank)
        for u in (0.0, LAST, 0.123):
            assert_proper(sample_fixed(p, torch.tensor(u, dtype=torch.float64), rank), p, rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_but_one_of_a_hundred_thousand(dtype):
    n = 100_000
    p = torch.full((n,), (n - 1) / n, dtype=dtype)
    left_out = set()
    for u in torch.linspace(0, LAST, 20, dtype=torch.float64):
        index = sample_fixed(p, u, n - 1)
        assert_proper(index, p, n - 1)
        left_out |= set(range(n)) - set(index.tolist())
    assert len(left_out) > 15  # p < 1: no atom is sure, each is left out in its turn


def inclusion_frequencies(p, rank):
    """P(i is kept), exactly: the measure of the u that keep i, over the pieces of [0, 1)."""
    sums = [Fraction(0)]
    for x in p.tolist():
        sums.append(sums[-1] + Fraction(x))
    points = sorted({Fraction(0), Fraction(1), *(s % 1 for s in sums)})
    kept = [Fraction(0)] * len(p)
    for low, high in pairwise(points):
        for i in sample_fixed(p, torch.tensor(float((low + high) / 2)).double(), rank).tolist():
            kept[i] += high - low
    return torch.tensor([float(k) for k in kept], dtype=torch.float64)


@given(st.lists(st.floats(0, 100), min_size=2, max_size=25), st.data())
def test_inclusion_frequencies_are_the_probabilities(values, data):
    w = torch.tensor(values, dtype=torch.float64)
    rank = data.draw(st.integers(1, len(values) - 1))
    p = optimal_probabilities(w, rank)
    torch.testing.assert_close(inclusion_frequencies(p, rank), p, rtol=0, atol=1e-11)


@given(st.lists(st.floats(0.001, 100), min_size=2, max_size=25), uniforms, st.data())
def test_agrees_with_the_papers_algorithm(values, u, data):
    rank = data.draw(st.integers(1, len(values) - 1))
    p = optimal_probabilities(torch.tensor(values, dtype=torch.float64), rank)
    distance = (p.cumsum(0) - u).frac().abs()
    if torch.minimum(distance, 1 - distance).min() < 1e-9:
        return  # on a breakpoint the two may round differently
    index = sample_fixed(p, torch.tensor(u, dtype=torch.float64), rank)
    assert index.tolist() == correlated_exact_r_sample(p, rank, u)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("sets", "draws"), [((3,), (3,)), ((), (50,)), ((3,), ()), ((3,), (5, 3))], ids=str
)
def test_uniforms_and_probabilities_broadcast(sets, draws, dtype):
    p = optimal_probabilities(torch.rand(*sets, 9, dtype=dtype), 4)
    u = torch.rand(draws, dtype=torch.float64)
    index = sample_fixed(p, u, 4)
    shape = torch.broadcast_shapes(sets, draws)
    assert index.shape == (*shape, 4)
    p, u = p.expand(*shape, 9), u.expand(shape)
    for place in product(*map(range, shape)):
        assert torch.equal(index[place], sample_fixed(p[place], u[place], 4))


@pytest.mark.parametrize("rank", [1, 3])
def test_nan_probabilities_never_index_out_of_range(rank):
    for p in (torch.full((5,), math.nan), torch.tensor([0.0, math.nan, 0.0, 0.0, 0.0])):
        index = sample_fixed(p, torch.tensor(0.5), rank)
        assert index.shape == (rank,)
        assert ((index >= 0) & (index < 5)).all()


def test_independent_frequency_is_the_probability():
    p = torch.cat([torch.rand(20), torch.tensor([1.0, 0.0, math.nan])]).double()
    N = 10_000
    grid = torch.tensor([*(i / N for i in range(N)), LAST], dtype=torch.float64)
    kept = sample_independent(p, grid[:, None].expand(-1, 23)).double().mean(0)
    assert (kept - p)[:20].abs().max() <= 2 / N
    assert kept[20:].tolist() == [1, 0, 1]  # sure, impossible; a NaN must reach the gradient


@pytest.mark.parametrize("shape", [(64,), (3, 64)])
def test_compiles_without_a_graph_break(shape):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def draw(w, u):
        p = optimal_probabilities(w, 9)
        return p, sample_fixed(p, u, 9), sample_independent(p, u.unsqueeze(-1))

    w, u = torch.rand(shape), torch.rand(shape[:-1], dtype=torch.float64)
    p, index, mask = draw(w, u)
    expected = optimal_probabilities(w, 9)
    torch.testing.assert_close(p, expected)
    assert torch.equal(index, sample_fixed(expected, u, 9))
    assert torch.equal(mask, sample_independent(expected, u.unsqueeze(-1)))
