"""Noise by block: smoke runs on made-up data, resumed and redrawn."""

import json

import pytest

from experiments.__main__ import main
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
