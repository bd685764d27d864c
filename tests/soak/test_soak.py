"""The soak in small: killed, resumed and measured, a run has the losses of one left alone."""

from __future__ import annotations

import json
from pathlib import Path

from soak_run import soak

STORED = Path(__file__).parents[2] / "benchmarks" / "results" / "soak.json"


def test_a_run_that_is_killed_and_resumed_has_the_losses_of_one_left_alone(tmp_path: Path) -> None:
    result = soak(tmp_path, steps=240, kills=1)
    assert result.different == 0
    assert result.kills == 1
    assert result.exact_steps == 20
    assert result.last_loss < result.first_loss


def test_the_stored_soak_holds() -> None:
    stored = json.loads(STORED.read_text())
    assert stored["ok"]
    assert stored["steps"] >= 10_000
    assert stored["kills"] > 0
    assert stored["different"] == 0
    assert stored["memory_alone"] < 0.01
    assert stored["memory_disturbed"] < 0.01
