"""A long run, disturbed in every way, against the same run left alone.

    python -m benchmarks.soak --steps 10000 --output benchmarks/results/soak.json

Both are processes of their own. The disturbed one is killed (SIGKILL) at random moments and
started again; the losses of both must be equal to the last bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from sketchprop import __version__
from sketchprop.cli.show import say

from .soak_train import is_exact

CLONE = Path(__file__).resolve().parents[1]
WARM = 1000
"""Steps until the memory of a process has settled."""


@dataclass(frozen=True)
class Soaked:
    """What came of it."""

    steps: int
    kills: int
    done_again: int
    """Steps that were lost by kills and computed once more."""
    exact_steps: int
    different: int
    """Losses that are not equal to the last bit."""
    first_loss: float
    last_loss: float
    memory_alone: float
    """Resident memory at the end over that after the first thousand steps, minus one."""
    memory_disturbed: float
    """The same in the last life of the disturbed run: meters and checkpoints all the way."""
    torch: str = torch.__version__
    sketchprop: str = __version__

    @property
    def ok(self) -> bool:
        return self.different == 0 and max(self.memory_alone, self.memory_disturbed) < 0.01


def soak(folder: Path, steps: int, kills: int, seed: int = 0) -> Soaked:
    """Both runs, and their comparison."""
    alone, disturbed = folder / "alone", folder / "disturbed"
    for each in (alone, disturbed):
        each.mkdir()
        torch.full((steps,), torch.nan).numpy().tofile(each / "losses")
    worker(alone, steps).wait()
    lost = killed(disturbed, steps, kills, random.Random(seed))
    worker(disturbed, steps, "--disturbed").wait()
    found, truth = losses(disturbed), losses(alone)
    return Soaked(
        steps=steps,
        kills=kills,
        done_again=lost,
        exact_steps=sum(map(is_exact, range(steps))),
        different=int((found.view(torch.int32) != truth.view(torch.int32)).sum()),
        first_loss=float(truth[:50].mean()),
        last_loss=float(truth[-50:].mean()),
        memory_alone=growth(alone),
        memory_disturbed=growth(disturbed),
    )


def worker(folder: Path, steps: int, *options: str) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-m", "benchmarks.soak_train", str(folder), "--steps", str(steps)]
    env = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen([*command, *options], env=env, cwd=CLONE)


def losses(folder: Path) -> Tensor:
    return torch.frombuffer(bytearray((folder / "losses").read_bytes()), dtype=torch.float32)


def killed(folder: Path, steps: int, kills: int, rng: random.Random) -> int:
    """Lets the run go on to random places in its first half and kills it there."""
    lost = 0
    for place in sorted(rng.sample(range(1, steps // 2), kills)):
        process = worker(folder, steps, "--disturbed")
        while (reached := int(losses(folder).isfinite().sum())) < place:
            if process.poll() is not None:
                raise RuntimeError(f"the worker ended by itself, with code {process.returncode}")
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        saved = folder / "checkpoint.pt"
        lost += reached - (torch.load(saved)["step"] if saved.exists() else 0)
    return lost


def growth(folder: Path) -> float:
    """How much resident memory grew after the first thousand steps of the last life."""
    done = json.loads((folder / "done.json").read_text())
    memory = {int(step): size for step, size in done["memory"].items()}
    settled = [size for step, size in memory.items() if step >= done["started"] + WARM]
    settled = settled or list(memory.values())
    return settled[-1] / settled[0] - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--output", type=Path, help="a JSON file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = soak(Path(folder), given.steps, given.kills)
    text = json.dumps({**asdict(result), "ok": result.ok}, indent=1)
    say(text)
    if given.output is not None:
        given.output.write_text(text + "\n")
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
