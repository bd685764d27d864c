"""Measuring is free of side effects: every meter leaves model and machine as they were."""

import itertools
import random
import sys
from functools import partial

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sketchprop as sp
from measure_helpers import loss_fn, make_batches, mlp
from sketchprop.layers.isolation import SKETCHING, twin
from sketchprop.meters import measure_flops, measure_variance, saved_bytes, step_times
from sketchprop.sketches import Every


def tried(model, loss, batches, optimizer):
    ticks = itertools.count().__next__
    return sp.trial(model, loss, batches, optimizer, sp.L1(0.3), minutes=4, clock=ticks)


METERS = {
    "advise": lambda m, f, b, o: sp.advise(m, f, b, optimizer=o, minutes=0.05),
    "trial": tried,
    "measure": lambda m, f, b, _: sp.measure(m, f, b, draws=2, rounds=1),
    "another sketch": lambda m, f, b, _: sp.measure(m, f, b, sp.L2(0.3), draws=2, rounds=1),
    "plan": lambda m, f, b, _: sp.plan(m, f, b[0], rounds=1),
    "check": lambda m, f, b, _: sp.check_unbiased(m, f, b[0], draws=3),
    "tuner": lambda m, f, b, _: list(map(sp.Tuner(m, f, share=1.0, frozen=True), b)),
    "variance": lambda m, f, b, _: measure_variance(m, f, b, draws=2),
    "flops": lambda m, f, b, _: measure_flops(m, f, b[0]),
    "bytes": lambda m, f, b, _: saved_bytes(m, f, b[0]),
    "times": lambda m, f, b, _: step_times(m, f, b[0], rounds=1),
}


class Watched(nn.Module):
    """A layer that remembers, one that does not, a norm, one in eval mode."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.3).eval()
        self.second = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.drop(self.norm(self.first(x)).relu())
        return self.head(self.second(x).relu())


def watched():
    """A model in the middle of training: gradients, plans and running statistics are there."""
    torch.manual_seed(0)
    model = Watched()
    sp.sketch_(model, {"first": sp.L1(0.5)}, planner=Every(5))
    sp.sketch_(model, {"second": sp.L1(0.5)})
    batches = make_batches(8)
    optimizer = torch.optim.Adam(model.parameters())
    for batch in batches[:2]:
        loss_fn(model, batch).backward()
        optimizer.step()
    return model, optimizer, batches


def entries(module):
    return vars(vars(module)[SKETCHING]) if SKETCHING in vars(module) else {}


def content(value):
    """What an entry holds, all the way down."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(k): content(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [content(v) for v in value]
    return content(vars(value)) if hasattr(value, "__dict__") else repr(value)


def state(model, optimizer):
    random_states = (torch.get_rng_state().tolist(), random.getstate())
    return {
        "values": [p.tolist() for p in model.parameters()],
        "grad objects": [id(p.grad) for p in model.parameters()],
        "grads": [p.grad.tolist() for p in model.parameters()],
        "buffers": [(id(b), b.tolist()) for b in model.buffers()],
        "flags": [m.training for m in model.modules()],
        "classes": [type(m) for m in model.modules()],
        "entries": [{k: id(v) for k, v in entries(m).items()} for m in model.modules()],
        "remembered": [content(entries(m)) for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "gradient hooks": [len(p._backward_hooks or ()) for p in model.parameters()],
        "optimizer": content(optimizer.state_dict()),
        "random": (*random_states, str(numpy.random.get_state())),
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("ending", ["well", "error", "Ctrl-C"])
@pytest.mark.parametrize("meter", METERS)
def test_a_meter_leaves_no_trace(meter, ending, training):
    model, optimizer, batches = watched()
    if not training:
        model.eval()
    model.first.weight.register_hook(lambda grad: None)
    before, calls = state(model, optimizer), 0

    def loss(m, batch):
        nonlocal calls
        calls += 1
        random.random(), numpy.random.rand(), torch.rand(1)  # augmentation
        if ending != "well" and calls == 2:
            raise RuntimeError("out of cheese") if ending == "error" else KeyboardInterrupt
        if torch.is_grad_enabled():
            # A loss that looks at gradients itself, and leaves them where backward puts them.
            sum(p.square().sum() for p in m.parameters()).backward()
        return loss_fn(m, batch)

    once = meter in ("plan", "bytes")  # one pass over the model: it never comes to the second
    if ending == "well" or once:
        METERS[meter](model, loss, batches, optimizer)
    else:
        expected = RuntimeError if ending == "error" else KeyboardInterrupt
        with pytest.raises(expected):
            METERS[meter](model, loss, batches, optimizer)
    after = state(model, optimizer)
    for key, value in before.items():
        assert after[key] == value, key


def test_a_loader_that_shuffles_draws_as_if_nothing_had_been_measured():
    x, y = make_batches(1, rows=96)[0]
    loader = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)
    for meter in (sp.advise, partial(sp.measure, sketch=sp.L1(0.5), draws=2, rounds=0)):
        model, before = mlp(), torch.get_rng_state()
        meter(model, loss_fn, loader, minutes=0.1)
        assert torch.equal(torch.get_rng_state(), before)


def test_what_is_exact_inside_of_the_loss_stays_so():
    model = sp.sketch_(mlp(), sp.L1(0.5))

    def loss(m, batch):
        with sp.exact(m):
            return loss_fn(m, batch)

    assert sp.measure(model, loss, make_batches(3), draws=2, rounds=0).variance.added.value == 0


def test_a_plain_layer_keeps_nothing_of_a_sketch_that_was_tried():
    model, batches = mlp(), make_batches()
    sp.measure(model, loss_fn, batches, sp.L1(0.5), planner=Every(3), draws=2, rounds=0)
    assert all(not entries(module) for module in model.modules())
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("time", [step_times, lambda m, f, b, n: sp.plan(m, f, b, rounds=n)])
def test_timings_do_not_run_hooks_on_gradients(time):
    model, calls = sp.sketch_(mlp(), sp.L1(0.5)), []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: calls.append(1))
    batch = make_batches(1)[0]
    time(model, loss_fn, batch, 2)
    assert calls == []
    loss_fn(model, batch).backward()
    assert len(calls) == 6  # they are there again


def test_a_twin_computes_the_same_and_shares_only_memory():
    model, *_ = watched()
    model.second.register_forward_hook(lambda *a: pytest.fail("a hook of the user's ran"))
    model.second.forward = None  # as libraries that wrap a layer do
    other = twin(model.second)
    x = torch.randn(5, 16)
    out = other.forward(x)
    assert torch.equal(out, F.linear(x, model.second.weight, model.second.bias))
    before = model.second.weight.grad.clone()
    out.sum().backward()
    assert torch.equal(model.second.weight.grad, before)
    assert other.weight.data_ptr() == model.second.weight.data_ptr()
    assert other.weight.grad is not None


# --- what the meters say is what runs --------------------------------------------------------


def test_noise_below_rounding_is_none():
    """Two of four columns carry all of the gradient and two are kept: what differs is rounding."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    with torch.no_grad():
        model[1].weight[:, 2:] = 0
    batches = [torch.randn(8, 6) for _ in range(3)]
    sp.sketch_(model, {"0": sp.L1(0.5)})
    report = measure_variance(model, lambda m, x: m(x).square().mean(), batches, draws=4)
    assert str(report.relative) == "0 ± 0"
    assert report.layers[0].injected.value == 0


# --- in time ---------------------------------------------------------------------------------


def test_progress_runs_from_nothing_to_all():
    model, batches, shares = sp.sketch_(mlp(), sp.L1(0.5)), make_batches(), []
    sp.measure(model, loss_fn, batches, draws=4, rounds=0, progress=shares.append)
    assert shares == pytest.approx([(i + 1) / 12 for i in range(12)])


def test_a_time_limit_lowers_the_draws_and_gives_up_the_split(monkeypatch):
    monkeypatch.setattr(sys.modules["sketchprop.meters.measure"], "seconds_of_a_pass", lambda *_: 0)
    model, batches = sp.sketch_(mlp(), sp.L1(0.5)), make_batches()
    short = sp.measure(model, loss_fn, batches, draws=64, rounds=7, minutes=1e-9)
    assert short.variance.draws == 2
    assert short.variance.layers == ()
    assert short.times.rounds == 2
    assert short.relative.value > 0
    long = sp.measure(model, loss_fn, batches, draws=3, rounds=1, minutes=60)
    assert long.variance.draws == 3
    assert len(long.variance.layers) == 2
