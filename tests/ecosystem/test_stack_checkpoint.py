"""Activation checkpointing, reentrant and not.

What holds: draws are made in backward, after a replayed forward pass has put the random state
back. So with one seed a checkpointed step gives bitwise the gradients of a plain sketched step,
dropout included, whichever layers are checkpointed. The replay has to see the same sketch:
``exact`` and a change of budget must enclose forward and backward together.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import sketchprop as sp
from stack_helpers import SKETCHES, Z_LIMIT, batch, equal, gradients, largest_z, net

BOTH = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


def whole(model: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)


def pieces(model: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint_sequential(model, 3, x.requires_grad_(), use_reentrant=reentrant)


@BOTH
@pytest.mark.parametrize("split", [whole, pieces])
@pytest.mark.parametrize(
    "sketch", [*SKETCHES, sp.L1(0.3, sampling="independent"), sp.GradientSVD(0.3)], ids=repr
)
def test_the_gradients_of_the_plain_sketched_step(sketch, split, reentrant) -> None:
    model = sp.sketch_(net(dropout=0.3), sketch)
    x, y = batch()
    for seed in range(3):
        plain = gradients(model.parameters(), lambda: F.cross_entropy(model(x), y), seed)
        again = gradients(
            model.parameters(), lambda: F.cross_entropy(split(model, x, reentrant), y), seed
        )
        assert equal(plain, again)


@BOTH
def test_budget_one_is_the_plain_model(reentrant: bool) -> None:
    x, y = batch()
    models = net(dropout=0.3), sp.sketch_(net(dropout=0.3), sp.L1(1.0))
    plain, sketched = (
        gradients(
            m.parameters(), lambda m=m: F.cross_entropy(pieces(m, x.clone(), reentrant), y), 0
        )
        for m in models
    )
    assert equal(plain, sketched)


@BOTH
def test_the_mean_is_the_exact_gradient(reentrant: bool) -> None:
    """z ≤ 5 over 300 draws; ``exact`` around forward and backward is exact under both."""
    model = sp.sketch_(net(), sp.L1(0.3))
    x, y = batch()

    def draw(k: int) -> list[Tensor]:
        loss = lambda: F.cross_entropy(pieces(model, x.clone(), reentrant), y)  # noqa: E731
        return gradients(model.parameters(), loss, k)

    with sp.exact(model):
        truth = draw(0)
    plain = net()
    assert equal(truth, gradients(plain.parameters(), lambda: F.cross_entropy(plain(x), y), 0))
    assert largest_z(truth, draw, 300) <= Z_LIMIT


class Block(nn.Module):
    """Three layers on one input: their backward order must not depend on the replay."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return x + F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


@BOTH
def test_parallel_branches_draw_in_the_same_order(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([Block(), Block(), Block()])
    sp.sketch_(model, sp.L1(0.3), filter_fn=lambda module, name: True)
    x, _ = batch()

    def loss(checkpointed: bool) -> Tensor:
        h = x.clone().requires_grad_()
        for block in model:
            h = checkpoint(block, h, use_reentrant=reentrant) if checkpointed else block(h)
        return h.square().sum()

    assert equal(
        gradients(model.parameters(), lambda: loss(False), 4),
        gradients(model.parameters(), lambda: loss(True), 4),
    )
