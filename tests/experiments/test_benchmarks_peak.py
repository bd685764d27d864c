"""Peak memory: what is measured, and how the largest batch is found."""

from functools import partial

import pytest

from benchmarks import limits, peak


@pytest.mark.parametrize("fixed", [0, 3000])
@pytest.mark.parametrize("each", [10, 33, 250])
def test_the_largest_batch_is_the_last_that_fits(fixed, each):
    calls = []

    def measured(batch):
        calls.append(batch)
        return fixed + each * batch

    found = peak.largest_batch(measured, 16000, 64, measured(64))
    grain = 64 // peak.GRAIN
    assert found % grain == 0
    assert measured(found) <= 16000 < measured(found + grain) or found == grain
    assert len(calls) <= 9


@pytest.mark.parametrize("name", peak.MODELS)
def test_linear_inputs_fall_to_the_budget(name):
    shares = peak.saved_shares(name, 64)
    assert 0.9 * peak.BUDGET < shares["linear inputs"] <= 1.1 * peak.BUDGET
    # A ReLU keeps its own output: there the rows come on top.
    assert (shares["all saved"] > 1) == ("ReLU" in name)


def test_checkpointing_needs_less_memory_in_a_fresh_process():
    pytest.importorskip("resource")
    call = partial(peak.in_fresh_process, peak.HERE, "ViT 96 × 4")
    exact, less = (call(method, 32) for method in ("exact", "checkpointing"))
    assert 5e6 < less < 0.8 * exact


def test_a_limit_is_kept_and_what_is_stored_is_not_measured_again(tmp_path, monkeypatch):
    each = dict(zip(limits.METHODS, (75e6, 20e6, 45e6, 25e6), strict=True))

    def probed(module, method, size, first, small):
        return {"bytes": 6e8 + each[method] * max(size, 2 * first), "seconds": 0.5 * size}

    monkeypatch.setattr(limits, "in_fresh_process", probed)
    monkeypatch.setattr(limits, "EQUAL", 2)
    kept = []
    found = limits.limits((2, 8), 0.01, {}, kept.append, small=True)
    for row in found["rows"]:
        grain = row["batch"] // peak.GRAIN
        assert row["bytes"] <= 1e9 * row["limit"] < row["bytes"] + (grain + 1) * each[row["method"]]
    assert len(kept) == len(found["probes"])
    assert found["times"]["exact"]["median"] == 1
    monkeypatch.setattr(limits, "in_fresh_process", None)
    monkeypatch.setattr(limits, "interleave", None)
    assert limits.limits((2, 8), 0.01, found, kept.append, small=True) == found
    about = {"command": "limits", "machine": {"cpu": "one", "torch": "2"}}
    text = limits.section({**found, **about}, tmp_path)
    assert "| `exact` | **18**: 9 s, 0.50 s | **96**: 48 s, 0.50 s | 1 | 1 |" in text
    assert "a first step of 2 samples 0.70 GB, of 2 and then 2\n0.70 GB" in text
    assert (tmp_path / "memory.png").stat().st_size > 1000


def test_a_probe_says_what_two_steps_need_and_the_time_of_the_second():
    found = peak.in_fresh_process("benchmarks.limits", limits.METHODS[-1], 4, 2, 1)
    assert found["bytes"] > 5e7
    assert found["seconds"] > 0
