"""The soak in small: killed, resumed and measured, a run has the losses of one left alone."""

from __future__ import annotations

from pathlib import Path

from benchmarks.soak import soak


def test_a_run_that_is_killed_and_resumed_has_the_losses_of_one_left_alone(tmp_path: Path) -> None:
    result = soak(tmp_path, steps=240, kills=1)
    assert result.different == 0
    assert result.kills == 1
    assert result.exact_steps == 20
    assert result.last_loss < result.first_loss
