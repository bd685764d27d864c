"""Bad input: the message says what was given, what is allowed and what to type."""

import math
from functools import partial

import pytest
import torch
from torch import nn

import sketchprop as sp
from law_table import METHODS, SKETCHES
from sketchprop.core.probabilities import optimal_probabilities
from sketchprop.core.sampling import sample_fixed
from sketchprop.core.vjp import Vjp

every_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.__name__)


def message(error, f):
    with pytest.raises(error) as caught:
        f()
    return str(caught.value)


def model():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.classifier = nn.Linear(3, 2)


def linear(x, weight):
    return sp.sketched_linear(torch.randn(x), torch.randn(weight), None, sp.L1(1))


def zero(model, batch):
    return torch.zeros(())


MESSAGES = {
    # budgets
    **{
        f"a fraction of {b}": (ValueError, partial(sp.L1, b), [f"budget={b!r}", "(0, 1]", "0.1"])
        for b in (0.0, -0.5, -1e-9, 1.5, math.nan, math.inf, -math.inf)
    },
    **{
        f"a rank of {b}": (ValueError, partial(sp.L1, b), [f"budget={b}", "at least 1", "16"])
        for b in (0, -3)
    },
    "a rank as a float": (ValueError, lambda: sp.L1(16.0), ["budget=16.0", "type budget=16"]),
    **{
        f"{b!r} for a budget": (TypeError, partial(sp.L1, b), [repr(b), type(b).__name__, "0.1"])
        for b in ("0.1", None, True, [0.1], 1j)
    },
    # patterns and filters
    "a pattern near a name": (
        ValueError,
        lambda: sp.sketch_(Net(), {"encodr.0": sp.L1(0.5)}),
        ["'encodr.0'", "near names", "'encoder.0'"],
    ),
    "a pattern near none": (
        ValueError,
        lambda: sp.sketch_(Net(), {"zzz": sp.L1(0.5)}),
        ["'zzz'", "'encoder.0'"],
    ),
    "a pattern where nothing is": (
        ValueError,
        lambda: sp.sketch_(nn.ReLU(), {"fc": sp.L1(0.5)}),
        ["'fc'", "the model has none"],
    ),
    "no pattern": (ValueError, lambda: sp.sketch_(model(), {}), ["{'0': Rows(0.3)}", "'4'"]),
    "a filter that takes nothing": (
        ValueError,
        lambda: sp.sketch_(model(), sp.L1(0.5), lambda m, name: False),
        ["filter_fn", "took none", "'0'", "'4'"],
    ),
    "a model without layers": (
        ValueError,
        lambda: sp.sketch_(nn.Sequential(nn.ReLU()), sp.L1(0.5)),
        ["Sequential", "nn.Linear"],
    ),
    "a model with one layer": (
        ValueError,
        lambda: sp.sketch_(nn.Linear(3, 2), sp.L1(0.5)),
        ["last one stays exact", "pass filter_fn=", "select.everything"],
    ),
    **{
        f"{s!r} for a sketch": (
            TypeError,
            lambda s=s: sp.sketch_(model(), s),
            [repr(s), "Tokens(0.3)"],
        )
        for s in (0.1, "l1", sp.L1, None)
    },
    "no sketch in a mapping": (
        TypeError,
        lambda: sp.sketch_(model(), {"0": 0.1}),
        ["'0'", "0.1", "Rows(0.3)"],
    ),
    # core functions
    "negative weights": (
        ValueError,
        lambda: optimal_probabilities(torch.tensor([1.0, -2.5]), 1),
        ["negative", "-2.5", "G.square().sum(-2)"],
    ),
    **{
        f"a rank of {r!r} that keeps nothing": (
            ValueError,
            lambda r=r: optimal_probabilities(torch.ones(4), r),
            [f"rank={r!r}", "for example rank=8"],
        )
        for r in (0, -1, math.nan, "2", None, True)
    },
    **{
        f"a rank of {r!r} that cannot be drawn": (
            ValueError,
            lambda r=r: sample_fixed(torch.full((4,), 0.5), torch.tensor(0.5), r),
            [f"rank={r}", "from 1 to 4"],
        )
        for r in (1.5, 5)
    },
    **{
        f"{method.__name__} without a weight": (
            TypeError,
            lambda method=method: method(1)(Vjp(torch.randn(3, 4))),
            [method.__name__, "weight=", "L1"],
        )
        for method in (sp.Diagonal, sp.RankConstrained, sp.ElementMask)
    },
    "a gate without a weight": (
        TypeError,
        lambda: sp.gate(torch.randn(3, 4, requires_grad=True), sp.Diagonal(1)),
        ["weight="],
    ),
    "a gate with element masks": (
        TypeError,
        lambda: sp.gate(torch.randn(3, 4), sp.ElementMask(0.5)),
        ["sketched_linear", "ColumnMask"],
    ),
    "an input that does not fit": (
        ValueError,
        lambda: linear((3, 5), (6, 4)),
        ["(3, 5)", "(6, 4)"],
    ),
    "an input without a stack": (ValueError, lambda: linear((3, 4), (2, 6, 4)), ["[2, *, 4]"]),
    # check_unbiased
    "a check of a number": (TypeError, lambda: sp.check_unbiased(0.5), ["0.5", "Rows(0.3)"]),
    "a check of a sketch with a loss": (
        TypeError,
        lambda: sp.check_unbiased(sp.L1(1), zero),
        ["check_unbiased(model, loss_fn, batch)"],
    ),
    "a check of a model without its loss": (
        TypeError,
        lambda: sp.check_unbiased(sp.sketch_(model(), sp.L1(1))),
        ["check_unbiased(model, loss_fn, batch)"],
    ),
    "a check of a plain model": (
        ValueError,
        lambda: sp.check_unbiased(model(), zero),
        ["no sketched layer", "sketch_"],
    ),
    "a check with a loss that is no scalar": (
        ValueError,
        lambda: sp.check_unbiased(
            sp.sketch_(model(), sp.L1(1)), lambda m, x: m(x), torch.randn(8, 4), draws=2
        ),
        ["(8, 2)", "scalar"],
    ),
}


@pytest.mark.parametrize(("error", "act", "words"), MESSAGES.values(), ids=MESSAGES)
def test_the_message_says_what_was_given_and_what_to_type(error, act, words):
    text = message(error, act)
    assert not [word for word in words if word not in text], text


@every_method
def test_every_method_checks_its_options(method):
    for budget in (0.0, 0):
        assert f"budget={budget}" in message(ValueError, lambda budget=budget: method(budget))
    for sampling in ("correlated", None):
        text = message(ValueError, lambda s=sampling: method(0.5, sampling=s))
        assert f"sampling={sampling!r}" in text
        assert "sampling='fixed'" in text
        assert "'independent'" in text
    with pytest.raises(TypeError):
        method(0.5, "independent")  # options are named
    with pytest.raises(AttributeError):
        method(0.5).budget = 0.1


# --- double backward ---


@pytest.mark.parametrize("variant", SKETCHES, ids=str)
def test_double_backward_names_exact(variant):
    net = sp.sketch_(model(), variant(1), planner=variant.planner)
    x = torch.randn(8, 4, requires_grad=True)
    for over in (x, net[0].weight, net[0].bias):
        (first,) = torch.autograd.grad(net(x).square().sum(), over, create_graph=True)
        text = message(RuntimeError, first.square().sum().backward)
        assert "with sketchprop.exact(model)" in text


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
