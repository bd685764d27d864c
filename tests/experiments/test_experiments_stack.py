"""The MNIST protocol: replicas of a stack are independent, and each is what plain torch does."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from experiment_helpers import changed
from torch import nn

import sketchprop as sp
from experiments.data import Labelled
from experiments.lab.pictures import Parts
from experiments.lab.sweep import Run
from experiments.methods import METHODS
from experiments.mnist import stack as mnist
from experiments.mnist.study import MNIST
from sketchprop.core.sampling import systematic

WIDTHS = (784, 24, 16, 10)


@pytest.fixture(autouse=True)
def small_data(monkeypatch):
    g = torch.Generator().manual_seed(7)
    means = torch.randn(10, 784, generator=g)

    def split(count):
        labels = torch.randint(10, (count,), generator=g)
        return Labelled(means[labels] + torch.randn(count, 784, generator=g), labels)

    found = Parts(split(260), split(90), split(110))
    monkeypatch.setattr(mnist, "load", lambda *rows: found)
    return found


def cell_of(name, budget=0.25, place="all", **changes):
    settings = {"widths": WIDTHS, "epochs": 2, "batch_size": 32, **changes}
    protocol = changed(MNIST.protocol, **settings)
    return protocol.cell(METHODS[name], budget, place)


def without_time(found):
    return [{k: v for k, v in one.items() if k != "wall_seconds"} for one in found]


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.figures])
def test_a_replica_in_a_stack_gives_the_numbers_of_the_replica_alone(name):
    cell = cell_of(name, budget=0.1, widths=(784, 64, 64, 10), batch_size=64)
    runs = [Run(cell, index, seed) for seed in (3, 5) for index in (0, 2, 4)]
    together = without_time(mnist.train_stack(runs))
    for position in (1, 4):
        assert without_time(mnist.train_stack([runs[position]])) == [together[position]]
    assert without_time(mnist.train_stack(runs[:-4:-1])) == together[:-4:-1]
    assert together[1] != together[4]


@pytest.mark.parametrize("name", ["exact", "l1", "gsv-independent", "element", "control-samples"])
def test_halving_ends_the_worse_rates_of_a_seed_and_leaves_the_others_alone(name):
    """The written rule, from whole runs: what is left is bitwise what it would have been alone."""
    whole = cell_of(name, epochs=4)
    halved = replace(whole, halving=(4, 1, 3, 2, 2))
    grid = [(seed, index) for seed in (3, 5) for index in (0, 2, 4, 8)]
    runs = {place: Run(whole, place[1], place[0]) for place in grid}
    full = dict(zip(grid, without_time(mnist.train_stack(list(runs.values()))), strict=True))
    last = {}
    for seed in (3, 5):
        racing = [place for place in grid if place[0] == seed]
        for epoch, count in ((1, 3), (2, 2), (4, 0)):
            last |= dict.fromkeys(racing, epoch)
            scores = {p: (max(full[p]["validation_curve"][:epoch]), p[1]) for p in racing}
            racing = sorted(racing, key=scores.get, reverse=True)[:count]
    found = mnist.train_stack([Run(halved, index, seed) for seed, index in grid])
    assert sorted(last.values()) == [1, 1, 2, 2, 4, 4, 4, 4]
    for place, one in zip(grid, found, strict=True):
        for curve in ("validation_curve", "test_curve", "loss_curve"):
            assert one[curve] == full[place][curve][: last[place]]
        if last[place] == 4:
            assert one["clipped_fraction"] == full[place]["clipped_fraction"]


def test_a_seed_that_halves_needs_all_of_its_rates():
    cell = cell_of("l1", halving=(3, 1, 2))
    with pytest.raises(ValueError, match="needs its 3 rates in one stack"):
        mnist.train_stack([Run(cell, 0, 0), Run(cell, 1, 0)])


@pytest.mark.parametrize("name", ["exact", "l1", "l1-independent", "rcs", "gsv", "element"])
def test_a_diverging_replica_is_recorded_and_leaves_the_others_alone(name):
    cell = cell_of(name, clip=0.0)
    healthy, lost = Run(cell, 4, 0), Run(cell, -60, 1)
    first, second = without_time(mnist.train_stack([healthy, lost]))
    assert [first] == without_time(mnist.train_stack([healthy]))
    assert first["diverged_epoch"] == 0
    assert second["diverged_epoch"] == 1
    assert second["test_curve"] == [0.0, 0.0]
    assert second["loss_curve"][0] is None


@pytest.mark.parametrize("clip", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("name", ["exact", "l1", "ds-independent"])
def test_a_step_is_clipped_sgd_of_plain_torch(small_data, name, clip):
    """Two layers of reference: nn.Linear's forward, clip_grad_norm_ and torch's SGD."""
    cell = cell_of(name, clip=clip)
    runs = [Run(cell, 0, 11), Run(cell, 3, 12)]
    stack = mnist.Stack(cell, runs)
    start = [[p[r].detach().clone() for p in (*stack.weights, *stack.biases)] for r in (0, 1)]
    x, labels = (
        small_data.train.images[:64].view(2, 32, -1),
        small_data.train.labels[:64].view(2, -1),
    )
    stack.step(x, labels)
    clipped = []
    for r, run in enumerate(runs):
        parameters = [nn.Parameter(p) for p in start[r]]
        draws = mnist.Stack(cell, [run])
        h = x[r]
        for i in range(3):
            source = draws.uniforms[i]

            def own(p, shape, source=source):
                return source(p, (1, *shape))[0]

            h = sp.sketched_linear(
                h, parameters[i], parameters[3 + i], draws.sketches[i], uniforms=own
            )
            h = h.relu() if i < 2 else h
        F.cross_entropy(h, labels[r]).backward()
        if clip:
            clipped.append(float(nn.utils.clip_grad_norm_(parameters, clip)) > clip)
        torch.optim.SGD(parameters, run.learning_rate).step()
        for ours, theirs in zip((*stack.weights, *stack.biases), parameters, strict=True):
            torch.testing.assert_close(ours[r], theirs, rtol=1e-5, atol=1e-6)
    assert stack.clipped.tolist() == [float(c) for c in clipped or (0, 0)]


def test_initial_weights_are_those_of_a_linear_layer():
    weights, biases = mnist._initial((400, 50, 10), [1, 2])
    assert [w.shape for w in weights] == [(2, 50, 400), (2, 10, 50)]
    assert weights[0].abs().max() <= 1 / 20
    # uniform in ±1/√d: standard deviation 1/√(3d), over 40000 draws within 4 standard errors
    assert abs(float(weights[0].detach().std()) * 1200**0.5 - 1) < 4 * 0.447 / 40000**0.5
    assert biases[1].abs().max() <= 1 / 50**0.5
    assert not torch.equal(weights[0][0], weights[0][1])


def test_the_sample_control_is_a_smaller_minibatch(small_data):
    """One draw in the last layer: every layer's gradient is that of the kept samples alone."""
    cell = cell_of("control-samples", clip=0.0)
    run = Run(cell, 0, 4)
    stack, draws = mnist.Stack(cell, [run]), mnist.Stack(cell, [run])
    before = [p.detach().clone() for p in (*stack.weights, *stack.biases)]
    x, labels = small_data.train.images[:32], small_data.train.labels[:32]
    stack.step(x[None], labels[None])
    assert [source is None for source in draws.uniforms] == [True, True, False]
    p = torch.full((32,), 0.25, dtype=torch.float64)
    kept = systematic(p, draws.uniforms[2](p, (1,))[0], 8)
    parameters = [nn.Parameter(p[0]) for p in before]
    h = x[kept]
    for i in range(3):
        h = F.linear(h.relu() if i else h, parameters[i], parameters[3 + i])
    F.cross_entropy(h, labels[kept]).backward()
    for after, start in zip((*stack.weights, *stack.biases), parameters, strict=True):
        torch.testing.assert_close(after[0], start - start.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "place", "ranks"),
    [
        ("l1", "all", [6, 4, 2]),
        ("l1", "first", [6, 16, 10]),
        ("l1", "last", [24, 16, 2]),
        ("l1-independent", "all", [6, 4, 2.5]),
        ("control-samples", "all", [24, 16, 8]),
        ("exact", "all", [24, 16, 10]),
    ],
)
def test_the_rank_of_each_layer_is_recorded(name, place, ranks):
    cell = cell_of(name, place=place)
    assert mnist.train_stack([Run(cell, 0, 0)])[0]["ranks"] == ranks


def test_training_learns_and_clipping_is_counted():
    cell = cell_of("exact", epochs=6)
    found = mnist.train_stack([Run(cell, 2, 0), Run(cell, 40, 0)])
    assert found[0]["test_curve"][-1] > 95
    assert found[1]["test_curve"][-1] < 50  # a rate of 1e-10 learns nothing
    assert 0 < found[0]["clipped_fraction"] < 1
    assert len(found[0]["validation_curve"]) == 6


def test_draws_do_not_repeat_and_differ_between_layers_and_seeds():
    p = torch.ones(2, 5)
    source = mnist.Uniforms("layer", [1, 2])
    drawn = torch.stack([source(p, (2, 5)) for _ in range(3 * mnist.AHEAD // 5)])
    assert drawn.unique().numel() == drawn.numel()
    other = mnist.Uniforms("another", [1])(p, (1, 5))
    assert not torch.equal(other[0], drawn[0, 0])


def test_replicas_of_different_cells_are_refused():
    with pytest.raises(ValueError, match="learning rate and seed only"):
        mnist.train_stack([Run(cell_of("l1"), 0, 0), Run(cell_of("l2"), 0, 0)])
