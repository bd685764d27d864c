"""The benchmark commands run and write what they measured; no time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks import imports, launches
from benchmarks.__main__ import _measure
from benchmarks.device_table import check_device
from benchmarks.results import FOLDER
from benchmarks.soak import soak
from benchmarks.timing import CPU
from benchmarks.tuner import CASES, tuner
from sketchprop.core import probabilities

ROOT = Path(__file__).parents[2]


def run(tmp_path, *arguments):
    output = tmp_path / "result.json"
    call = [sys.executable, "-m", "benchmarks", *arguments, "--seconds", "0.01"]
    call += ["--output", str(output), "--plot", str(tmp_path / "plot.png")]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text()), done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("linear", "--shapes", "16x24x32", "--budgets", "0.1", "0.5"),
        ("conv", "--batch", "2", "--channels", "8", "16", "--size", "4"),
        ("model", "--only", "784-64"),
        ("memory", "--only", "784-64"),
    ],
)
def test_a_benchmark_runs(tmp_path, arguments):
    result, printed = run(tmp_path, *arguments)
    assert result["machine"]["threads"] == 1
    assert result["machine"]["torch"]
    if arguments[0] == "memory":
        assert {row["allocator"] for row in result["rows"]} >= {"default", "keep_pages"}
        assert all(row["ratio"] > 0 for row in result["rows"])
        return
    assert result["machine"]["allocator_settings"]["MALLOC_MMAP_MAX_"] == "0"
    assert result["lines"]
    for line in result["lines"]:
        assert 0 < line["ratio"]["low"] <= line["ratio"]["median"] <= line["ratio"]["high"]
    assert (tmp_path / "plot.png").stat().st_size > 1000
    if arguments[0] == "linear":
        assert {line["budget"] for line in result["lines"]} == {0.1, 0.5}
        assert "overhead" in printed


def test_a_reader_times_sketches_of_their_own_and_stores_nothing(tmp_path):
    pair = "Split(input=L1(0.3), weight=None)"
    call = ["linear", "--shapes", "8x6x10", "4x3x5", "--sketches", "L1(0.3)", pair]
    stored = set(FOLDER.iterdir())
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *call, "--seconds", "0.01"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("8 × 6 × 10") == done.stdout.count(pair) == 2
    assert set(FOLDER.iterdir()) == stored


def test_a_table_for_an_issue_names_the_device(tmp_path):
    words = ("tokens", "--device", "cpu", "--modes", "eager", "--batches", "2")
    result, printed = run(tmp_path, *words)
    (row,) = result["rows"]
    assert row["eager"] > 0
    assert row["launches"] < row["kept launches"]
    assert f"torch {result['machine']['torch']}" in printed
    assert "| ViT 96 × 4 | 2 |" in printed


def test_a_device_that_is_not_there_is_said():
    with pytest.raises(SystemExit, match="no such device here"):
        check_device(torch.device("xpu" if torch.cuda.is_available() else "cuda"))


def test_launches_of_a_backward_pass_stay_below_their_bound():
    size = launches.MODELS["ViT 96 × 4, 16 × 64 tokens"]
    exact, kept = (launches.eager(*size.prepared(s, CPU)) for s in (None, launches.SKETCH))
    assert kept.forward <= exact.forward
    bound = launches.BOUND if probabilities._C is None else launches.BOUND_IN_C
    assert exact.backward < kept.backward <= bound


def test_views_and_empty_tensors_are_no_launches():
    x = torch.randn(4, 6)
    with launches.Launches() as seen:
        x.view(24).detach()[3:].add_(1)
        torch.empty_like(x).copy_(x).sum()
    assert seen.calls == {"aten.add_.Tensor": 1, "aten.copy_.default": 1, "aten.sum.default": 1}


def test_an_import_is_timed(monkeypatch):
    """One process instead of seventeen, which take a minute."""
    monkeypatch.setattr(imports, "_python", cache(imports._python))
    _, found = _measure(Namespace(command="import", seconds=0.01))
    cases = {row["case"]: row for row in found["rows"]}
    assert all(row["rounds"] == 5 for row in cases.values())
    assert cases["the statement alone"]["low_ms"] > 0
    assert cases["the statement alone"]["third-party modules"] == "none"


def test_a_tuner_is_timed_against_plain_training():
    rows = list(tuner(CASES, small=True))
    assert [row["case"] for row in rows] == list(CASES)
    for row in rows:
        assert row["steps"] == 100
        assert row["ratio"] > 0
        assert row["counted"] >= 1
        assert isinstance(row["ends_exact"], bool)


def test_a_profile_accounts_for_all_of_a_step(monkeypatch):
    from benchmarks import profile, tokens

    monkeypatch.setitem(tokens.MODELS, "tiny", tokens.Size(16, 1, 2, 16, 2, 64))
    monkeypatch.setitem(tokens.TARGETS, "tiny", {tokens.Budgets(0.3, 0.3, 0.3): 0.6})
    *groups, whole = profile.profiles(["tiny"], 1)
    assert whole["exact forward"] + whole["exact backward"] == pytest.approx(1)
    for column in ("exact forward", "exact backward", "kept forward", "kept backward"):
        assert sum(row[column] for row in groups) == pytest.approx(whole[column])
        assert all(row[column] > 0 for row in groups if row["operations"] != "rows moved")
    left = tokens.MODELS["tiny"].left(tokens.Budgets(0.3, 0.3, 0.3))
    floor = whole["exact forward"] + left * whole["exact backward"]
    total = whole["kept forward"] + whole["kept backward"]
    assert whole["above the floor"] == pytest.approx(total - floor)


def test_a_run_that_is_killed_and_resumed_has_the_losses_of_one_left_alone(tmp_path) -> None:
    result = soak(tmp_path, steps=240, kills=1)
    assert result.different == 0
    assert result.kills == 1
    assert result.exact_steps == 20
    assert result.last_loss < result.first_loss
