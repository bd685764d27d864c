"""The demo trains three runs in turns, says how far it is, and answers in one sentence."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

from torch import nn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "demo"))

import kept_tokens as demo  # noqa: E402


def test_a_few_seconds_of_it(tmp_path):
    """In a pipe: progress with the time left, table, picture, sentence."""
    picture = tmp_path / "demo.png"
    small = ["--length", "16", "--blocks", "1", "--batch-size", "8", "--held-out", "16"]
    command = [sys.executable, ROOT / "demo/kept_tokens.py", "--seconds", "4", *small]
    run = subprocess.run(
        [*command, "--output", picture],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    told = re.findall(r"^loss after .*exact \d.*Tokens\(0\.2\) \d.* \d+ s left$", run.stdout, re.M)
    assert 1 <= len(told) < 30
    assert "\r" not in run.stdout
    rows = re.findall(
        r"^(exact|smaller batch|Tokens\(0\.2\)) +(\d+) .* ms +(\d+)", run.stdout, re.M
    )
    assert [name for name, *_ in rows] == ["exact", "smaller batch", "Tokens(0.2)"]
    assert all(int(steps) > 0 for *_, steps in rows)
    assert int(rows[1][1]) <= int(rows[0][1]) == int(rows[2][1]) == 8
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert re.search(r"^(At equal held-out loss|Nothing to tell yet)", run.stdout, re.M)


def falling(name, *losses):
    made = demo.Run(name, nn.Linear(2, 2), 8, 0, 0.1)
    made.curve = [(float(second), loss) for second, loss in enumerate(losses)]
    return made


def test_the_answer_is_the_time_to_equal_loss():
    exact = falling("exact", *(10.0 - second for second in range(9)))
    twice = falling("Tokens(0.2)", *(10.0 - 2 * second for second in range(5)))
    half = falling("smaller batch", *(10.0 - second / 2 for second in range(9)))
    answer = demo.answer(exact, half, twice)
    assert "Tokens(0.2) took 50% less time than exact training" in answer
    assert "a smaller batch 100% more" in answer


def test_where_nothing_was_learned_no_gain_is_claimed():
    for losses in ([2.4, 2.38, 2.35], [2.4, math.nan, math.nan]):
        runs = [falling(name, *losses) for name in ("exact", "smaller batch", "Tokens(0.2)")]
        answer = demo.answer(*runs)
        assert answer.startswith("Nothing to tell yet")
        assert "more --seconds" in answer


def test_pieces_are_full_and_those_to_measure_on_come_from_other_files():
    train, held_out = demo.read_pieces(demo.minilm_folder(), 16, 64, 16)
    for (tokens, labels), count in ((train, 64), (held_out, 16)):
        assert tokens.shape[1] == 16
        assert count // 2 < len(tokens) == len(labels) <= count
        assert set(labels.tolist()) == set(range(len(demo.LIBRARIES)))
    assert not set(map(tuple, train[0].tolist())) & set(map(tuple, held_out[0].tolist()))
