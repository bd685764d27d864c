"""Prop. 2.2 (ii): the variance at a node is what is made there and what arrives from above."""

import pytest
import torch

import sketchprop as sp
from sketchprop.core.enumeration import every_draw
from sketchprop.core.vjp import Vjp


@pytest.mark.parametrize(
    "sketch",
    [
        sp.L1(0.5),
        sp.ColumnMask(0.4),
        sp.L2(0.4),
        sp.SampleMask(0.5, sampling="independent"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.sum(0)], ids=["samples", "batch mean"])
def test_variance_is_local_plus_propagated_over_every_draw(sketch, view):
    """A node that two sketched layers read, below one more: exact means, no Monte Carlo."""
    torch.manual_seed(0)
    x, G = (torch.randn(3, n, dtype=torch.float64) for n in (2, 3))
    q, k, top = (torch.randn(n, d, dtype=torch.float64) for n, d in ((2, 2), (2, 2), (3, 2)))
    hidden = x @ q.mT + x @ k.mT

    def run(uniforms):
        arrived = sketch(Vjp(G, top, hidden), uniforms).input_grad(top)
        parts = [sketch(Vjp(arrived, W, x), uniforms).input_grad(W) for W in (q, k)]
        return arrived, parts

    def size(error):
        return float(view(error).square().sum())

    total = local = propagated = 0.0
    for chance, (arrived, (by_q, by_k)) in every_draw(run):
        total += chance * size(by_q + by_k - G @ top @ (q + k))
        local += chance * (size(by_q - arrived @ q) + size(by_k - arrived @ k))
        propagated += chance * size((arrived - G @ top) @ (q + k))
    assert min(local, propagated) > 0.01 * total
    assert total == pytest.approx(local + propagated, rel=1e-10)
