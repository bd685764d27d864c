"""The ways to make a gradient that compete for time, and what their steps cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import sketchprop as sp
from sketchprop.tuning.rule import LADDER

from ..lab import ExperimentError
from ..lab.checkpoints import State
from ..lab.problem import Problem
from ..lab.trainer import Batch

EXACT = "exact"
TUNER = "tuner"
NONZERO = "nonzero"


@dataclass(frozen=True)
class Way:
    """How gradients are made."""

    name: str
    label: str
    sketch: str
    """As the command line takes it; empty for exact gradients."""
    colour: str
    line: str = "-"
    control: str = ""
    """What moves the budgets while the model trains."""
    sizes: bool = False
    """Whether it tries all batch sizes; else it takes the middle one."""
    whole: bool = True
    """Whether it runs at all lengths of time; else at the half and the whole."""

    @property
    def timed(self) -> tuple[str, ...]:
        """The sketches whose steps must be timed: where budgets move, one for each rung."""
        if not self.control:
            return (self.sketch,)
        return ("", *(f"Tokens({p:g})" for p in LADDER[1:]))


_WAYS = (
    Way(EXACT, "exact", "", "k", sizes=True),
    Way("tokens-0.3", "Tokens(0.3)", "Tokens(0.3)", "C0", sizes=True),
    Way("tokens-0.2", "Tokens(0.2)", "Tokens(0.2)", "C0", "--", sizes=True),
    Way(TUNER, "Tuner", "Tokens(0.3)", "C2", control=TUNER),
    Way("rows-0.3", "Rows(0.3) by token", 'Rows(0.3, unit="token")', "C1", ":", whole=False),
    Way(NONZERO, "rows that are not zero", 'Rows(0.4, by="nonzero")', "C3", whole=False),
)
WAYS = {way.name: way for way in _WAYS}


def find_way(name: str) -> Way:
    if name not in WAYS:
        raise ExperimentError(f"way {name!r} is unknown; use some of {', '.join(WAYS)}")
    return WAYS[name]


class TunedSteps:
    """A ``Tuner`` in a run that counts costs: a rung of the ladder has the cost it was timed at.

    Probes are paid for: each of their passes costs what a step at its budgets does. The tuner's
    own clock counts this process's time, so that what else the machine does decides nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        problem: Problem,
        costs: Mapping[float, float],
    ) -> None:
        self.costs = costs
        self.tuner = sp.Tuner(model, problem.loss_of, optimizer=optimizer, clock=time.process_time)
        self.units = [len(group) for group in self.tuner.groups.values()]

    def cost(self, budgets: Sequence[float]) -> float:
        """Units are alike, so the mean over them of what all at such a budget would cost."""
        pairs = zip(self.units, budgets, strict=True)
        return sum(count * self.costs[p] for count, p in pairs) / sum(self.units)

    def probe_cost(self, trial: Sequence[float]) -> float:
        """Exact passes, one with each group alone, one with all."""
        count = len(trial)
        alone = ([p if k == i else 1.0 for k in range(count)] for i, p in enumerate(trial))
        return 3 * self.costs[1.0] + sum(map(self.cost, alone)) + self.cost(trial)

    def before(self, batch: Batch) -> float:
        trial = self.tuner.controller.trial()
        probed = self.tuner(batch) is not None
        own = self.cost(self.tuner.controller.budgets)
        return own + self.probe_cost(trial) if probed else own

    def state_dict(self) -> State:
        return self.tuner.state_dict()

    def load_state_dict(self, state: State) -> None:
        self.tuner.load_state_dict(state)

    @property
    def story(self) -> list[Any]:
        """What was decided: step, mean budget, predicted change."""
        return [
            [entry["step"], round(sum(entry["budgets"].values()) / len(self.units), 3),
             round(entry.get("change", 1.0), 3)]
            for entry in self.tuner.log
        ]  # fmt: skip
