"""What the callbacks share: apply a sketch, follow a schedule, say what is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..layers import SketchedModule
from ..layers.depth import load_shares_
from ..layers.schedule import Schedule, budget_at, check_schedule, set_budget_
from ..layers.select import Filter
from ..layers.share import kept_flops
from ..layers.transform import sketch_
from ..sketches import AnySketch, Planner
from ..tuning import Tuner


class SketchOptions:
    """What every callback takes.

    ``sketch``, ``filter_fn`` and ``planner``: as for ``sketch_``; ``sketch=None`` leaves the model
    as it is. ``schedule``: the budget of all sketched layers by step, ``{0: 1.0, 500: 0.3}``.
    ``tuner``: a function ``(model, optimizer) -> Tuner``. The tuner gets the number of steps, and
    the trainer's checkpoints hold its state. With ``frozen=True`` it only measures noise.
    ``rows``: samples × tokens of a forward pass, for which kept FLOPs are counted.

    All values are added to the trainer's own logs.
    """

    tuner: Tuner | None = None

    def __init__(
        self,
        sketch: AnySketch | Mapping[str, AnySketch | None] | None,
        filter_fn: Filter | None = None,
        schedule: Schedule | None = None,
        *,
        planner: Planner | None = None,
        tuner: Callable[[nn.Module, Any], Tuner] | None = None,
        rows: int = 128,
    ) -> None:
        if tuner is not None and schedule is not None:
            raise TypeError("both schedule= and tuner= move the budgets: give one of them")
        if tuner is not None and not callable(tuner):
            raise TypeError(
                f"tuner={tuner!r} cannot be called; give a function that makes one, for example "
                "lambda model, optimizer: Tuner(model, loss_fn, optimizer=optimizer)"
            )
        if sketch is None and filter_fn is not None:
            raise TypeError("filter_fn chooses the layers of a sketch: give a sketch with it")
        self.sketch, self.filter_fn, self.planner = sketch, filter_fn, planner
        self.make_tuner, self.rows = tuner, rows
        self.schedule = None if schedule is None else check_schedule(schedule)

    def begin(self, model: nn.Module, step: int, shares: Any = None) -> None:
        """Sketches ``model`` and gives it the budget of ``step``; blocks share it out as in the
        checkpoint that ``shares`` are from."""
        if self.sketch is not None:
            sketch_(model, self.sketch, self.filter_fn, planner=self.planner)
        load_shares_(model, shares or {})
        self.follow(model, step)

    def follow(self, model: nn.Module, step: int) -> None:
        """The budget of ``step``; nothing without a schedule."""
        if self.schedule is not None:
            set_budget_(model, budget_at(self.schedule, step))

    def start_tuner(self, model: nn.Module, optimizer: Any, steps: float, state: Any) -> None:
        """Makes the tuner, if there is to be one, tells it how many times it will be called, if
        that is known, and lets it go on from ``state``."""
        if self.make_tuner is None:
            return
        # accelerate wraps the optimizer that was given.
        self.tuner = self.make_tuner(model, getattr(optimizer, "optimizer", optimizer))
        if self.tuner.steps is None and 0 < steps < math.inf:
            self.tuner.expect(int(steps))
        if state:
            self.tuner.load_state_dict(state)

    def values(self, model: nn.Module) -> dict[str, float]:
        """What there is to log, with what the tuner found last."""
        logged = {"sketch_kept_flops": kept_flops(model, self.rows)}
        states = [m.sketching for m in model.modules() if isinstance(m, SketchedModule)]
        # Of blocks that share a budget that one.
        budgets = {(s.shares.tokens if s.shares else s.sketch).budget for s in states}
        if len(budgets) == 1:
            logged["sketch_budget"] = float(budgets.pop())
        if self.tuner is not None and self.tuner.log:
            last = self.tuner.log[-1]
            logged.update({f"sketch_{k}": last[k] for k in ("change", "noise") if k in last})
        return logged
