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
    """A schedule that has a budget for each step."""
    steps = list(schedule) if isinstance(schedule, Mapping) else []
    if 0 not in steps or any(type(step) is not int or step < 0 for step in steps):
        raise ValueError(
            f"schedule={schedule!r}; give a budget from each of some steps on, of which 0 is one, "
            "for example {0: 1.0, 500: 0.1}"
        )
    for budget in schedule.values():
        check_budget(budget)
    return schedule


def budget_at(schedule: Schedule, step: int) -> float | int:
    """
    >>> budget_at({0: 1.0, 500: 0.5}, 499), budget_at({0: 1.0, 500: 0.5}, 500)
    (1.0, 0.5)
    """
    return schedule[max(first for first in schedule if first <= step)]


def set_budget_(model: Model, budget: float | int) -> Model:
    """Gives every sketched layer of ``model`` the budget, in place, and returns the model.

    The rest of each sketch stays; blocks share the new budget as they shared the old one. Call it
    between steps: activation checkpointing replays a forward pass in backward, and both must see
    the same budget.

        set_budget_(model, 0.5)
    """
    budget = check_budget(budget)
    states = [m.sketching for m in model.modules() if isinstance(m, SketchedModule)]
    if not states:
        raise ValueError(f"{type(model).__name__} has no sketched layer; call sketch_ on it first")
    for shares in shares_in(model):
        shares.give(shares.tokens.with_budget(budget))
    for state in states:
        state.idle = False
        if state.shares is not None:
            continue
        sketch = state.sketch.with_budget(budget)
        # As text, because 1 is a rank and 1.0 is everything: equal numbers, different budgets.
        if repr(sketch) != repr(state.sketch):
            state.sketch = sketch
    return model
