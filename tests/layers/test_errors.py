"""Bad input: the message says what was given, what is allowed and what to type."""

import math

import pytest
import torch
from torch import nn

import sketchprop as sp
from law_table import METHODS, SKETCHES

every_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.__name__)


def message(error, f):
    with pytest.raises(error) as caught:
        f()
    return str(caught.value)


def model():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


@pytest.mark.parametrize("budget", [0.0, -0.5, -1e-9, 1.5, math.nan, math.inf, -math.inf], ids=str)
@every_method
def test_fractions_outside_of_the_interval(method, budget):
    text = message(ValueError, lambda: method(budget))
    assert f"budget={budget!r}" in text
    assert "(0, 1]" in text
    assert "for example 0.1" in text


@pytest.mark.parametrize("budget", [0, -3])
@every_method
def test_ranks_below_one(method, budget):
    text = message(ValueError, lambda: method(budget))
    assert f"budget={budget}" in text
    assert "at least 1" in text
    assert "for example 16" in text


def test_a_rank_written_as_a_float():
    text = message(ValueError, lambda: sp.L1(16.0))
    assert "budget=16.0" in text
    assert "type budget=16" in text


@pytest.mark.parametrize("budget", ["0.1", None, True, [0.1], 1j])
def test_budgets_that_are_no_numbers(budget):
    text = message(TypeError, lambda: sp.L1(budget))
    assert repr(budget) in text
    assert type(budget).__name__ in text
    assert "0.1" in text


@pytest.mark.parametrize("budget", [0.1, 1.0, 1, 16, torch.tensor(0.5).item()])
def test_good_budgets(budget):
    assert sp.L1(budget).budget == budget


@pytest.mark.parametrize("sampling", ["correlated", "", None, "exact"])
@every_method
def test_unknown_sampling(method, sampling):
    text = message(ValueError, lambda: method(0.5, sampling=sampling))
    assert f"sampling={sampling!r}" in text
    assert "sampling='fixed'" in text
    assert "sampling='independent'" in text


def test_sketches_are_frozen():
    with pytest.raises(AttributeError):
        sp.L1(0.5).budget = 0.1


def test_options_are_named():
    with pytest.raises(TypeError):
        sp.L1(0.5, "independent")


# --- patterns and filters ---


def test_a_pattern_that_matches_nothing_shows_near_names():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
            self.classifier = nn.Linear(3, 2)

    text = message(ValueError, lambda: sp.sketch_(Net(), {"encodr.0": sp.L1(0.5)}))
    assert "'encodr.0'" in text
    assert "near names" in text
    assert "'encoder.0'" in text
    text = message(ValueError, lambda: sp.sketch_(Net(), {"zzz": sp.L1(0.5)}))
    assert "'zzz'" in text
    assert "'encoder.0'" in text


def test_a_pattern_in_a_model_without_layers():
    text = message(ValueError, lambda: sp.sketch_(nn.ReLU(), {"fc": sp.L1(0.5)}))
    assert "'fc'" in text
    assert "the model has none" in text


def test_an_empty_mapping():
    text = message(ValueError, lambda: sp.sketch_(model(), {}))
    assert "{'0': Rows(0.3)}" in text
    assert "'4'" in text


def test_a_filter_that_takes_nothing():
    text = message(ValueError, lambda: sp.sketch_(model(), sp.L1(0.5), lambda m, name: False))
    assert "filter_fn" in text
    assert "'0'" in text
    assert "'4'" in text


def test_a_model_without_layers():
    text = message(ValueError, lambda: sp.sketch_(nn.Sequential(nn.ReLU()), sp.L1(0.5)))
    assert "Sequential" in text
    assert "nn.Linear" in text


def test_a_model_with_one_layer():
    text = message(ValueError, lambda: sp.sketch_(nn.Linear(3, 2), sp.L1(0.5)))
    assert "last one stays exact" in text
    assert "pass filter_fn=" in text


@pytest.mark.parametrize("sketch", [0.1, "l1", sp.L1, None])
def test_something_that_is_no_sketch(sketch):
    text = message(TypeError, lambda: sp.sketch_(model(), sketch))
    assert repr(sketch) in text
    assert "Tokens(0.3)" in text


def test_something_that_is_no_sketch_in_a_mapping():
    text = message(TypeError, lambda: sp.sketch_(model(), {"0": 0.1}))
    assert "'0'" in text
    assert "0.1" in text
    assert "Rows(0.3)" in text


# --- core functions ---


def test_negative_weights():
    text = message(ValueError, lambda: sp.optimal_probabilities(torch.tensor([1.0, -2.5]), 1))
    assert "negative" in text
    assert "-2.5" in text
    assert "G.square().sum(-2)" in text


@pytest.mark.parametrize("rank", [0, -1, math.nan, "2", None, True])
def test_ranks_that_keep_nothing(rank):
    w = torch.ones(4)
    text = message(ValueError, lambda: sp.optimal_probabilities(w, rank))
    assert f"rank={rank!r}" in text
    assert "for example rank=8" in text
    message(ValueError, lambda: sp.sample_fixed(w / 4, torch.tensor(0.5), rank))


@pytest.mark.parametrize("rank", [1.5, 5])
def test_ranks_that_cannot_be_drawn(rank):
    text = message(
        ValueError, lambda: sp.sample_fixed(torch.full((4,), 0.5), torch.tensor(0.5), rank)
    )
    assert f"rank={rank}" in text
    assert "from 1 to 4" in text


@pytest.mark.parametrize("method", [sp.Diagonal, sp.RankConstrained, sp.ElementMask])
def test_a_missing_weight(method):
    text = message(TypeError, lambda: method(1)(sp.Vjp(torch.randn(3, 4))))
    assert method.__name__ in text
    assert "weight=" in text
    assert "L1" in text


def test_a_gate_without_the_weight_that_its_sketch_needs():
    x = torch.randn(3, 4, requires_grad=True)
    assert "weight=" in message(TypeError, lambda: sp.gate(x, sp.Diagonal(1)))


def test_a_gate_with_element_masks():
    text = message(TypeError, lambda: sp.gate(torch.randn(3, 4), sp.ElementMask(0.5)))
    assert "sketched_linear" in text
    assert "ColumnMask" in text


def test_shapes_that_do_not_fit():
    x, weight = torch.randn(3, 5, requires_grad=True), torch.randn(6, 4)
    text = message(ValueError, lambda: sp.sketched_linear(x, weight, None, sp.L1(1)))
    assert "(3, 5)" in text
    assert "(6, 4)" in text
    text = message(
        ValueError,
        lambda: sp.sketched_linear(torch.randn(3, 4), torch.randn(2, 6, 4), None, sp.L1(1)),
    )
    assert "[2, *, 4]" in text


# --- double backward ---


@pytest.mark.parametrize("variant", SKETCHES, ids=str)
def test_double_backward_names_exact(variant):
    net = sp.sketch_(model(), variant(1), planner=variant.planner)
    x = torch.randn(8, 4, requires_grad=True)
    (first,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    text = message(RuntimeError, lambda: torch.autograd.grad(first.square().sum(), x))
    assert "exact" in text
    assert "with sketchprop.exact(model)" in text


@pytest.mark.parametrize("over", ["weight", "bias"])
def test_double_backward_of_a_parameter_gradient(over):
    net = sp.sketch_(model(), sp.L1(2))
    parameter = getattr(net[0], over)
    loss = net(torch.randn(8, 4)).square().sum()
    (first,) = torch.autograd.grad(loss, parameter, create_graph=True)
    assert "exact" in message(RuntimeError, lambda: first.square().sum().backward())


def test_double_backward_through_a_gate():
    x = torch.randn(8, 4, requires_grad=True)
    y = sp.gate(x, sp.L1(2)).pow(3).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    assert "exact" in message(RuntimeError, lambda: torch.autograd.grad(first.sum(), x))


def test_double_backward_with_torch_func():
    net = sp.sketch_(model(), sp.L1(2))

    def loss(x):
        return net(x).square().sum()

    def slope(x):
        return torch.func.grad(loss)(x).square().sum()

    x = torch.randn(8, 4)
    assert torch.func.grad(loss)(x).shape == x.shape
    assert "exact" in message(RuntimeError, lambda: torch.func.grad(slope)(x))


def test_double_backward_inside_exact():
    net, plain = sp.sketch_(model(), sp.L1(2)), model()
    plain.load_state_dict(net.state_dict())
    x = torch.randn(8, 4, requires_grad=True)

    def second(m):
        (first,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    with sp.exact(net):
        assert torch.equal(second(net), second(plain))


# --- what must not be hidden ---


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("variant", SKETCHES, ids=str)
def test_a_non_finite_gradient_reaches_the_parameters(variant, bad):
    net = sp.sketch_(model(), variant(1), planner=variant.planner)
    out = net(torch.randn(8, 4))
    G = torch.randn_like(out)
    G[3, 1] = bad
    out.backward(G)
    for parameter in net.parameters():
        assert not parameter.grad.isfinite().all()


@pytest.mark.parametrize("variant", SKETCHES, ids=str)
def test_a_gradient_scaler_would_skip_the_step(variant):
    # What GradScaler does: unscale, look for a non-finite entry in any gradient, skip the step.
    net = sp.sketch_(model(), variant(1), planner=variant.planner)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    before = [p.detach().clone() for p in net.parameters()]
    loss = (1e6 * net(torch.randn(8, 4))).square().sum()
    scaler.scale(loss).backward()  # overflows float32
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**125
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


# --- check_unbiased ---


def test_check_unbiased_of_something_else():
    text = message(TypeError, lambda: sp.check_unbiased(0.5))
    assert "0.5" in text
    assert "Rows(0.3)" in text


def test_check_unbiased_of_a_sketch_with_a_loss():
    text = message(TypeError, lambda: sp.check_unbiased(sp.L1(1), lambda m, b: torch.zeros(())))
    assert "check_unbiased(model, loss_fn, batch)" in text


def test_check_unbiased_of_a_model_without_its_loss():
    text = message(TypeError, lambda: sp.check_unbiased(sp.sketch_(model(), sp.L1(1))))
    assert "check_unbiased(model, loss_fn, batch)" in text


def test_check_unbiased_of_a_plain_model():
    text = message(ValueError, lambda: sp.check_unbiased(model(), lambda m, b: torch.zeros(())))
    assert "no sketched layer" in text
    assert "sketch_" in text


def test_check_unbiased_with_a_loss_that_is_no_scalar():
    net = sp.sketch_(model(), sp.L1(1))
    text = message(
        ValueError,
        lambda: sp.check_unbiased(net, lambda m, x: m(x), torch.randn(8, 4), draws=2),
    )
    assert "(8, 2)" in text
    assert "scalar" in text
