"""What a tuner costs where no sketch pays: training with one and without, in turns."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

import sketchprop as sp
from experiments.advise.problems import paper_mlp
from experiments.lab.problem import Problem
from experiments.lab.trainer import generator
from experiments.tasks.table import TASKS

TARGET = 1.03
"""Time of training with a tuner over that without."""
BLOCK = 25
"""Steps that are trained one way before the other has its turn."""


def _gpt(small: bool) -> Problem:
    return TASKS["gpt"].problem(small)


CASES: dict[str, tuple[Any, sp.L1 | sp.Tokens, float, int]] = {
    "MLP 784-64-64-10 on MNIST": (paper_mlp, sp.L1(0.1), 0.1, 4000),
    "GPT over characters": (_gpt, sp.Tokens(0.3), 1e-3, 1000),
}
"""The problem, the sketch that is tuned, the rate, and steps."""


@dataclass
class _Training:
    """One of the two: a model, its optimizer, its seconds on the processor."""

    problem: Problem
    model: nn.Module
    optimizer: torch.optim.Optimizer
    tuner: sp.Tuner | None = None
    seconds: float = 0.0
    looks: int = 0
    """Passes that probes have made."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.looks += 1
        return self.problem.loss_of(model, batch)

    def train(self, batches: Sequence[Any]) -> None:
        start = process_time()
        for batch in batches:
            if self.tuner is not None:
                self.tuner(batch)
            self.optimizer.zero_grad()
            torch.autograd.backward(self.problem.loss_of(self.model, batch))
            self.optimizer.step()
        self.seconds += process_time() - start


def tuner(names: Sequence[str], small: bool = False) -> Iterator[dict[str, object]]:
    """A row for each case: the time over that of plain training, and the budgets at the end."""
    for name in names:
        make, sketch, rate, steps = CASES[name]
        problem = make(small)
        torch.manual_seed(0)
        model = problem.model()
        both = []
        for tuned in (False, True):
            own = copy.deepcopy(model)
            kind = torch.optim.AdamW if problem.adam else torch.optim.SGD
            run = _Training(problem, own, kind(own.parameters(), rate))
            if tuned:
                sp.sketch_(own, sketch)
                run.tuner = sp.Tuner(own, run.loss, optimizer=run.optimizer)
            both.append(run)
        plain, watched = both
        source = generator("tuned", 0)
        count = 4 * BLOCK if small else steps
        for block in range(count // BLOCK):
            batches = [problem.draw(source, problem.batch_size) for _ in range(BLOCK)]
            for run in both if block % 2 else both[::-1]:
                run.train(batches)
        found = watched.tuner
        assert found is not None
        yield {
            "case": name,
            "sketch": repr(sketch),
            "steps": count,
            "ratio": watched.seconds / plain.seconds,
            "counted": 1 + watched.looks / count,
            "probes": len(found.log),
            "ends_exact": all(budget == 1 for budget in found.budgets.values()),
            "budgets": found.budgets,
            "target": TARGET,
            "why": found.log[-1]["why"] if found.log else "not probed",
        }
