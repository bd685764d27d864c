"""How many more steps noise costs: SGD, and optimizers that divide by the root of the square."""

import math

import pytest
import torch
from torch import nn

import sketchprop as sp
from sketchprop.meters.noise.pace import Pace, adaptive, noise_by_parameter, ready

SIZES, SQUARES, SIGNAL = (8, 2, 5), (4.0, 1.0, 0.5), (0.5, 0.4, 0.01)
NOISE = (6.0, 0.0, 0.7)


def best_gain(noise):
    """The most that one step gains over all rates, by the model of ``pace.py``: a line of signal
    less a parabola of curvature H = s times the mean square of the step."""
    line = parabola = 0.0
    for size, square, signal, added in zip(SIZES, SQUARES, SIGNAL, noise, strict=True):
        s, v = square / size, (square + added) / size
        line += signal / math.sqrt(v)
        parabola += size * s * v / v
    return max(rate * line - rate**2 * parabola / 2 for rate in (k / 20_000 for k in range(20_000)))


def test_steps_with_adam_are_what_the_best_rate_gains_without_noise_over_with_it():
    wanted = best_gain((0.0, 0.0, 0.0)) / best_gain(NOISE)
    assert wanted > 1.1
    assert Pace(SIZES, SQUARES, SIGNAL, divides=True).steps(NOISE) == pytest.approx(
        wanted, rel=1e-4
    )


@pytest.mark.parametrize("kind", ["Adam", "Adamax", "RMSprop", "SGD"])
def test_it_is_ready_after_a_step(kind):
    layer = nn.Linear(2, 2)
    optimizer = getattr(torch.optim, kind)(layer.parameters())
    assert ready(optimizer) == (kind in ("SGD", "RMSprop"))  # by its groups it is like SGD
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert ready(optimizer)


def test_steps_with_sgd_grow_with_the_mean_square_of_the_gradient():
    pace = Pace(SIZES, SQUARES, SIGNAL, divides=False)
    assert pace.total == 5.5
    assert pace.steps(NOISE) == pytest.approx((5.5 + 6.7) / 5.5)


@pytest.mark.parametrize("divides", [True, False])
def test_no_noise_costs_nothing_and_noise_in_proportion_costs_as_a_smaller_batch(divides):
    pace = Pace(SIZES, SQUARES, SIGNAL, divides)
    assert pace.steps((0.0, 0.0, 0.0)) == 1
    assert pace.steps([0.4 * s for s in SQUARES]) == pytest.approx(1.4)


@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_noise_that_is_not_finite_in_one_parameter_is_not_finite_in_all(divides, bad):
    assert not math.isfinite(Pace(SIZES, SQUARES, SIGNAL, divides).steps((0.0, bad, 0.0)))


def test_with_adam_noise_where_there_is_no_gradient_does_not_count():
    """As that of the bias of keys in attention, which moves no output."""
    pace = Pace((4, 4), (1.0, 1e-14), (0.5, 1e-14), divides=True)
    assert pace.steps((0.0, 5.0)) == pytest.approx(1, abs=1e-6)
    assert Pace((4, 4), (1.0, 0.0), (0.5, 0.0), divides=True).steps((0.0, 5.0)) == 1


def test_what_rounding_leaves_is_no_noise():
    g = [torch.randn(4, 3), torch.randn(5)]
    assert noise_by_parameter([x * (1 + 1e-7) for x in g], g) == [0.0, 0.0]
    assert noise_by_parameter([g[0] + 1, g[1]], g) == pytest.approx([12.0, 0.0])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_advice_counts_steps_as_the_optimizer_of_the_user_does(kind):
    """Most of ‖g‖² is in the last layer, which is exact: SGD hardly sees other noise."""
    torch.manual_seed(3)
    hidden = (nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    model = nn.Sequential(*hidden, nn.Linear(64, 4))
    model[-1].weight.data *= 0.1
    optimizer = kind(model.parameters(), 1e-3)
    batches = [(torch.randn(64, 24), torch.randint(4, (64,))) for _ in range(6)]

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    for batch in batches:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    assert adaptive(optimizer) == (kind is torch.optim.AdamW)
    advice = sp.advise(model, loss_fn, batches, optimizer=optimizer, minutes=0.2)
    option = next(o for o in advice.options if o.name == "L1(0.3)")

    grads = []
    for batch in batches:
        grads.append(torch.autograd.grad(loss_fn(model, batch), list(model.parameters())))
    squares = [sum(float(g[i].square().sum()) for g in grads) / 6 for i in range(6)]
    signal = [float((sum(g[i] for g in grads) / 6).square().sum()) for i in range(6)]
    pace = Pace(tuple(p.numel() for p in model.parameters()), tuple(squares), tuple(signal),
                adaptive(optimizer))  # fmt: skip
    sp.sketch_(model, sp.L1(0.3))
    noise = [0.0] * 6
    for k in range(300):
        g = torch.autograd.grad(loss_fn(model, batches[k % 3]), list(model.parameters()))
        for i in range(6):
            noise[i] += float((g[i] - grads[k % 3][i]).square().sum()) / 300
    wanted = pace.steps(noise) - 1
    assert option.noise == pytest.approx(wanted, rel=0.35)
    other = Pace(pace.sizes, pace.squares, pace.signal, not pace.divides).steps(noise) - 1
    assert max(other, wanted) > 2 * min(other, wanted)  # the two kinds of optimizers differ here
