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
from stack_helpers import SKETCHES, batch, equal, gradients, net

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
def test_exact_around_forward_and_backward_is_exact(reentrant: bool) -> None:
    model = sp.sketch_(net(), sp.L1(0.3))
    x, y = batch()
    loss = lambda: F.cross_entropy(pieces(model, x.clone(), reentrant), y)  # noqa: E731
    with sp.exact(model):
        truth = gradients(model.parameters(), loss, 0)
    plain = net()
    assert equal(truth, gradients(plain.parameters(), lambda: F.cross_entropy(plain(x), y), 0))


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
