"""Saved bytes: unique storages, parameters excluded, what others keep anyway."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sketchprop as sp
from sketchprop.meters import saved_bytes

B = 32


def total(output):
    return output.square().sum()


def run(model, batch):
    return total(model(batch))


def test_a_shared_buffer_counts_once_and_parameters_not_at_all():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    report = saved_bytes(model, run, torch.randn(B, 8))
    # relu keeps its output, which is the next layer's input; square keeps the last output; the
    # first layer keeps the batch, which is the user's.
    assert report.total == 4 * (B * 16 + B * 4)
    first, second = report.layers
    assert (first.layer, first.saved, first.shared) == ("0", 4 * B * 8, 4 * B * 8)
    assert (second.layer, second.saved, second.shared) == ("2", 4 * B * 16, 4 * B * 16)


def test_what_only_the_layer_keeps_is_its_own():
    model = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Dropout(0.5), nn.Linear(16, 4))
    last = saved_bytes(model, run, torch.randn(B, 8)).layers[-1]
    assert last.saved == 4 * B * 16
    assert last.shared == 0


def test_a_view_keeps_its_whole_storage():
    model = nn.Linear(4, 2)

    def narrow(m, x):
        return total(m((3 * x)[:, :4]))

    report = saved_bytes(model, narrow, torch.randn(B, 64))
    assert report.layers[0].saved == 4 * B * 64


def test_a_frozen_weight_needs_no_input():
    model = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Dropout(0.5), nn.Linear(16, 4))
    model[3].weight.requires_grad_(False)
    for _ in range(2):
        assert saved_bytes(model, run, torch.randn(B, 8)).layers[-1].saved == 0
        sp.sketch_(model, sp.L1(0.5), lambda module, name: True)


@pytest.mark.parametrize("sketch", [sp.L1(0.25), sp.Diagonal(0.25), sp.SampleMask(0.25)])
def test_sampling_in_backward_saves_what_the_exact_layer_saves(sketch):
    """The input must be there whole until backward: no more than exact, and no less."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 4))
    batch = torch.randn(B, 8)
    exact = saved_bytes(model, run, batch)
    sp.sketch_(model, sketch)
    assert saved_bytes(model, run, batch) == exact
    with sp.exact(model):
        assert saved_bytes(model, run, batch) == exact


def test_checkpointed_activations_are_not_saved():
    body = nn.Sequential(nn.Linear(8, 64), nn.Sigmoid(), nn.Linear(64, 8))

    def recompute(m, x):
        return total(checkpoint(m, x, use_reentrant=False))

    batch = torch.randn(B, 8)
    kept, plain = saved_bytes(body, recompute, batch), saved_bytes(body, run, batch)
    assert kept.total < plain.total - 4 * B * 64 + 1
