"""The examples run as their docstrings say, those for torchrun with two processes."""

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


def done(*command):
    return subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run(example, *arguments):
    found = done(str(FOLDER / example), *arguments)
    assert found.returncode == 0, found.stderr
    return found.stdout


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


@pytest.mark.parametrize(
    ("example", "shown"),
    [
        (["pipeline.py"], "of 4,194,304 bytes (0.100)"),
        (["ddp.py", "--share"], "of the bytes"),
        (["fsdp2.py"], "loss"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_examples_run_on_one_machine(example, shown) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    found = done(*torchrun, str(FOLDER / example[0]), *example[1:], "--steps=6")
    # Not the exit code: gloo's threads may abort a process that is leaving, in plain DDP too.
    assert "step 5: " in found.stdout, found.stderr
    assert shown in found.stdout
