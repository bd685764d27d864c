"""Noise by block: smoke runs on made-up data, resumed and redrawn."""

import json

import pytest

from experiments.__main__ import main
from experiments.depth.study import final_scores
from experiments.lab.problem import Problem

pytestmark = pytest.mark.usefixtures("no_files")


def test_shares_are_measured_trained_and_resumed(tmp_path, monkeypatch):
    call = ["depth", "--task", "documents", "--preset", "smoke", "--train", "--workers", "0"]
    call += ["--out", str(tmp_path)]
    assert main([*call, "--quiet"]) == 0
    stored = (tmp_path / "results.json").read_text()
    found = json.loads(stored)["documents"]
    assert set(found["runs"]) == {"exact/0", "even/0", "shared out/0"}
    ways = found["3"]["ways"]
    assert max(ways["shared out"]["noise"]) < max(ways["even"]["noise"])
    monkeypatch.setattr(Problem, "trainer", None)  # nothing is trained again
    assert main([*call, "--quiet"]) == 0
    assert (tmp_path / "results.json").read_text() == stored


def test_redundancy_is_measured_size_by_size_and_drawn_again(tmp_path, monkeypatch, capsys):
    call = ["redundancy", "--preset", "smoke", "--out", str(tmp_path), "--quiet"]
    assert main(call) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    sizes = {"pictures/16", "pictures/64", "documents/64", "documents/128"}
    assert set(found) == {"machine", *sizes}
    assert all(min(found[size]["ways"]["0.2"]["noise"]) > 0 for size in sizes)
    page = (tmp_path / "README.md").read_text()
    assert page.count("| 0.2 |") == len(sizes)
    monkeypatch.setattr(Problem, "trainer", None)
    assert main(call) == 0
    assert (tmp_path / "README.md").read_text() == page
    capsys.readouterr()


def test_where_trainings_end_is_compared_seed_by_seed():
    last = {"exact/0": 80, "exact/1": 50, "even/0": 78, "even/1": 51, "shared out/0": 83}
    curves = {name: {"test": [50.0, score]} for name, score in last.items()}
    assert final_scores(curves) == [
        ["exact", "65.0 ± 21.2", "1 of 2", ""],
        ["even", "64.5 ± 19.1", "1 of 2", "-0.5 [-19.6, +18.6]"],  # -2 and 1, t = 12.71
    ]
    curves["shared out/1"] = {"test": [50.0, 53.0]}
    assert final_scores(curves)[2][2:] == ["1 of 2", "+3.0 [+3.0, +3.0]"]
