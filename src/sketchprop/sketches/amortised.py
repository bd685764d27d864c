"""Plans that look at a part of G, or at an earlier G: cheaper, and still unbiased.

A plan may come from anywhere, as long as it does not know the draw and every atom that is not
zero has p > 0. A plan that has not seen all of the present G cannot know which atoms are zero,
so it keeps a floor under all of them: p ← (1 - ε)·p + ε·r/n.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ..core.checks import check_refresh, check_score_rows
from ..core.compact import CompactGradient
from ..core.sampling import draw_uniforms
from .base import AtomSketch, Plan

STALE_FLOOR = 0.1
"""The share of uniform probabilities under a plan that has not seen all of G."""


@dataclass(frozen=True, repr=False)
class AmortisedSketch(AtomSketch):
    """A sketch whose plan need not be made from all of G, nor anew in each step.

    ``score_rows``: the share (a float in (0, 1]) or the number (an int) of rows of G, evenly
    spaced, that the plan looks at. ``refresh_every``: a layer uses its plan for so many backward
    passes before it makes a new one (layers that ``sketch_`` has turned remember their plan;
    under ``torch.compile``, and without such a memory, every step makes its own).
    Both put a floor under p: unbiased whatever changed in between.
    """

    _: KW_ONLY
    score_rows: float | int = 1.0
    refresh_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_score_rows(self.score_rows)
        check_refresh(self.refresh_every)

    def memory(self) -> PlanMemory | None:
        return PlanMemory() if self.refresh_every > 1 else None

    @property
    def partial(self) -> bool:
        """Whether the plan may not have seen all of the G that it is used for."""
        return self.refresh_every > 1 or self.score_rows != 1.0

    def plan(self, G: Tensor, W: Tensor | None) -> Plan:
        if not self.partial:
            return self.full_plan(G, W)
        plan = self.partial_plan(self.scored(G), W)
        n = plan.probabilities.shape[-1]
        level = self.rank(n) / n
        # A plan outlives a step: one made from a non-finite G must not poison those after it.
        p = torch.where(plan.probabilities.isfinite(), plan.probabilities, level)
        return Plan(p * (1 - STALE_FLOOR) + STALE_FLOOR * level, plan.basis)

    @abstractmethod
    def full_plan(self, G: Tensor, W: Tensor | None) -> Plan:
        """The plan for this very G."""

    @abstractmethod
    def partial_plan(self, G: Tensor, W: Tensor | None) -> Plan:
        """A plan for any gradient like G, with as many columns and any number of rows."""

    def scored(self, G: Tensor) -> Tensor:
        """The rows that the plan looks at, as a view."""
        B = G.shape[-2]
        rows = self.score_rows if isinstance(self.score_rows, int) else self.score_rows * B
        return G[..., :: max(1, int(B // max(1, rows))), :]

    def scored_rows(self, B: int) -> int:
        """How many of B rows that is."""
        rows = self.score_rows if isinstance(self.score_rows, int) else self.score_rows * B
        return -(-B // max(1, int(B // max(1, rows))))


class PlanMemory:
    """The last plan of one layer and how often it was used; not part of a ``state_dict``."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._made_for: tuple[object, ...] = ()
        self._uses = 0

    def forget(self) -> None:
        """Drops the plan: for gradients that were none, as those of a dry run."""
        self._plan = None

    def compact(
        self, sketch: AmortisedSketch, G: Tensor, W: Tensor | None, u: Tensor | None
    ) -> CompactGradient:
        """Ĝ from the remembered plan, or from a new one when it is due or does not fit."""
        now = (sketch, G.shape[:-2], G.shape[-1], G.dtype, G.device)
        if self._plan is None or self._made_for != now or self._uses >= sketch.refresh_every:
            self._plan, self._made_for, self._uses = sketch.plan(G, W), now, 0
        self._uses += 1
        if u is None:
            u = draw_uniforms(G, sketch.uniform_shape(G, W))
        return sketch.follow(self._plan, G, u)
