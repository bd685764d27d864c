"""where="faster": decisions, their memory, and what is left behind (nothing)."""

from __future__ import annotations

import copy
import json
import multiprocessing
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sketchprop as sp
from sketchprop.layers import faster
from sketchprop.layers.faster import Decision, Judge, cache_file, time_layer


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SKETCHPROP_CACHE", str(tmp_path / "cache"))


def network():
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.Linear(12, 3))


def answer(monkeypatch, ratios):
    """Replaces the stop-watch: a ratio for each layer by its number of inputs."""
    asked = []

    def timer(layer, inputs):
        asked.append(tuple(inputs[0].shape))
        return Decision(ratios[layer.in_features], 1.0, ratios[layer.in_features])

    monkeypatch.setattr(faster, "time_layer", timer)
    return asked


def sketched_layers(model, x):
    """Which layers record a sketched backward on ``x``."""
    kinds = []
    for module in model:
        x = module(x)
        kinds.append("Sketched" in type(x.grad_fn).__name__)
    return kinds


def test_the_faster_way_is_taken_layer_by_layer(monkeypatch):
    asked = answer(monkeypatch, {6: 1.3, 12: 0.4})
    model = sp.sketch_(network(), sp.L1(0.3), where="faster")
    assert "run one training step" in str(sp.summary(model))
    assert sketched_layers(model, torch.randn(10, 6)) == [False, False, True, False]
    assert asked == [(10, 6), (10, 12)]
    sketched_layers(model, torch.randn(10, 6))
    assert len(asked) == 2  # a shape is timed once
    sketched_layers(model, torch.randn(20, 6))
    assert len(asked) == 4  # another shape is another question
    text = str(sp.summary(model))
    assert "exact is faster: 1.3 ms sketched, 1 ms exact at 20 × 6" in text
    assert "faster: 0.4 ms sketched" in text


def test_exact_layers_are_bitwise_exact(monkeypatch):
    answer(monkeypatch, {6: 2.0, 12: 2.0})
    model = network()
    other = sp.sketch_(copy.deepcopy(model), sp.L1(0.3), where="faster")
    x = torch.randn(10, 6)
    for m in (model, other):
        m(x).square().sum().backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_decisions_are_remembered_in_a_file(monkeypatch):
    asked = answer(monkeypatch, {6: 1.3, 12: 0.4})
    x = torch.randn(10, 6)
    sketched_layers(sp.sketch_(network(), sp.L1(0.3), where="faster"), x)
    content = json.loads(cache_file().read_text())
    assert len(content) == 2
    (key, *_) = content
    for word in ("SketchedLinear", "L1(0.3)", "(10, 6)", "float32", "cpu", "threads", "torch"):
        assert word in key
    again = sp.sketch_(network(), sp.L1(0.3), where="faster")
    assert sketched_layers(again, x) == [False, False, True, False]
    assert len(asked) == 2
    sketched_layers(sp.sketch_(network(), sp.L1(0.2), where="faster"), x)
    assert len(asked) == 4  # another sketch is another question
    torch.set_num_threads(torch.get_num_threads() + 1)
    try:
        sketched_layers(sp.sketch_(network(), sp.L1(0.3), where="faster"), x)
    finally:
        torch.set_num_threads(torch.get_num_threads() - 1)
    assert len(asked) == 6  # and so is another number of threads


BROKEN = ["", "{", "[1, 2]", '{"a": 1}', '{"a": {"ratio": 2}}', "[" * 100_000]


@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_is_timed_over(monkeypatch, content):
    asked = answer(monkeypatch, {6: 1.3, 12: 0.4})
    cache_file().parent.mkdir(parents=True)
    cache_file().write_text(content)
    sketched_layers(sp.sketch_(network(), sp.L1(0.3), where="faster"), torch.randn(10, 6))
    assert len(asked) == 2
    assert len(json.loads(cache_file().read_text())) == 2


@pytest.mark.parametrize("wrong", [None, "fast", [1], True, float("nan"), -1.0])
def test_entries_of_the_wrong_kind_are_timed_over(monkeypatch, wrong):
    asked = answer(monkeypatch, {6: 1.3, 12: 0.4})
    x = torch.randn(10, 6)
    sketched_layers(sp.sketch_(network(), sp.L1(0.3), where="faster"), x)
    content = json.loads(cache_file().read_text())
    spoilt = {key: {**entry, "ratio": wrong} for key, entry in content.items()}
    cache_file().write_text(json.dumps(spoilt))
    sketched_layers(sp.sketch_(network(), sp.L1(0.3), where="faster"), x)
    assert len(asked) == 4
    assert json.loads(cache_file().read_text()) == content


def test_a_user_without_a_home_has_a_cache(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SKETCHPROP_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert Path(tempfile.gettempdir()) in cache_file().parents


def test_a_full_disk_leaves_nothing_half_written(monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    answer(monkeypatch, {6: 1.3, 12: 0.4})
    monkeypatch.setattr(faster.json, "dump", full)
    model = sp.sketch_(network(), sp.L1(0.3), where="faster")
    with pytest.warns(UserWarning, match="No space left"):
        sketched_layers(model, torch.randn(10, 6))
    assert list(cache_file().parent.iterdir()) == []


def write_decisions(first):
    for k in range(first, first + 60):
        faster._write_cache(f"layer {k}", Decision(0.5, 1.0, 0.5))


def test_two_processes_on_one_cache_never_show_half_a_file():
    """What one of them loses to the other is timed again; nothing is broken or left over."""
    faster._write_cache("before", Decision(0.5, 1.0, 0.5))
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=write_decisions, args=(first,)) for first in (0, 1000)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert "before" in json.loads(cache_file().read_text())
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert [path.name for path in cache_file().parent.iterdir()] == ["faster.json"]
    known = faster._read_cache()
    assert {"layer 59", "layer 1059"} & known.keys()


def test_timing_in_forward_adds_nothing_to_gradients():
    model = sp.sketch_(network(), sp.L1(0.3), where="faster", accumulate=True)
    model(torch.randn(10, 6)).sum().backward()
    model.zero_grad(set_to_none=False)
    model(torch.randn(7, 6))  # another shape: timed anew, in forward
    assert all(float(p.grad.abs().sum()) == 0 for p in model.parameters())


def test_timing_runs_no_hook_on_a_weight():
    model = sp.sketch_(network(), sp.L1(0.3), where="faster")
    calls = []
    model[0].weight.register_hook(lambda grad: calls.append(1))
    model(torch.randn(10, 6)).sum().backward()
    assert calls == [1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_timing_under_activation_checkpointing(reentrant):
    model = sp.sketch_(network(), sp.L1(0.3), where="faster")
    x = torch.randn(10, 6, requires_grad=True)
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert all(m.sketching.judge.decisions for m in model if hasattr(m, "sketching"))
    assert all(p.grad is not None for p in model.parameters())


def test_a_folder_that_cannot_be_written_is_a_warning(monkeypatch, tmp_path):
    answer(monkeypatch, {6: 1.3, 12: 0.4})
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SKETCHPROP_CACHE", str(tmp_path / "file" / "below"))
    model = sp.sketch_(network(), sp.L1(0.3), where="faster")
    with pytest.warns(UserWarning, match="SKETCHPROP_CACHE"):
        sketched_layers(model, torch.randn(10, 6))


@pytest.mark.parametrize(
    ("sketch", "planner"),
    [(sp.L1(0.3), None), (sp.L1(0.3), sp.Every(3)), (sp.GradientSVD(0.3), None)],
    ids=str,
)
def test_the_real_stop_watch_leaves_nothing_behind(sketch, planner):
    model = sp.sketch_(network(), sketch, where="faster", planner=planner)
    calls = []
    model[0].register_forward_hook(lambda *a: calls.append(1))
    x = torch.randn(10, 6)
    state = torch.get_rng_state()
    decision = time_layer(model[0], (x,))
    assert torch.equal(state, torch.get_rng_state())
    assert decision.ratio > 0
    assert decision.exact_ms > 0
    assert calls == []
    assert all(p.grad is None for p in model.parameters())
    assert isinstance(model[0].sketching.judge, Judge)
    assert not model[0].sketching.exact
    if planner is not None:
        assert model[0].sketching.planner._known == {}


def test_convolutions_and_attention_are_timed_too():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1))
    sp.sketch_(model, sp.L1(0.3), where="faster")
    model(torch.randn(2, 3, 6, 6)).sum().backward()
    assert all(len(m.sketching.judge.decisions) == 1 for m in model if hasattr(m, "sketching"))
    attention = nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True))
    sp.sketch_(attention, sp.L1(0.3), sp.select.everything, where="faster")
    x = torch.randn(2, 5, 8)
    attention[0](x, x, x)[0].sum().backward()
    assert len(attention[0].sketching.judge.decisions) == 1


def test_eval_and_exact_ask_nobody(monkeypatch):
    asked = answer(monkeypatch, {6: 0.1, 12: 0.1})
    model = sp.sketch_(network(), sp.L1(0.3), where="faster")
    model.eval()(torch.randn(10, 6))
    with sp.exact(model.train()):
        model(torch.randn(10, 6))
    with torch.no_grad():
        model(torch.randn(10, 6))
    assert asked == []


def test_a_compiled_model_takes_the_decisions_of_the_steps_before(monkeypatch):
    answer(monkeypatch, {6: 1.3, 12: 0.4})
    model = sp.sketch_(network(), sp.L1(3), where="faster")
    x = torch.randn(10, 6)
    model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(x).square().sum().backward()
    kept = [int((m.weight.grad.abs().sum(1) > 0).sum()) for m in model if hasattr(m, "weight")]
    assert kept[0] > 3
    assert kept[1] <= 3


def test_compiling_before_anything_was_timed_is_said_aloud(monkeypatch):
    asked = answer(monkeypatch, {6: 0.4, 12: 0.4})
    model = sp.sketch_(network(), sp.L1(3), where="faster")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.warns(UserWarning, match="before torch.compile"):
        compiled(torch.randn(10, 6)).square().sum().backward()
    assert asked == []
    assert all(line.kept == 1.0 for line in sp.summary(model).layers)


def test_another_sketch_is_undecided_again(monkeypatch):
    answer(monkeypatch, {6: 0.4, 12: 0.4})
    model = sp.sketch_(network(), sp.L1(0.3), where="faster")
    sketched_layers(model, torch.randn(10, 6))
    assert model[0].sketching.judge.latest
    sp.set_budget_(model, 0.5)
    monkeypatch.setattr(faster, "time_layer", lambda layer, inputs: Decision(1.5, 1.0, 1.5))
    sketched_layers(model, torch.randn(10, 6))
    assert not model[0].sketching.judge.latest
    assert "exact is faster" in sp.summary(model).layers[0].note


def test_a_decision_that_is_not_sure_is_taken_and_not_remembered(monkeypatch):
    def blurred(layer, inputs):
        return Decision(0.9, 1.0, 0.9, error=0.2)

    monkeypatch.setattr(faster, "time_layer", blurred)
    model = sp.sketch_(network(), sp.L1(0.3), where="faster")
    assert sketched_layers(model, torch.randn(10, 6)) == [True, False, True, False]
    assert not cache_file().exists()
    monkeypatch.setattr(faster, "time_layer", lambda *_: Decision(0.5, 1.0, 0.5, error=0.2))
    again = sp.sketch_(network(), sp.L1(0.3), where="faster")
    sketched_layers(again, torch.randn(10, 6))
    assert all("error" not in entry for entry in json.loads(cache_file().read_text()).values())


def test_what_is_said_of_a_layer_agrees_with_the_decision(monkeypatch):
    answer(monkeypatch, {6: 1.3, 12: 0.4})
    model = sp.sketch_(network(), sp.L1(0.25), where="faster")
    sketched_layers(model, torch.randn(10, 6))
    kept = [line.kept for line in sp.summary(model).layers]
    assert kept == [1.0, 0.25, 1.0]
    assert sp.summary(model).layers[0].flops == 1.0


def test_copies_and_pickles_keep_their_decisions(monkeypatch):
    asked = answer(monkeypatch, {6: 1.3, 12: 0.4})
    model = sp.sketch_(network(), sp.L1(0.3), where="faster")
    x = torch.randn(10, 6)
    sketched_layers(model, x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert sketched_layers(twin, x) == [False, False, True, False]
    assert len(asked) == 2
    sp.unsketch_(model)
    assert "sketching" not in model[0].__dict__


def test_an_unknown_place_is_refused():
    with pytest.raises(ValueError, match=r"where='slower'.*where='faster'"):
        sp.sketch_(network(), sp.L1(0.3), where="slower")
