"""The demo trains three ways in turns, says how far it is, and answers in one sentence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "demo"))

import kept_tokens as demo  # noqa: E402


def test_a_few_seconds_of_it(tmp_path):
    """In a pipe, on made pictures: progress with the time left, table, picture, sentence."""
    picture = tmp_path / "demo.png"
    small = ["--dim", "16", "--depth", "1", "--batch-size", "8", "--held-out", "20"]
    command = [sys.executable, str(ROOT / "demo/kept_tokens.py"), "--made", "--seconds", "2"]
    run = subprocess.run(
        [*command, *small, "--output", str(picture)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    told = re.findall(
        r"^loss after .*exact \d.*Tokens\(0\.3\) \d.* (\d+) s left$", run.stdout, re.M
    )
    assert 1 <= len(told) < 30
    assert "\r" not in run.stdout
    rows = re.findall(
        r"^(exact|smaller batch|Tokens\(0\.3\)) +(\d+) .* ms +(\d+)", run.stdout, re.M
    )
    assert [name for name, *_ in rows] == ["exact", "smaller batch", "Tokens(0.3)"]
    assert all(int(steps) > 0 for *_, steps in rows)
    assert int(rows[1][1]) <= int(rows[0][1]) == int(rows[2][1]) == 8
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert re.search(r"^(To the same loss of|Nothing to tell yet)", run.stdout, re.M)


def falling(name, *losses):
    way = demo.Way(name, demo.ViT(dim=8, depth=1, heads=1, hidden=8), 8, 0, 0.1)
    way.curve = [(float(second), loss) for second, loss in enumerate(losses)]
    return way


def test_the_answer_is_the_time_to_a_loss_that_all_reached():
    exact = falling("exact", *(10.0 - second for second in range(9)))
    twice = falling("Tokens(0.3)", *(10.0 - 2 * second for second in range(5)))
    half = falling("smaller batch", *(10.0 - second / 2 for second in range(9)))
    answer = demo.answer(exact, half, twice)
    assert "same loss of 6.000" in answer  # where the slowest ends
    assert "exact training took 4.0 s" in answer
    assert "Tokens(0.3) 2.0 s (50% less)" in answer
    assert "smaller batch 8.0 s (100% more)" in answer


def test_a_low_loss_by_luck_gains_nothing():
    noisy = [(0.0, 5.0), (1.0, 3.0), (2.0, 4.0), (3.0, 2.0)]
    assert demo.levels(noisy) == [(0.0, 5.0), (1.5, 3.5), (3.0, 2.0)]
    lost = falling("Tokens(0.3)", 5.0, 6.0, 7.0)  # learnt nothing: its mean is all there is
    assert demo.levels(lost.curve) == [(1.0, 6.0)]
    assert "same loss of 6.000" in demo.answer(falling("exact", 7, 5), falling("s", 7, 5), lost)


def test_where_nothing_was_learned_no_gain_is_claimed():
    ways = [falling(name, 2.4, 2.38, 2.35) for name in ("exact", "smaller batch", "Tokens(0.3)")]
    answer = demo.answer(*ways)
    assert answer.startswith("Nothing to tell yet")
    assert "more --seconds" in answer
