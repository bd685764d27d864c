"""Batches are told apart by what they hold, whatever objects a loader makes of it."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sketchprop as sp
from measure_helpers import loss_fn, make_batches, mlp
from sketchprop.meters.batches import contents, different, halved, usual_first

X = torch.arange(12.0).reshape(4, 3)


@dataclass
class Pair:
    inputs: torch.Tensor
    name: str


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (X, X.clone(), X + 1),
        ((X, "a"), (X.clone(), "a"), (X, "b")),
        ({"x": X}, {"x": X.clone()}, {"y": X}),
        (Pair(X, "a"), Pair(X.clone(), "a"), Pair(X + 1, "a")),
        (X, X.t().contiguous().t(), X.reshape(3, 4)),
        (X, X.clone(), X.to(torch.bfloat16)),
        ((X, lambda: 0), None, (X, lambda: 0)),
    ],
    ids=["tensor", "tuple", "dict", "dataclass", "strides", "dtype", "not pickled"],
)
def test_equal_contents_are_one_batch_and_others_are_others(one, same, other):
    assert contents(one) == contents(one)
    if same is not None:
        assert contents(one).whole == contents(same).whole
    assert contents(one).whole != contents(other).whole
    assert len(different([one, one, other])) == 2


def test_samples_are_known_again_in_other_batches():
    y = torch.tensor([0, 1, 0, 1])
    first, shuffled = contents((X, y)), contents((X[[3, 1]], y[[3, 1]]))
    assert set(shuffled.samples) < set(first.samples)
    assert set(contents((X, 1 - y)).samples).isdisjoint(first.samples)
    assert contents("no tensor").samples == ()


def test_halves_are_a_whole():
    assert torch.equal(torch.cat([halved(X), halved(X, second=True)]), X)
    assert halved(X[:1]) is None
    assert halved("no tensor") is None
    assert halved((torch.ones(5, 2, 3), torch.ones(2))) is None  # samples come second


def test_the_batch_of_median_size_comes_first():
    batches = [torch.ones(n) for n in (9, 1, 5, 7, 3)]
    assert [len(batch) for batch in usual_first(batches)] == [5, 9, 1, 7, 3]
    assert usual_first([]) == []


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_trial_never_trains_on_what_it_keeps_apart(shuffle):
    """Also in the second pass of a loader, which makes new objects of the same samples."""
    data = torch.randn(96, 8)
    data[:, 0] = torch.arange(96.0)
    seen = {True: set(), False: set()}

    def watched(model, batch):
        seen[torch.is_grad_enabled()].update(batch[0][:, 0].int().tolist())
        return nn.functional.cross_entropy(model(batch[0] / 96), batch[1])

    loader = DataLoader(TensorDataset(data, torch.arange(96) % 4), batch_size=8, shuffle=shuffle)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    ticks = itertools.count().__next__
    found = sp.trial(model, watched, loader, optimizer, sp.L1(0.5), minutes=8, clock=ticks)
    assert len(seen[False]) == 32
    assert seen[True].isdisjoint(seen[False])
    assert found.different <= 8


def test_an_outlier_changes_noise_little_and_is_told_of():
    def ask(scale):
        batches = make_batches(8)
        batches[5] = (scale * batches[5][0], batches[5][1])
        torch.manual_seed(0)
        advice = sp.advise(mlp(), loss_fn, batches, minutes=0.5)
        return {option.name: option.noise for option in advice.options}["Rows(0.3)"], advice

    (calm, plain), (noise, outlying) = ask(1), ask(30)
    assert calm / 4 < noise < 4 * calm
    assert any(text.startswith("batch 6 of 8") for text in outlying.warnings)
    assert not any(text.startswith("batch") for text in plain.warnings)


def test_a_model_without_a_layer_to_sketch_is_said_to_have_none():
    class Unknown(nn.Linear):
        pass

    for ask in (
        lambda model: sp.advise(model, loss_fn, make_batches(2)),
        lambda model: sp.plan(model, loss_fn, make_batches(1)[0]),
    ):
        with pytest.raises(ValueError, match="Sequential has no layer that can be sketched"):
            ask(nn.Sequential(Unknown(8, 4)))
