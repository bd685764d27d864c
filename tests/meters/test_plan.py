"""plan(): shapes and shares are facts, times are only asked for, never asserted."""

import importlib
import json

import pytest
import torch
from torch import nn

import sketchprop as sp
from sketchprop.core.stopwatch import in_turns
from sketchprop.layers import SketchedModule
from sketchprop.meters import Times
from sketchprop.meters.cost.timing import compare
from sketchprop.sketches import ForwardRows
from sketchprop.zoo import ViT

PLAN = importlib.import_module("sketchprop.meters.plan")
"""The module; the name itself is the function's."""


def square(model, x):
    return model(x).square().mean()


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 12)
        self.body = nn.Linear(12, 12)
        self.conv = nn.Conv1d(12, 6, 3)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(6, 5)

    def forward(self, tokens):
        x = self.body(torch.relu(self.body(self.embed(tokens))))
        return self.head(self.conv(x.mT).mT)


def test_a_pair_is_planned_like_any_sketch():
    pair = sp.Split(input=sp.L1(0.1), weight=ForwardRows(0.1))
    report = sp.plan(
        nn.Sequential(nn.Linear(8, 8)), square, torch.randn(4, 8), rounds=1, sketch=pair
    )
    (line,) = report.layers
    assert line.shape == (8, 8)
    assert "ForwardRows(0.1)" in repr(pair) == repr(report.sketch)


def test_a_line_for_each_layer_that_takes_part():
    batch = torch.randint(0, 10, (4, 7))
    report = sp.plan(Shared(), square, batch, sketch=sp.L1(0.1), rounds=1)
    lines = {line.layer: line for line in report.layers}
    assert list(lines) == ["body", "conv", "head"]
    assert (lines["body"].rows, lines["body"].shape, lines["body"].uses) == (28, (12, 12), 2)
    assert (lines["conv"].rows, lines["conv"].shape) == (4 * 5, (6, 36))
    assert lines["conv"].kind == "Conv1d"
    assert all(line.seconds > 0 for line in report.layers)


@pytest.fixture
def slow_exact(monkeypatch, request):
    """A machine on which exact layers take 1 s and sketched ones 0.28 s, or what is asked for."""
    seen, times = [], (1.0, getattr(request, "param", 0.28))

    def fake(actions, rounds, device):
        seen.append(len(actions))
        return [[seconds] * 3 for seconds in times[: len(actions)]]

    monkeypatch.setattr(PLAN, "in_turns", fake)
    return seen


def test_worth_follows_from_the_times(slow_exact):
    model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 20), nn.Linear(20, 20))
    taken = sp.select.everything
    x, sketch = torch.randn(16, 8), sp.L1(0.1)
    report = sp.plan(model, square, x, sketch=sketch, filter_fn=taken, rounds=1)
    assert report.backward_seconds == 1.0
    for line in report.layers:
        assert line.ratio == pytest.approx(0.28)
        assert line.worth
        assert line.saved_seconds == pytest.approx(0.72)
    # The backward itself, the first layer, and one timing for the two that are alike.
    assert slow_exact == [1, 2, 2]
    assert list(report.worthwhile) == ["0", "2", "3"]
    sp.sketch_(model, report.worthwhile)
    assert all(m.sketch == sketch for m in model if isinstance(m, nn.Linear))


def test_unless_told_otherwise_it_plans_kept_tokens(slow_exact):
    vit = ViT(dim=16, depth=2, heads=2, hidden=32)
    report = sp.plan(vit, square, torch.randn(2, 3, 32, 32), rounds=1)
    assert report.sketch == sp.Tokens(0.3)
    assert {"blocks.0", "blocks.1"} <= {line.layer for line in report.layers}


@pytest.mark.parametrize("sketch", [sp.L1(0.1), sp.Rows(0.1), sp.Tokens(0.3)], ids=repr)
def test_what_is_worthwhile_is_what_sketch_takes(slow_exact, sketch):
    for model in (
        nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 20), nn.Linear(20, 20)),
        nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 4)),
    ):
        report = sp.plan(model, square, torch.randn(16, 5, 8), sketch=sketch, rounds=1)
        left = [line.note for line in report.layers if not line.worth]
        assert all("unless filter_fn" in note for note in left)
        sp.sketch_(model, sketch)
        sketched = [n for n, m in model.named_modules() if isinstance(m, SketchedModule)]
        assert list(report.worthwhile) == sketched


@pytest.mark.parametrize("slow_exact", [1.2], indirect=True)
def test_a_layer_that_gets_slower_is_not_worth_it(slow_exact):
    layer = nn.Sequential(nn.Linear(8, 20))
    report = sp.plan(layer, square, torch.randn(16, 8), sketch=sp.L1(0.1))
    (line,) = report.layers
    assert not line.worth
    assert "too small to gain" in str(report)
    assert report.worthwhile == {}
    assert report.backward_ratio == 1


def test_what_a_sketch_cannot_take_is_said():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1))
    report = sp.plan(model, square, torch.randn(2, 3, 6, 6), sketch=sp.SampleMask(0.5), rounds=1)
    first, second = report.layers
    assert first.ratio is None
    assert not first.worth
    assert "column sketch" in first.note
    assert second.ratio is not None
    whole = sp.plan(nn.Linear(4, 4), square, torch.randn(2, 4), sketch=sp.L1(1.0), rounds=1)
    assert whole.layers[0].note == "the budget keeps everything"


def test_attention_is_planned_whole():
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    report = sp.plan(model, square, torch.randn(3, 5, 16), sketch=sp.L1(0.1), rounds=1)
    assert [line.layer for line in report.layers] == ["self_attn", "linear1", "linear2"]
    attention = report.layers[0]
    assert attention.rows == 15


def test_a_batch_of_any_kind_goes_to_the_loss():
    report = sp.plan(
        nn.Linear(4, 6), lambda m, b: m(b["x"]).sum(), {"x": torch.randn(5, 4)}, rounds=1
    )
    assert report.layers[0].rows == 5
    data = json.loads(json.dumps(report.as_dict()))
    assert data["layers"][0]["layer"] == ""
    assert "(model)" in str(report)


def test_bad_input():
    with pytest.raises(ValueError, match="no layer that can be sketched"):
        sp.plan(nn.ReLU(), square, torch.randn(3))
    with pytest.raises(ValueError, match="without a graph"):
        sp.plan(nn.Linear(3, 3).requires_grad_(False), square, torch.randn(3, 3))
    with pytest.raises(ValueError, match="rounds=0"):
        sp.plan(nn.Linear(3, 3), square, torch.randn(3, 3), rounds=0)


def test_turns_are_taken_and_compared_in_pairs():
    order = []
    seconds = in_turns(
        [lambda: order.append("e"), lambda: order.append("s")], 3, torch.device("cpu")
    )
    # One round of warming up, then three; each action once in a round, in changing order.
    assert [sorted(order[i : i + 2]) for i in range(0, 8, 2)] == [["e", "s"]] * 4
    assert [len(s) for s in seconds] == [3, 3]
    times = compare([1.0, 10.0, 2.0], [0.5, 5.0, 1.5])
    assert times == Times(2.0, 1.5, 0.5, 0.0, 3)
