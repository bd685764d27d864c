"""Budgets that change while training: a short ladder, a pure function of the step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from ..core.checks import check_budget
from .depth import shares_in
from .sketched import SketchedModule

Schedule = Callable[[int], float | int]
"""A step in, the budget from that step on out. Pure, so that a resumed run finds its place."""

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, init=False)
class Ladder:
    """A budget for each stretch of training: ``{first step: budget}``, and 0 must be one of them.

    A function of the step and nothing else: it is picklable, comparable, and needs no state in a
    checkpoint. Few rungs are meant: under ``torch.compile`` each new budget compiles once more.

    >>> ladder = Ladder({0: 1.0, 500: 0.5, 2000: 0.1})
    >>> ladder(499), ladder(500), ladder(10_000)
    (1.0, 0.5, 0.1)
    """

    rungs: tuple[tuple[int, float | int], ...]

    def __init__(self, rungs: Mapping[int, float | int]) -> None:
        if not isinstance(rungs, Mapping):
            raise TypeError(
                f"rungs={rungs!r} is a {type(rungs).__name__}; give a mapping from steps to "
                "budgets, for example Ladder({0: 1.0, 500: 0.1})"
            )
        for step in rungs:
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ValueError(
                    f"{step!r} is not a step; give integers from 0 on, for example "
                    "Ladder({0: 1.0, 500: 0.1})"
                )
        if 0 not in rungs:
            raise ValueError(
                f"no budget for step 0 among the steps {sorted(rungs)}; say where to start, for "
                "example Ladder({0: 1.0, 500: 0.1})"
            )
        ordered = tuple((step, check_budget(rungs[step])) for step in sorted(rungs))
        object.__setattr__(self, "rungs", ordered)

    def __call__(self, step: int) -> float | int:
        """The budget in force at ``step``."""
        if step < 0:
            raise ValueError(f"step={step!r} is before the start; give a step from 0 on")
        return self.rungs[bisect_right(self.rungs, step, key=lambda rung: rung[0]) - 1][1]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self.rungs)!r})"


def set_budget_(model: Model, budget: float | int) -> Model:
    """Gives every sketched layer of ``model`` the budget, in place, and returns the model.

    The rest of each sketch stays. If blocks share ``Tokens``, the budget is their mean. Call it
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
