"""trial(): who is ahead follows from losses at equal seconds; time is told by a made-up clock."""

import importlib
import itertools
import json
import math
import random
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from torch import nn

import sketchprop as sp
from measure_helpers import loss_fn, make_batches, mlp
from sketchprop.layers import SketchedModule
from sketchprop.meters import Moment, Trial, Way

TRIAL = importlib.import_module("sketchprop.meters.advising.trial")


class Clock:
    """A sketched pass takes ``sketched``, another one 1, half of the batch 0.5; looking nothing."""

    def __init__(self, sketched=0.5, whole=24):
        self.now, self.sketched, self.whole = 0.0, sketched, whole

    def __call__(self):
        return self.now

    def loss(self, model, batch):
        if model.training:
            taken = any(isinstance(m, SketchedModule) for m in model.modules())
            self.now += self.sketched if taken else len(batch[1]) / self.whole
        return loss_fn(model, batch)


def learnable(count=200, rows=24):
    torch.manual_seed(7)
    w = torch.randn(8, 4)
    xs = [torch.randn(rows, 8) for _ in range(count)]
    return [(x, (x @ w).argmax(1)) for x in xs]


FEW = sp.L1(0.9)


def run(sketched, *, sketch=FEW, minutes=8, **options):
    torch.manual_seed(8)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    clock = Clock(sketched)
    given = {"minutes": minutes, "clock": clock, **options}
    return sp.trial(model, clock.loss, learnable(), optimizer, sketch, **given)


def test_what_takes_half_the_time_and_adds_little_noise_is_ahead():
    shares = []
    found = run(0.4, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1, abs=0.05)
    assert [way.name for way in found.ways] == ["exact", "L1(0.9)", "half of the batch"]
    exact, fast, half = found.ways
    assert fast.steps == pytest.approx(2.5 * exact.steps, rel=0.1)
    assert half.steps == pytest.approx(2 * exact.steps, rel=0.1)
    for way in found.ways:
        ends = [curve[-1].seconds for curve in way.curves]
        assert ends == pytest.approx([ends[0]] * 2, rel=0.05)
        assert len(way.curves[0]) == 11
        assert way.curves[0][0].seconds == 0
    assert found.gain("L1(0.9)").value > 0
    assert found.certain("L1(0.9)")
    assert found.change("L1(0.9)").value < 0.75
    assert found.change("exact").value == 1
    assert "L1(0.9) is ahead of exact" in found.headline()
    assert "less time" in found.headline()


def test_what_takes_longer_is_behind():
    found = run(3.0)
    assert found.gain("L1(0.9)").value < 0
    assert found.change("L1(0.9)").value > 1.5
    assert "L1(0.9) is behind exact" in found.headline()


def test_all_ways_begin_alike_and_a_budget_of_one_is_exact_training_bitwise():
    found = run(1.0, sketch=sp.L1(1.0))
    exact, same, _ = found.ways
    assert [c[0].loss for c in exact.curves] == [c[0].loss for c in same.curves]
    assert [[m.loss for m in c] for c in exact.curves] == [[m.loss for m in c] for c in same.curves]
    assert found.gain("L1(1.0)").value == 0
    first, second = exact.curves
    assert first[-1].loss != second[-1].loss  # other batches


def way(name, *curves):
    return Way(name, tuple(tuple(Moment(*m) for m in curve) for curve in curves))


def test_the_time_to_an_equal_loss_is_right_in_the_mean_where_losses_are_noisy():
    """True ratio 0.7; the mean of 200 trials within 3 %, one of them 8 % off (root mean square)."""
    source = random.Random(0)

    def curve(ratio):
        return [
            (10 * i, i, 0.4 + 1.6 * math.exp(-i / 4 / ratio) + source.gauss(0, 0.06) * (i > 0))
            for i in range(11)
        ]

    found = []
    for _ in range(200):
        ways = (way(name, *(curve(r) for _ in range(3))) for name, r in (("exact", 1), ("it", 0.7)))
        found.append(Trial(tuple(ways), 10, 4, 60.0).change("it"))
    values = [one.value for one in found]
    assert fmean(values) == pytest.approx(0.7, rel=0.03)
    off = math.sqrt(fmean((value / 0.7 - 1) ** 2 for value in values))
    assert off < 0.08
    # What the error says is what it is: leaving out repeats, of three, knows it within a half.
    said = math.sqrt(fmean(one.error**2 for one in found))
    assert said == pytest.approx(0.7 * off, rel=0.5)


def test_times_to_an_equal_loss_are_read_off_straight_lines():
    exact = way("exact", [(0, 0, 2.0), (10, 5, 1.0), (20, 10, 0.5)])
    fast = way("fast", [(0, 0, 2.0), (10, 9, 0.5), (20, 18, 0.4)])
    found = Trial((exact, fast), 10, 4, 60.0)
    assert found.ahead == "fast"
    # At 20 seconds exact has what fast had after 10, at 10 what fast had after 20/3.
    assert 10 / 20 < found.change("fast").value < 2 / 3
    assert math.isinf(found.change("fast").error)
    assert not found.certain("fast")  # one repeat has no error
    assert found.gain("fast").value == pytest.approx(0.1)
    slow = way("slow", [(0, 0, 2.0), (10, 2, 1.5), (20, 4, 1.0)])
    assert Trial((exact, slow), 10, 4, 60.0).change("slow").value == pytest.approx(2.0)
    stuck = way("stuck", [(0, 0, 2.0), (10, 2, 2.5), (20, 4, math.nan)])
    found = Trial((exact, stuck), 10, 4, 60.0)
    assert found.change("stuck") is None
    assert found.ahead == "exact"
    assert "not finite" in found.headline()


def test_the_answer_is_plain_data_and_a_table():
    found = run(0.5)
    data = json.loads(json.dumps(found.as_dict()))
    assert data["ahead"] == found.ahead
    assert data["compared"]["L1(0.9)"]["gain"]["value"] == found.gain("L1(0.9)").value
    assert len(data["ways"][1]["curves"]) == 2
    text = str(found)
    assert "Losses are on 4 held-out batches" in text
    assert str(found.different) in text
    with pytest.raises(KeyError, match=r"'L1\(0.9\)'"):
        found.way("L2")


def test_batches_are_not_repeated_while_there_are_new_ones_and_counted_when_they_are():
    found = run(1.0, minutes=4)
    steps = max(curve[-1].steps for curve in found.ways[0].curves)
    assert 0 < found.different <= 2 * steps + 4
    clock, model = Clock(1.0), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    few = make_batches(6)
    found = sp.trial(model, clock.loss, few, optimizer, sp.L1(0.9), minutes=3, clock=clock)
    assert found.different == 2


def test_a_loader_without_an_end_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(TRIAL, "MOST_BYTES", 20 * sum(t.nbytes for t in make_batches(1)[0]))
    clock, model = Clock(1.0), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    endless = (make_batches(1)[0] for _ in itertools.count())
    found = sp.trial(model, clock.loss, endless, optimizer, sp.L1(0.9), minutes=5, clock=clock)
    assert max(curve[-1].steps for curve in found.ways[0].curves) > 20
    assert found.different == 20


def test_a_batch_norm_that_is_frozen_stays_so():
    norm = nn.BatchNorm1d(8).eval()
    model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 4))
    clock, seen = Clock(), []

    def watched(model, batch):
        seen.append((model.training, model[1].training))
        return clock.loss(model, batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sp.trial(model, watched, make_batches(12), optimizer, FEW, minutes=3, clock=clock)
    assert set(seen) == {(True, False), (False, False)}


def test_a_training_that_diverges_is_told_of():
    found = run(0.4, minutes=3)
    lost = Moment(1.0, 2, math.nan)
    ways = [replace(way, curves=((lost,), (lost,))) for way in found.ways]
    diverged = replace(found, ways=(found.ways[0], *ways[1:]))
    assert f"Tried: {ways[1].name} diverged" in str(diverged)
    assert "Tried: exact training itself diverged" in str(replace(found, ways=tuple(ways)))
    assert diverged.ahead == "exact"


def test_bad_input_is_refused_with_a_way_out():
    model, batches = mlp(), make_batches(12)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for given, error, message in [
        ({"batches": batches[:4]}, ValueError, "to train on"),
        ({"repeats": 0}, ValueError, "repeats=0"),
        ({"optimizer": None}, TypeError, "AdamW"),
        ({"optimizer": torch.optim.SGD}, TypeError, "AdamW"),
        ({"optimizer": torch.optim.SGD(mlp().parameters(), 0.1)}, ValueError, "not the model's"),
        ({"sketch": {"9": sp.L1(0.3)}}, ValueError, "matches no layer"),
    ]:
        options = {
            "model": model, "loss_fn": loss_fn, "batches": batches, "optimizer": optimizer,
            "sketch": sp.L1(0.5), "minutes": 0.05, **given,
        }  # fmt: skip
        names = ("model", "loss_fn", "batches", "optimizer", "sketch")
        with pytest.raises(error, match=message):
            sp.trial(*[options.pop(name) for name in names], **options)


def test_a_batch_that_cannot_be_cut_has_no_control():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    clock = Clock(0.5, whole=1)
    batches = [(torch.randn(1, 8), torch.randint(4, (1,))) for _ in range(80)]
    found = sp.trial(model, clock.loss, batches, optimizer, sp.L1(0.5), minutes=2, clock=clock)
    assert [way.name for way in found.ways] == ["exact", "L1(0.5)"]
