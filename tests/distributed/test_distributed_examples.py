"""The examples start under torchrun with two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [
            *torchrun,
            "--nproc-per-node=2",
            str(ROOT / "examples" / example[0]),
            *example[1:],
            "--steps=6",
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    # Not the exit code: gloo's threads may abort a process that is leaving, in plain DDP too.
    assert "step 5: " in done.stdout, done.stderr
    assert shown in done.stdout
