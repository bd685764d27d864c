"""Two passes over one graph, one for dX and one for dW, as zero-bubble pipelines make them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import sketchprop as sp


def linear_net() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 20), nn.Tanh())


def conv_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 1))


NETS = pytest.mark.parametrize(
    ("build", "shape"), [(linear_net, (16, 12)), (conv_net, (4, 3, 6, 6))], ids=["linear", "conv"]
)


def sketched(build: Callable[[], nn.Module], sketch: sp.Sketch) -> nn.Module:
    torch.manual_seed(0)
    return sp.sketch_(build(), sketch, sp.select.everything)


def gradients(model: nn.Module, x: Tensor, G: Tensor, *, passes: int) -> list[Tensor | None]:
    """dX and those of all parameters, in one pass or in two."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(3)
    y = model(x)
    if passes == 1:
        y.backward(G)
        dX = x.grad
    else:
        (dX,), groups = stage_backward_input([y], [G], [x], model.parameters())
        stage_backward_weight(model.parameters(), groups)
    return [dX, *(p.grad for p in model.parameters())]


@NETS
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_both_passes_use_one_draw(build, shape, last) -> None:
    """The same seed gives the same gradients in one pass and in two: nothing is drawn again."""
    model = sketched(build, sp.L1(0.25))
    x = torch.randn(shape)
    if last and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    G = torch.randn_like(model(x))
    for one, two in zip(*(gradients(model, x, G, passes=n) for n in (1, 2)), strict=True):
        assert torch.equal(one, two)


def block(first: bool, mlp: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True, norm_first=first)
    return nn.Sequential(sp.sketch_(nn.Sequential(layer), sp.Tokens(0.3)), mlp)


class Gated(nn.Module):
    """A row-wise function that no chain of steps describes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = sp.branch(lambda x: self.up(x) * self.gate(x).sigmoid(), x, 0.3,
                              parameters=self.parameters())  # fmt: skip
        return y


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed: Tensor = sp.kept_attention(q, k, v, queries=0.3)
        return mixed.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("first", [True, False], ids=["norm first", "norm last"])
def test_kept_tokens_are_drawn_once_for_both_passes(first) -> None:
    model = nn.Sequential(Attending(), block(first, Gated()), block(first, nn.Identity()))
    x = torch.randn(3, 10, 8)
    G = torch.randn_like(model(x))
    for one, two in zip(*(gradients(model, x, G, passes=n) for n in (1, 2)), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: sketched(linear_net, sp.L1(0.25)), (16, 12)),
        (lambda: sketched(conv_net, sp.L1(0.25)), (4, 3, 6, 6)),
        (lambda: block(True, nn.Identity()), (3, 10, 8)),
        (lambda: block(False, nn.Identity()), (3, 10, 8)),
    ],
    ids=["linear", "conv", "norm first", "norm last"],
)
def test_the_same_question_twice_is_drawn_anew(build, shape) -> None:
    """Only what a pass left over comes from its draw: repeated draws stay independent."""
    x = torch.randn(shape, requires_grad=True)
    y = build()(x)
    G = torch.randn_like(y)
    ask = lambda: torch.autograd.grad(y, x, G, retain_graph=True)[0]  # noqa: E731
    assert not torch.equal(ask(), ask())


@NETS
def test_another_gradient_is_drawn_anew(build, shape) -> None:
    model = sketched(build, sp.L1(0.25))
    x = torch.randn(shape, requires_grad=True)
    last = list(model.parameters())[-2]
    y = model(x)
    zero, G = torch.zeros_like(y), torch.randn_like(y)
    torch.autograd.grad(y, x, zero, retain_graph=True)
    assert torch.autograd.grad(y, last, G)[0].abs().sum() > 0


def test_a_gradient_with_other_strides_is_drawn_anew() -> None:
    """The same memory read another way is another gradient: G, then its transpose."""
    x = torch.randn(6, 4, requires_grad=True)
    weight = torch.randn(6, 4, requires_grad=True)
    G = torch.zeros(6, 6)
    G[1:, 0] = 1.0  # one column, which is kept; the first column of its transpose is zero
    y = sp.sketched_linear(x, weight, None, sp.L1(1))
    torch.autograd.grad(y, x, G, retain_graph=True)
    (dW,) = torch.autograd.grad(y, weight, G.mT)
    kept = dW.abs().sum(1).nonzero().flatten().tolist()
    assert len(kept) == 1
    assert kept != [0]
    torch.testing.assert_close(dW[kept[0]], 5 * x[0])
