"""Any node of a graph: the mean of a gate by enumeration, each dimension, and as a layer."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sketchprop as sp
from law_table import METHODS
from sketchprop.core.enumeration import expectation
from sketchprop.ops.gate import unfit
from sketchprop.sketches import Every

SHAPE = (3, 4, 5, 3)
FITTING = [method for method in METHODS if not unfit(method(2))]
SKETCHES = [
    *(method(2) for method in FITTING),
    *(method(0.5, sampling="independent") for method in FITTING),
    sp.Rows(2, unit="sample"),
]
every_dim = pytest.mark.parametrize("dim", [-1, 0, 1, 2])
every_sketch = pytest.mark.parametrize("sketch", SKETCHES, ids=repr)


def through(sketch, dim, G, **options):
    """What a gradient G becomes in a gate."""
    x = torch.zeros_like(G, requires_grad=True)
    W = torch.linspace(-1, 2, 5 * G.shape[dim], dtype=G.dtype).view(-1, 5)
    y = sp.gate(x, sketch, dim=dim, weight=W, **options)
    return torch.autograd.grad(y, x, G)[0]


def gradient():
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@every_dim
@every_sketch
def test_the_mean_is_the_gradient(sketch, dim):
    G = gradient()
    (mean,) = expectation(lambda uniforms: (through(sketch, dim, G, uniforms=uniforms),))
    torch.testing.assert_close(mean, G, rtol=0, atol=1e-12)


@every_dim
@pytest.mark.parametrize("planner", [Every(3, rows=0.5)], ids=repr)
@pytest.mark.parametrize("method", [sp.L1, sp.Diagonal, sp.GradientSVD])
def test_so_it_is_with_atoms_of_an_earlier_gradient(method, planner, dim):
    G = gradient()

    def run(uniforms):
        plans = planner.anew()
        through(method(2), dim, G.flip(dim) ** 3, planner=plans)
        return (through(method(2), dim, G, planner=plans, uniforms=uniforms),)

    torch.testing.assert_close(expectation(run)[0], G, rtol=0, atol=1e-10)


@every_dim
@every_sketch
def test_the_dimension_is_where_it_would_be_last(sketch, dim):
    G = gradient()
    torch.manual_seed(1)
    one = through(sketch, dim, G)
    torch.manual_seed(1)
    assert torch.equal(one, through(sketch, -1, G.movedim(dim, -1)).movedim(-1, dim))
    assert not torch.equal(one, G)
    if isinstance(sketch, sp.L1) and isinstance(sketch.budget, int):
        assert int(one.movedim(dim, 0).flatten(1).any(1).sum()) == sketch.budget


@every_dim
@pytest.mark.parametrize("method", FITTING)
def test_budget_one_is_the_gradient_to_the_last_bit(method, dim):
    assert torch.equal(through(method(1.0), dim, gradient()), gradient())


@every_dim
@every_sketch
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(sketch, dim, bad):
    G = gradient()
    G[1, 2, 0, 1] = bad
    assert not through(sketch, dim, G).isfinite().all()


class TwoPaths(nn.Module):
    """Pictures, then y = f(x) + h(x) with a gate on one path; its only sketches are gates."""

    def __init__(self):
        super().__init__()
        self.conv, self.channels = nn.Conv2d(1, 4, 3), sp.Gate(4, dim=1)
        self.f, self.h, self.path = nn.Linear(16, 6), nn.Linear(16, 6), sp.Gate(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.channels(self.conv(x)).relu().flatten(1)
        return self.head((self.path(self.f(x)) + self.h(x)).tanh())


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return TwoPaths()


SOURCE = torch.Generator().manual_seed(0)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
BATCHES = [(torch.randn(6, 1, 4, 4, generator=SOURCE), LABELS) for _ in range(3)]
GATES = {"channels": sp.L1(0.5), "path": sp.Rows(0.5)}


def test_meters_know_gates(model):
    sp.sketch_(model, GATES)
    assert sp.check_unbiased(model, loss_fn, BATCHES[0], draws=200).ok
    report = sp.measure(model, loss_fn, BATCHES, draws=4, rounds=0)
    assert {line.layer for line in report.variance.layers} == set(GATES)
    assert all(line.injected.value > 0 for line in report.variance.layers)
    parts = sum(line.injected.value for line in report.variance.layers)
    error = 3 * report.variance.remainder.error
    assert parts == pytest.approx(report.added.value, abs=error)
    assert report.flops.kept > 1
    assert not report.pays
    lines = {line.layer: line for line in sp.plan(model, loss_fn, BATCHES[0], rounds=2).layers}
    assert lines["channels"].rows == 6 * 4
    assert lines["channels"].shape == (4, 0)
    assert lines["path"].rows == 6
    assert not lines["path"].worth
    shown = {layer.name: layer for layer in sp.summary(model).layers}
    assert shown["channels"].shape == (4,)
    assert shown["channels"].kept == 0.5
    assert shown["path"].flops == 1.0
    assert shown["f"].note == "not taken by sketch_"


def test_a_gate_is_a_layer_without_a_weight(model):
    """Sketched, exact, with another budget, copied, taken back: as every layer."""
    keys, plain = list(model.state_dict()), repr(model)
    sp.sketch_(model, GATES, planner=None)
    assert list(model.state_dict()) == keys

    def grads(net):
        torch.manual_seed(3)
        return torch.autograd.grad(loss_fn(net, BATCHES[0]), list(net.parameters()))

    drawn = grads(model)
    assert all(map(torch.equal, drawn, grads(deepcopy(model))))
    with sp.exact(model):
        exact = grads(model)
    assert not torch.equal(drawn[0], exact[0])
    assert all(map(torch.equal, exact, grads(sp.set_budget_(model, 1.0))))
    assert repr(sp.unsketch_(model)) == plain
    assert all(map(torch.equal, exact, grads(model)))


def test_a_gate_takes_a_planner_and_refuses_what_needs_a_weight(model):
    sp.sketch_(model, {"path": sp.L1(0.5)}, planner=Every(5))
    loss_fn(model, BATCHES[0]).backward()
    assert model.path.sketching.planner._known
    with pytest.raises(ValueError, match="a gate has none; use L1"):
        sp.sketch_(model, {"path": sp.Diagonal(0.5)})
    with pytest.raises(ValueError, match="not in gate; Rows"):
        sp.sketch_(model, {"path": sp.Split(input=sp.L1(0.5), weight=None)})
    with pytest.raises(ValueError, match=r"type Gate\(6, dim=-1\)"):
        sp.Gate(5)(torch.zeros(2, 6))


def test_the_last_linear_layer_is_no_gate():
    net = sp.sketch_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), sp.Gate(4)), sp.L1(2))
    assert [hasattr(layer, "sketching") for layer in net] == [True, False, True]
