"""Draws in C are those in torch, and are left alone where torch has to see the operations."""

from __future__ import annotations

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from sketchprop.core import probabilities
from sketchprop.core.probabilities import capped_fill, water_fill
from sketchprop.core.sampling import draw

pytestmark = pytest.mark.skipif(probabilities._C is None, reason="built without a compiler")


def both(monkeypatch, f):
    ours = f()
    with monkeypatch.context() as patched:
        patched.setattr(probabilities, "_C", None)
        return ours, f()


def roots_of(case: int, *shape: int) -> torch.Tensor:
    """Flat to very steep, some with zeros, some with a row of zeros or an infinite number."""
    torch.manual_seed(case)
    roots = torch.rand(shape, dtype=[torch.float32, torch.float64][case % 2]) ** (case % 30 + 1)
    if case % 3 == 0:
        roots[torch.rand(shape) < 0.6] = 0
    if case % 5 == 0:
        roots[0] = math.inf if roots.dim() == 1 and case % 10 else 0
    return roots


@pytest.mark.parametrize("case", range(0, 240))
def test_probabilities_and_draws_are_those_of_torch(case, monkeypatch):
    n = 3 + case % 50
    rank = 1 + case % (n - 1)
    roots = roots_of(case, n)
    share = rank - (0.3 if case % 4 == 0 else 0)
    ours, torchs = both(monkeypatch, lambda: water_fill(roots, share))
    torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-15, equal_nan=True)

    p = water_fill(roots, rank).nan_to_num(rank / n)
    u = torch.rand((), dtype=torch.float64)
    for given in (u, u.float()):  # C reads float64 alone
        ours, torchs = both(monkeypatch, lambda u=given: draw(p, rank, uniforms=lambda *_: u))
        assert torch.equal(ours[0], torchs[0])
        assert torch.equal(ours[1], torchs[1])

    samples = roots_of(case, 4, n)
    capacity = min(n, math.ceil(1.25 * rank))
    ours, torchs = both(monkeypatch, lambda: capped_fill(samples, 4 * rank, capacity))
    torch.testing.assert_close(ours, torchs, rtol=1e-9, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("n", [2, 5])
def test_a_stack_draws_each_set_by_itself(n):
    p = water_fill(torch.rand(2, 3, n + 1), n)
    u = torch.rand(2, 3, dtype=torch.float64)
    index, scale = draw(p, n, uniforms=lambda *_: u)
    for place in ((0, 0), (0, 2), (1, 1)):
        one = draw(p[place], n, uniforms=lambda *_, at=place: u[at])
        assert torch.equal(index[place], one[0])
        assert torch.equal(scale[place], one[1])


def test_a_number_that_is_not_one_is_seen_in_all_draws():
    roots = torch.tensor([1.0, math.nan, 2.0, 3.0])
    index, scale = draw(water_fill(roots, 2), 2)
    assert scale.isnan().all()
    assert 0 <= int(index.min()) <= int(index.max()) < 4
    assert capped_fill(torch.stack([roots, torch.ones(4)]), 3, 2).isnan().all()


def test_a_trace_sees_each_draw_and_draws_anew():
    trace = make_fx(lambda x: draw(water_fill(x, 3), 3)[0])(torch.rand(9))
    assert "sketchprop.systematic" in trace.code
    heavy = torch.full((9,), 1e-9)
    heavy[[1, 4, 6]] = 1.0
    assert trace(heavy).tolist() == [1, 4, 6]
    mapped = torch.func.vmap(lambda x: draw(water_fill(x, 3), 3)[0], randomness="different")
    assert mapped(heavy.expand(2, -1)).tolist() == [[1, 4, 6]] * 2
