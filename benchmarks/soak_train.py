"""One long training run that can be killed at any moment: the worker of ``soak.py``.

A small vision transformer with dropout on made-up pictures. The budget is a function of the step,
some stretches are exact; losses go into a file step by step. With ``--disturbed`` it also saves
and resumes checkpoints and runs every meter now and then, none of which may change a loss.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sketchprop as sp
from sketchprop.layers.depth import load_shares_, shares_of
from sketchprop.zoo import ViT

SAVE_EVERY = 97
WATCH_EVERY = 61
METER_EVERY = 1009


def budget_at(step: int, steps: int) -> float:
    """Six rungs, up and down."""
    return (0.5, 0.3, 0.15, 1.0, 0.4, 0.2)[6 * step // steps]


def is_exact(step: int) -> bool:
    """Ten steps of each hundred."""
    return step % 100 >= 90


def batch_at(step: int) -> tuple[Tensor, Tensor]:
    """A function of the step: pictures with a bright stripe, whose place is the label."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(4, (8,), generator=generator)
    pictures = torch.randn(8, 1, 8, 8, generator=generator)
    pictures[torch.arange(8), 0, 2 * labels] += 1.0
    return pictures, labels


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def resident_bytes() -> int:
    """What the process holds in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Run:
    """A model, its optimizer and where they stand."""

    def __init__(self, folder: Path, steps: int, disturbed: bool) -> None:
        torch.manual_seed(0)
        self.folder, self.steps, self.disturbed = folder, steps, disturbed
        model = ViT(8, 2, 1, 16, depth=2, heads=2, hidden=32, classes=4, dropout=0.1)
        self.model = sp.sketch_(model, {"blocks.*": sp.Tokens(0.3), "head": sp.L1(0.5)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.step = 0
        self.losses = torch.from_file(
            str(folder / "losses"), shared=True, size=steps, dtype=torch.float32
        )
        self.tuner = sp.Tuner(self.model, loss_fn, share=4 / WATCH_EVERY, frozen=True)
        self.memory: dict[int, int] = {}

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def save(self) -> None:
        """All of it or nothing: a kill in between leaves the one before."""
        state: dict[str, Any] = {
            "step": self.step,
            "model": self.model.state_dict(),
            "shares": shares_of(self.model),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def resume(self) -> None:
        if self.checkpoint.exists():
            state = torch.load(self.checkpoint)
            self.step = state["step"]
            self.model.load_state_dict(state["model"])
            load_shares_(self.model, state["shares"])
            self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random"])

    def disturb(self, batch: tuple[Tensor, Tensor]) -> None:
        """Meters and checkpoints before a step."""
        if self.step % SAVE_EVERY == 0:
            self.save()
        self.tuner(batch)
        if self.step % METER_EVERY == METER_EVERY - 1:
            sp.measure(self.model, loss_fn, [batch, batch_at(0)], draws=2, rounds=0)
            sp.check_unbiased(self.model, loss_fn, batch, draws=2)
            sp.plan(self.model, loss_fn, batch, rounds=1)
            sp.summary(self.model)

    def train(self) -> None:
        for step in range(self.step, self.steps):
            self.step = step
            batch = batch_at(step)
            sp.set_budget_(self.model, budget_at(self.step, self.steps))
            if self.disturbed:
                self.disturb(batch)
            with sp.exact(self.model) if is_exact(self.step) else nullcontext():
                loss = loss_fn(self.model, batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses[self.step] = loss.detach()
            if self.step % 100 == 99:
                self.memory[self.step + 1] = resident_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--disturbed", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    run = Run(given.folder, given.steps, given.disturbed)
    if given.disturbed:
        run.resume()
    started = run.step
    run.train()
    result = {"started": started, "memory": run.memory}
    (given.folder / "done.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
