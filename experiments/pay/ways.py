"""The ways to make a gradient that compete for time, and what their steps cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Protocol

import torch
from torch import nn

import sketchprop as sp
from sketchprop.layers.depth import shares_in
from sketchprop.tuning.rule import LADDER

from ..lab import ExperimentError
from ..lab.checkpoints import State
from ..lab.problem import Problem
from ..lab.trainer import Batch, Control
from ..methods import make_sketch

EXACT = "exact"
KEPT = "tokens-0.3"
LEAD = "lead"
"""In ``follows``: the way that the contest lets try batch sizes beside exact training."""
PUBLISHED = "published"
"""In ``follows``: the batch size of the published setting."""
TUNER = "tuner"
PEER = "vcas"
MEASURING = 6
"""Exact steps that measuring shares takes, once; in each probe of a tuner (``depth`` has it: 5.0 to
6.8)."""
ENDS = (0.5, 0.1)
"""Rungs of a tuner over shared budgets that are timed: between and beside them is a line."""
PEER_POINTS = ((1.0, 1.0), (0.5, 1.0), (0.5, 0.5))
"""Shares ρ of samples and ν of rows at which the peer's steps were timed."""
NONZERO = "nonzero"


@dataclass(frozen=True)
class Way:
    """How gradients are made."""

    name: str
    label: str
    sketch: str
    """As the command line takes it; empty for exact gradients."""
    control: str = ""
    """What moves the budgets while the model trains."""
    follows: tuple[str, ...] = (EXACT,)
    """The ways whose best batch sizes it takes, where it tries none itself."""
    shares: tuple[float, ...] = ()
    """The lengths of time it runs at; empty: all."""

    @property
    def timed(self) -> tuple[str, ...]:
        """The sketches whose steps must be timed: where budgets move, one for each rung."""
        if self.control == TUNER:
            rungs = ENDS if self.measures else LADDER[1:]
            return ("", *(self.sketch.replace("0.3", f"{p:g}") for p in rungs))
        if self.control == PEER:
            return ("", *(f"{PEER}({rho:g}, {nu:g})" for rho, nu in PEER_POINTS))
        return (self.sketch,)

    @property
    def measures(self) -> bool:
        """Whether its first backward pass measures how blocks share their budget."""
        return "measured" in self.sketch

    def fixed(self, budget: float) -> Way:
        """With kept tokens at a budget that nothing moves."""
        return replace(self, sketch=self.sketch.replace("0.3", f"{budget:g}"), control="")

    @property
    def kept(self) -> bool:
        """Whether it keeps tokens at a budget that stays."""
        return self.sketch.startswith("Tokens") and not self.control

    @property
    def point(self) -> str:
        """The name of its draws in ``tokens-noise``, as text; empty: they are not there."""
        if not self.sketch or self.control or self.measures or self.name == NONZERO:
            return ""
        made = make_sketch(self.sketch)
        if isinstance(made, sp.Rows):
            return f"rows-{made.budget:g}"
        if not isinstance(made, sp.Tokens):
            return ""
        return f"{made.budget:g}/{made.query_budget:g}/{made.key_budget:g}"


_TWO = (0.5, 1.0)


def _kept(budget: float, **more: Any) -> Way:
    """Budgets are even, as they were when these runs were made."""
    sketch = f"Tokens({budget:g})"
    return Way(f"tokens-{budget:g}", sketch, sketch, **{"follows": (LEAD,), **more})


def _shared(budget: float) -> Way:
    """What ``Tokens`` is now: a mean that blocks share out."""
    sketch = f"Tokens({budget:g}, share='measured')"
    name, label = f"shared-{budget:g}", f"Tokens({budget:g})"
    return Way(name, label, sketch, follows=(LEAD,))


_WAYS = (
    Way(EXACT, "exact", ""),
    _kept(0.3),
    _kept(0.2, shares=_TWO),
    _kept(0.5, shares=_TWO),  # what `advise` says to type for short texts
    # What `advise` says to type for the yields in batches of 16, whose reactions are padded: 0.2 of
    # the others.
    _kept(0.169, follows=(LEAD, PUBLISHED), shares=_TWO),
    *map(_shared, (0.3, 0.2, 0.1)),
    Way(TUNER, "Tuner", "Tokens(0.3)", TUNER, (EXACT, LEAD), _TWO),
    Way("tuner-shared", "Tuner", "Tokens(0.3, share='measured')", TUNER, (LEAD,)),
    Way("rows-0.3", "Rows(0.3) by token", 'Rows(0.3, unit="token")', shares=_TWO),
    Way(PEER, "VCAS", "", PEER, (EXACT, LEAD), (1.0,)),
    Way(NONZERO, "rows that are not zero", 'Rows(1.0, by="nonzero")'),
)
WAYS = {way.name: way for way in _WAYS}


def find_way(name: str) -> Way:
    if name not in WAYS:
        raise ExperimentError(f"way {name!r} is unknown; use some of {', '.join(WAYS)}")
    return WAYS[name]


class Steps(Control, Protocol):
    """A ``Control`` with a story to tell."""

    @property
    def story(self) -> list[Any]:
        """What was decided: step, mean of what is kept, and a number of its own."""


def rung_costs(costs: Sequence[float]) -> dict[float, float]:
    """Of steps at each rung; in a line through two, where only these were timed.

    >>> rung_costs([1.0, 0.8, 0.6])[0.25]
    0.675
    """
    if len(costs) == len(LADDER):
        return dict(zip(LADDER, costs, strict=True))
    exact, first, last = costs
    slope = (first - last) / (ENDS[0] - ENDS[1])
    return {p: exact if p == 1 else last + slope * (p - ENDS[1]) for p in LADDER}


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
        costs: Sequence[float],
        steps: int,
    ) -> None:
        self.costs = rung_costs(costs)
        self.tuner = sp.Tuner(
            model, problem.loss_of, optimizer=optimizer, steps=steps, clock=time.process_time
        )
        self.units = [len(group) for group in self.tuner.groups.values()]
        self.measuring = MEASURING if shares_in(model) else 0

    def cost(self, budgets: Sequence[float]) -> float:
        """Units are alike, so the mean over them of what all at such a budget would cost."""
        pairs = zip(self.units, budgets, strict=True)
        return sum(count * self.costs[p] for count, p in pairs) / sum(self.units)

    def probe_cost(self, trial: Sequence[float]) -> float:
        """Exact passes, one with all groups, and one with each alone where there are several."""
        count = len(trial)
        alone = [[p if k == i else 1.0 for k in range(count)] for i, p in enumerate(trial)]
        sketched = [trial, *alone] if count > 1 else [trial]
        return (3 + self.measuring) * self.costs[1.0] + sum(map(self.cost, sketched))

    def before(self, batch: Batch) -> float:
        trial = self.tuner.controller.probe_rungs()
        probed = self.tuner(batch) is not None
        own = self.cost(self.tuner.controller.budgets)
        return own + self.probe_cost(trial) if probed else own

    def state_dict(self) -> State:
        return self.tuner.state_dict()

    def load_state_dict(self, state: State) -> None:
        self.tuner.load_state_dict(state)

    @property
    def story(self) -> list[Any]:
        """The number is the change that was predicted."""
        return _story(self.tuner.log, "change")


def _story(log: Sequence[dict[str, Any]], number: str) -> list[Any]:
    return [
        [e["step"], round(fmean(e["budgets"].values()), 3), round(e.get(number, 1.0), 3)]
        for e in log
    ]


CONTROLS: dict[str, Callable[..., Steps]] = {TUNER: TunedSteps}
"""Of the ways whose budgets move; runs of ``PEER`` are on record, its code is archived."""
