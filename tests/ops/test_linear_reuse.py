"""A layer used twice, weights tied, gradients accumulated, models side by side, stacks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sketchprop as sp
from law_table import GATED, SKETCHES, by_shape, of_member
from linear_laws import B, D, N, assert_same, fast, leaf, parameters, rows_of
from sketchprop.core.sampling import draw_uniforms
from sketchprop.core.vjp import Vjp

every_sketch = pytest.mark.parametrize("variant", SKETCHES, ids=str)


# --- several uses, several models ---


def test_a_layer_used_twice_draws_twice():
    # The draws of two uses are independent: all pairs of kept columns appear, not the diagonal.
    weight = torch.eye(3, dtype=torch.float64)
    pairs = set()
    for _ in range(200):
        w = leaf(weight)
        uses = [leaf(torch.ones(1, 3).double()) for _ in range(2)]
        outs = [sp.sketched_linear(x, w, None, sp.ColumnMask(1)) for x in uses]
        (outs[0] + outs[1]).sum().backward()
        pairs.add(tuple(int(x.grad.argmax()) for x in uses))
    assert len(pairs) == 9


def test_a_layer_used_twice_in_a_chain_is_unbiased():
    layer = nn.Linear(6, 6).double()
    sp.sketch_(layer, sp.L1(0.5), filter_fn=lambda m, name: True)
    x = torch.randn(8, 6).double()
    report = sp.check_unbiased(layer, lambda m, x: m(m(x).tanh()).square().sum(), x, draws=400)
    assert report.ok, str(report)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(6, 6)
        self.decode = nn.Linear(6, 6)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(self.encode(x).tanh())


def test_tied_weights():
    model = Tied().double()
    sp.sketch_(model, sp.L1(0.5), filter_fn=lambda m, name: True)
    assert model.decode.weight is model.encode.weight
    x = torch.randn(8, 6).double()
    report = sp.check_unbiased(model, lambda m, x: m(x).square().sum(), x, draws=400)
    assert report.ok, str(report)
    assert {e.gradient for e in report.entries} == {"encode.weight", "encode.bias", "decode.bias"}


def test_the_draw_follows_the_default_generator():
    weight, bias = parameters()
    x, G = leaf(torch.randn(B, D).double()), torch.randn(B, N).double()
    drawn = []
    for seed in (1, 1, 2, 3, 4):
        torch.manual_seed(seed)
        drawn.append(fast(x, weight, bias, sp.ColumnMask(1), G, draw_uniforms)[1])
    assert torch.equal(drawn[0], drawn[1])
    assert any(not torch.equal(drawn[0], other) for other in drawn[2:])


# --- stacks ---


@pytest.mark.parametrize("stack", [(3,), (2, 2)])
@pytest.mark.parametrize("lead", [(), (2,)])
@every_sketch
def test_a_stack_of_layers(variant, stack, lead):
    weight, bias = parameters(stack=stack)
    x = leaf(torch.randn(*stack, *lead, B, D).double())
    G = torch.randn(*stack, *lead, B, N).double()
    sketch = variant(0.5)
    rows = rows_of(G, len(stack))
    u = by_shape()
    y = sp.sketched_linear(x, weight, bias, sketch, uniforms=u)
    got = torch.autograd.grad(y, (x, weight, bias), G)
    for member in [tuple(map(int, m)) for m in torch.ones(stack).nonzero()]:
        own = [leaf(t[member]) for t in (x, weight, bias)]
        torch.testing.assert_close(y[member], F.linear(*own))
        alone = fast(*own, sketch, G[member], of_member(u, stack, member))
        assert_same([g[member] for g in got], alone)
    if variant in GATED:
        z = leaf(torch.randn(*stack, *lead, B, N).double())
        sp.gate(z, sketch, weight=weight, uniforms=u).backward(G)
        samples = sketch.samples_of((*lead, B))
        expected = sketch(Vjp(rows, weight, None, samples), u).dense().view(G.shape)
        torch.testing.assert_close(z.grad, expected)


def test_a_stack_without_bias_and_with_budget_one():
    weight, _ = parameters(stack=(3,))
    x = leaf(torch.randn(3, B, D).double())
    y = sp.sketched_linear(x, weight, None, sp.L1(1.0))
    G = torch.randn_like(y)
    assert_same(torch.autograd.grad(y, (x, weight), G), (G @ weight, G.mT @ x))
