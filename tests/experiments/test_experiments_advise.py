"""What advise says of real tasks: a smoke run on made-up data, continued and redrawn."""

import csv
import json

import pytest

from experiments.__main__ import main
from experiments.advise import study
from experiments.advise.study import ORDER
from sketchprop.meters.advising.advice import Answer

pytestmark = pytest.mark.usefixtures("no_files")


def call(folder, *more):
    return main(["advise", "--preset", "smoke", "--out", str(folder), "--quiet", *more])


def test_every_task_is_asked_once_and_the_page_has_a_line_for_each(tmp_path, capsys, monkeypatch):
    assert call(tmp_path, "--task", "vit") == 0
    first = json.loads((tmp_path / "results.json").read_text())
    assert list(first) == ["vit"]
    assert call(tmp_path) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert list(found) == list(ORDER)
    assert found["vit"] == first["vit"]  # what is there is not asked again
    rows = list(csv.DictReader((tmp_path / "summary.csv").open()))
    assert [row["task"] for row in rows] == list(ORDER)
    for row in rows:
        assert row["answer"] in list(Answer) or row["answer"].startswith("sp.sketch_(model, sp.")
        assert row["reason"]
    names = [option["name"] for option in found["resnet"]["options"]]
    assert names == ["L1(0.3)"]
    assert "BatchNorm2d" in found["resnet"]["warnings"][0]
    tried = {task: [o["name"] for o in line["options"]] for task, line in found.items()}
    assert any("Tokens" in name for name in tried["vit"])
    assert any("nonzero" in name for name in tried["sst2-padded"])
    page = (tmp_path / "README.md").read_text()

    def refused(*_):
        raise AssertionError("stored results alone must do")

    monkeypatch.setattr(study, "ask", refused)
    assert call(tmp_path, "--stored") == 0
    assert (tmp_path / "README.md").read_text() == page
    capsys.readouterr()


def test_a_trial_of_what_was_found_stands_beside_the_prediction(tmp_path, capsys):
    assert call(tmp_path, "--trial", "0.05") == 1
    assert "without --trial first" in capsys.readouterr().err
    assert call(tmp_path, "--task", "vit") == 0
    assert call(tmp_path, "--trial", "0.05") == 0
    (line,) = json.loads((tmp_path / "trials.json").read_text()).values()
    options = json.loads((tmp_path / "results.json").read_text())["vit"]["options"]
    measured = [option for option in options if option["change"] is not None]  # busy: not all
    least = min(measured, key=lambda option: option["change"])
    assert line["way"] == least["name"]
    assert list(line["curves"]) == ["exact", least["name"]]
    assert all(curve[-1][1] >= 8 for curves in line["curves"].values() for curve in curves)
    capsys.readouterr()
