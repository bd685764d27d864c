"""The examples run as their docstrings say; those for torchrun: test_distributed_examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.data import DataError, cifar10

FOLDER = Path(__file__).parents[2] / "examples"
TABLE = re.compile(r"^(exact|\w+\(0\.\d\)) +(\d+\.\d+) +([01]\.\d+) +(\d+\.\d+)", re.MULTILINE)


def run(example, *arguments):
    done = subprocess.run(
        [sys.executable, str(FOLDER / example), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_trainer_example_compares_both_ways():
    pytest.importorskip("transformers", reason="needs transformers")
    out = run("finetune_trainer.py", "--smoke", "--budget", "0.2")
    rows = TABLE.findall(out)
    assert [name for name, *_ in rows] == ["exact", "Tokens(0.2)"]
    exact, sketched = re.findall(r"kept backward FLOPs of linear layers: (\S+)", out)
    assert float(exact) == 1.0
    assert 0.05 < float(sketched) < 0.6  # of attention, which is not in it, some shares keep more
    assert len({loss for _, loss, *_ in rows}) == 2  # other draws, another loss


def test_the_vit_example_compares_both_ways():
    try:
        cifar10(train=False, download=False)
    except DataError as error:
        pytest.skip(f"CIFAR-10 is not here: {error}")
    out = run("vit_cifar10.py", "--smoke", "--budget", "0.5")
    assert "step 4/4" in out
    assert re.search(r"^blocks\.0 +SketchedZooBlock", out, re.MULTILINE)
    assert [name for name, *_ in TABLE.findall(out)] == ["exact", "Tokens(0.5)"]
