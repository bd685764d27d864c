"""One sketch for dX, another for dW."""

import pickle

import pytest
import torch
from torch import nn

import sketchprop as sp
from law_table import by_shape, fixed, layer, products
from sketchprop.core.cost import Size
from sketchprop.core.vjp import Vjp
from sketchprop.meters.unbiased import check_unbiased
from sketchprop.sketches import ForwardRows

PAIRS = [
    sp.Split(input=sp.L1(0.3), weight=ForwardRows(0.3)),
    sp.Split(input=sp.L1(2), weight=sp.Rows(2, by="gradient_input")),
    sp.Split(input=sp.Diagonal(0.5), weight=sp.L2(0.3, sampling="independent")),
    sp.Split(input=None, weight=sp.Rows(0.3)),
    sp.Split(input=sp.GradientSVD(1), weight=None),
    sp.Split(input=sp.Rows(0.5), weight=ForwardRows(0.4, by="uniform")),
]


@pytest.mark.parametrize("sketch", PAIRS, ids=repr)
def test_in_a_model(sketch):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2)).double()
    sp.sketch_(model, sketch)
    x = torch.randn(10, 6).double()
    report = check_unbiased(model, lambda m, x: m(x).square().mean(), x, draws=400)
    assert report.ok, str(report)
    assert len(sp.summary(model).layers) == 3


def test_the_sides_are_those_of_the_two_sketches():
    G, W, X = layer(12, 6, 5)
    u = torch.rand(2).double()
    in_turn = iter(u)
    one, two = sp.L1(2), sp.Rows(3)
    vjp = Vjp(G, W)
    drawn = sp.Split(input=one, weight=two)(vjp, lambda p, shape: next(in_turn))
    torch.testing.assert_close(drawn.input_grad(W), one(vjp, fixed(u[0])).input_grad(W))
    torch.testing.assert_close(drawn.weight_grad(X), two(vjp, fixed(u[1])).weight_grad(X))
    exact = sp.Split(input=None, weight=two)(vjp, fixed(u[1]))
    torch.testing.assert_close(exact.input_grad(W), G @ W)


def test_the_op_gives_what_the_sketch_gives():
    G, W, X = layer(12, 6, 5)
    for sketch in PAIRS:
        u = by_shape()
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        y = sp.sketched_linear(x, w, None, sketch, uniforms=u)
        got = torch.autograd.grad(y, (x, w), G)
        wanted = products(sketch(Vjp(G, W, X), u), W, X)[:2]
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_compute_and_memory_together():
    sketch = sp.Split(input=sp.L1(0.1), weight=ForwardRows(0.1))
    cost = sketch.cost(Size(1000, 512, 512))
    assert cost.products == pytest.approx(0.1 * 4 * 1000 * 512**2, rel=0.01)
    assert cost.products < cost.total < 0.12 * 4 * 1000 * 512**2
    assert sketch.saved_share(1000) == pytest.approx(0.1)
    sizes = []
    x = torch.randn(100, 16, requires_grad=True)
    weight = torch.randn(32, 16, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(tuple(t.shape)) or t, lambda t: t
    )
    with hooks:
        sp.sketched_linear(x, weight, None, sketch).sum().backward()
    assert (10, 16) in sizes
    assert (100, 16) not in sizes


def test_budgets_schedules_and_copies():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    sketch = sp.Split(input=sp.L1(0.1), weight=ForwardRows(0.3))
    sp.sketch_(model, sketch)
    sp.set_budget_(model, 0.5)
    assert model[0].sketch == sp.Split(input=sp.L1(0.5), weight=ForwardRows(0.5))
    assert pickle.loads(pickle.dumps(sketch)) == sketch
    assert eval(repr(sketch), vars(sp.sketches)) == sketch
    assert sketch.budget == 0.3


def test_errors_say_what_to_type():
    with pytest.raises(ValueError, match="give input="):
        sp.Split(input=None, weight=None)
    with pytest.raises(TypeError, match=r"weight=Rows\(0.3\)"):
        sp.Split(input=None, weight="L1")
    with pytest.raises(ValueError, match="input=None"):
        sp.Split(input=ForwardRows(0.1), weight=None)
    with pytest.raises(ValueError, match="looks at X in backward"):
        sp.Split(input=sp.Rows(0.1, by="gradient_input"), weight=ForwardRows(0.1))
