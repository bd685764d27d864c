"""The MNIST protocol: replicas of a stack are independent, and each is what plain torch does."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from experiment_helpers import changed, without
from torch import nn

import sketchprop as sp
from experiments.data import Labelled
from experiments.lab.pictures import Parts
from experiments.lab.sweep import Run
from experiments.methods import METHODS
from experiments.mnist import stack as mnist
from experiments.mnist.study import MNIST

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


def trained(runs):
    return without(mnist.train_stack(runs), "wall_seconds")


@pytest.mark.parametrize("name", ["exact", "rcs", "gsv-independent", "element", "sample"])
def test_a_replica_in_a_stack_gives_the_numbers_of_the_replica_alone(name):
    cell = cell_of(name, budget=0.1, widths=(784, 64, 64, 10), batch_size=64)
    runs = [Run(cell, index, seed) for seed in (3, 5) for index in (0, 2, 4)]
    together = trained(runs)
    assert trained([runs[1]]) == [together[1]]
    assert trained(runs[:-4:-1]) == together[:-4:-1]
    assert together[1] != together[4]


@pytest.mark.parametrize("name", ["l1", "control-samples"])
def test_halving_ends_the_worse_rates_of_a_seed_and_leaves_the_others_alone(name):
    """The written rule, from whole runs: what is left is bitwise what it would have been alone."""
    whole = cell_of(name, epochs=4)
    halved = replace(whole, halving=(4, 1, 3, 2, 2))
    grid = [(seed, index) for seed in (3, 5) for index in (0, 2, 4, 8)]
    runs = {place: Run(whole, place[1], place[0]) for place in grid}
    full = dict(zip(grid, trained(list(runs.values())), strict=True))
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


@pytest.mark.parametrize("name", ["l1-independent", "gsv"])
def test_a_diverging_replica_is_recorded_and_leaves_the_others_alone(name):
    cell = cell_of(name, clip=0.0)
    healthy, lost = Run(cell, 4, 0), Run(cell, -60, 1)
    first, second = trained([healthy, lost])
    assert [first] == trained([healthy])
    assert first["diverged_epoch"] == 0
    assert second["diverged_epoch"] == 1
    assert second["test_curve"] == [0.0, 0.0]
    assert second["loss_curve"][0] is None


@pytest.mark.parametrize(("name", "clip"), [("exact", 0.0), ("l1", 0.05), ("ds-independent", 1.0)])
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


@pytest.mark.parametrize(
    ("name", "place", "ranks"),
    [
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


def test_replicas_of_different_cells_are_refused():
    with pytest.raises(ValueError, match="learning rate and seed only"):
        mnist.train_stack([Run(cell_of("l1"), 0, 0), Run(cell_of("l2"), 0, 0)])
