"""A new study is a few lines: a cell that trains, and a name."""

import argparse
from dataclasses import dataclass

import pytest

from experiments.lab.study import SweepStudy
from experiments.lab.sweep import Cell, Figure, Protocol


@dataclass(frozen=True, kw_only=True)
class Hill(Cell):
    height: float = 90.0

    def train(self, runs, checkpoints):
        found = [self.height - abs(run.rate_index - 2) + run.seed / 10 for run in runs]
        kept = 1.0 if not self.sketch else float(self.sketch.split("(")[1].split(",")[0])
        return [{"validation_curve": [f * kept], "test_curve": [f * kept - 1]} for f in found]


HILLS = SweepStudy(name="hills", help="", title="Hills", protocol=Protocol(Hill()),
                   figures={"1a": Figure("1a", "Hills", 50)})  # fmt: skip

TOML = """
[protocol]
height = 95
learning_rates = [0, 1]
seeds = [0, 1]
budgets = [0.5]
"""


@pytest.fixture
def call(tmp_path):
    preset = tmp_path / "mine.toml"
    preset.write_text(TOML)

    def run(*more):
        parser = argparse.ArgumentParser()
        HILLS.add_options(parser)
        options = ["--preset", str(preset), "--out", str(tmp_path / "out"), "--workers", "0"]
        return HILLS.run(parser.parse_args([*options, "--quiet", *more]))

    return run


def test_a_new_study_trains_widens_draws_and_redraws(call, tmp_path, capsys):
    out = tmp_path / "out"
    assert call("--plan") == 0
    assert "are missing" in capsys.readouterr().out
    assert call() == 0
    page = (out / "README.md").read_text()
    assert "# Hills: preset `mine`" in page
    # the best rate is index 2, one beyond the grid: 95.0 and 95.1 at the two seeds, less 1
    assert "| baseline | all | 1 |  | 94.05 ± 0.07 |" in page
    assert "| ℓ1 | all | 0.5 |  | 46.52 ± 0.04 |" in page
    (out / "README.md").unlink()
    (out / "runs.sqlite").unlink()
    assert call("--stored") == 0
    assert (out / "README.md").read_text() == page
