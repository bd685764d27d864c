"""Peak memory: what is measured, and how the largest batch is found."""

import pytest

from benchmarks import peak


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
    exact, less = (peak.in_fresh_process("ViT 96 × 4", m, 32) for m in ("exact", "checkpointing"))
    assert 5e6 < less < 0.8 * exact
