"""Budgets that change while training: given by hand, or by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

from ..core.checks import check_budget
from .depth import shares_in
from .sketched import SketchedModule

Schedule = Mapping[int, float | int]
"""From which step on which budget: ``{0: 1.0, 500: 0.3}``. A resumed run needs no state for it.
Few are meant: under ``torch.compile`` each new budget compiles once more."""

Model = TypeVar("Model", bound=nn.Module)


def check_schedule(schedule: Schedule) -> Schedule:
    """A copy in the order of steps, if it has a budget for each step."""
    example = "for example {0: 1.0, 500: 0.1}"
    if not isinstance(schedule, Mapping):
        raise TypeError(f"schedule={schedule!r}; give budgets by their first step, {example}")
    for step in schedule:
        if type(step) is not int or step < 0:
            raise ValueError(
                f"schedule has the step {step!r}, {type(step).__name__}; steps are integers from 0 "
                f"on, {example}"
            )
    if 0 not in schedule:
        raise ValueError(f"schedule={schedule!r} has no budget for step 0; {example}")
    return {step: check_budget(schedule[step]) for step in sorted(schedule)}


def budget_at(schedule: Schedule, step: int) -> float | int:
    """
    >>> budget_at({0: 1.0, 500: 0.5}, 499), budget_at({0: 1.0, 500: 0.5}, 500)
    (1.0, 0.5)
    """
    return schedule[max(first for first in schedule if first <= step)]


def set_budget_(model: Model, budget: float | int) -> Model:
    """Gives every sketched layer of ``model`` the budget, in place, and returns the model.

    All other options stay. Blocks that share a budget distribute the new one as before. Call it
    between steps: activation checkpointing replays a forward pass in backward, and both must see
    the same budget.

        set_budget_(model, 0.5)
    """
    budget = check_budget(budget)
    states = [m.sketching for m in model.modules() if isinstance(m, SketchedModule)]
    if not states:
        raise ValueError(f"{type(model).__name__} has no sketched layer; call sketch_ on it first")
    for shares in shares_in(model):
        tokens = shares.tokens.with_budget(budget)
        if repr(tokens) != repr(shares.tokens):
            shares.give(tokens)
    for state in states:
        state.idle = False
        if state.shares is not None:
            continue
        sketch = state.sketch.with_budget(budget)
        # As text, because 1 is a rank and 1.0 is everything: equal numbers, different budgets.
        if repr(sketch) != repr(state.sketch):
            state.sketch = sketch
    return model
