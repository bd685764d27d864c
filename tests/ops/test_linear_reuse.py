"""A layer used twice, weights tied, gradients accumulated, models side by side, stacks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sketchprop as sp
from law_table import FIXED, GATED, SKETCHES, by_shape, of_member
from linear_laws import B, D, N, assert_same, fast, leaf, parameters, rows_of
from sketchprop.core.sampling import draw_uniforms

every_sketch = pytest.mark.parametrize("variant", SKETCHES, ids=str)


# --- several uses, several models ---


def one_column(weight_grad):
    """The kept rows of dW."""
    return tuple(weight_grad.abs().sum(1).nonzero().flatten().tolist())


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


@pytest.mark.parametrize("variant", FIXED, ids=str)
def test_a_layer_used_twice_sums_its_gradients(variant):
    weight, bias = parameters()
    sketch = variant(0.5)
    x1, x2 = (leaf(torch.randn(B, D).double()) for _ in range(2))
    G1, G2 = (torch.randn(B, N).double() for _ in range(2))
    u1, u2 = by_shape(1), by_shape(2)
    y1 = sp.sketched_linear(x1, weight, bias, sketch, uniforms=u1)
    y2 = sp.sketched_linear(x2, weight, bias, sketch, uniforms=u2)
    ((y1 * G1).sum() + (y2 * G2).sum()).backward()
    first, second = fast(x1, weight, bias, sketch, G1, u1), fast(x2, weight, bias, sketch, G2, u2)
    assert_same((x1.grad, x2.grad), (first[0], second[0]))
    assert_same((weight.grad, bias.grad), (first[1] + second[1], first[2] + second[2]))


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


def test_gradient_accumulation():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    sp.sketch_(model, sp.L1(0.5))
    batches = [torch.randn(4, 6).double() for _ in range(3)]
    torch.manual_seed(5)
    for x in batches:
        model(x).square().sum().backward()
    accumulated = [p.grad.clone() for p in model.parameters()]
    torch.manual_seed(5)
    totals = [torch.zeros_like(p) for p in model.parameters()]
    for x in batches:
        grads = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        for total, grad in zip(totals, grads, strict=True):
            total.add_(grad)
    assert_same(accumulated, totals)


def test_two_models_in_one_process_do_not_know_each_other():
    def build(sketch):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        return sp.sketch_(model, sketch)

    def gradients(model, seed):
        torch.manual_seed(seed)
        model.zero_grad()
        model(torch.ones(4, 6).double()).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    alone = gradients(build(sp.L1(2)), 1), gradients(build(sp.GradientSVD(1)), 2)
    first, second = build(sp.L1(2)), build(sp.GradientSVD(1))
    assert (first[0].sketch, second[0].sketch) == (sp.L1(2), sp.GradientSVD(1))
    together = gradients(first, 1), gradients(second, 2)
    for a, b in zip(alone, together, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    with sp.exact(first):
        assert first[0].sketching.exact
        assert not second[0].sketching.exact
    sp.unsketch_(first)
    assert type(second[0]) is sp.SketchedLinear
    again = gradients(second, 2)
    assert all(torch.equal(x, y) for x, y in zip(again, alone[1], strict=True))


def test_each_backward_draws_anew():
    weight, _ = parameters()
    x = torch.randn(B, D).double()
    kept = set()
    for _ in range(60):
        w = leaf(weight)
        sp.sketched_linear(x, w, None, sp.ColumnMask(1)).sum().backward()
        kept.add(one_column(w.grad))
    assert kept == {(i,) for i in range(N)}


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
        expected = sketch(sp.Vjp(rows, weight, None, samples), u).dense().view(G.shape)
        torch.testing.assert_close(z.grad, expected)


def test_a_stack_without_bias_and_with_budget_one():
    weight, _ = parameters(stack=(3,))
    x = leaf(torch.randn(3, B, D).double())
    y = sp.sketched_linear(x, weight, None, sp.L1(1.0))
    G = torch.randn_like(y)
    assert_same(torch.autograd.grad(y, (x, weight), G), (G @ weight, G.mT @ x))
