"""Planners: who makes the atoms of a layer's gradient, and when.

Without a planner a sketch makes them anew in each step, from all of G. Atoms may come from
anywhere, as long as they do not know the draw and every atom that is not zero has p > 0. Atoms
that have not seen all of the present G cannot know which of them are zero, so a floor is kept
under all: p ← (1 - ε)·p + ε·r/n.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from ..core.checks import check_count, check_share
from ..core.cost import Cost, Size
from ..core.importance import column_sums
from ..core.sampling import Atoms
from ..core.vjp import Vjp
from .base import NOT_LASTING, Sketch
from .split import LayerSketch

STALE_FLOOR = 0.1
"""The share of uniform probabilities under atoms that have not seen all of G."""


class Planner(ABC):
    """Makes the atoms for one layer; ``anew()`` is one for another layer, without memories.

    What it remembers is not part of a ``state_dict``. Under ``torch.compile`` a step may have no
    side effects: there every step makes its own atoms.
    """

    @abstractmethod
    def atoms(self, sketch: Sketch, vjp: Vjp) -> Atoms:
        """The atoms to draw from in this step."""

    def refusal(self, sketch: Sketch) -> str:
        """Why it cannot serve ``sketch``; empty if it can."""
        return ""

    def cost(self, sketch: LayerSketch, size: Size) -> Cost:
        """FLOPs of a step, what is spread over several steps by its share."""
        return sketch.cost(size)

    def forget(self) -> None:
        """Drops what was remembered, as after gradients of a dry run."""
        return None

    def anew(self) -> Self:
        """One for another layer."""
        twin = copy(self)
        twin.forget()
        return twin


@dataclass
class Every(Planner):
    """New atoms every so many ``steps``, and the same ones in between.

    ``rows``: made from a share (a float in (0, 1]) or a number (an int) of the rows of G, evenly
    spaced: ``Every(1, rows=0.1)`` looks at a tenth of them in each step.

    >>> Every(50)
    Every(steps=50, rows=1.0)
    """

    steps: int
    rows: float | int = 1.0
    _known: dict[Sketch, tuple[Any, int, Atoms]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """The shape of gradients that atoms were made for, how often they were used, and they."""

    def __post_init__(self) -> None:
        check_count("steps", self.steps, "a number of steps")
        check_share("rows", self.rows)

    def atoms(self, sketch: Sketch, vjp: Vjp) -> Atoms:
        G = vjp.G
        now = (G.shape[:-2], G.shape[-1], G.dtype, G.device)
        made_for, uses, atoms = self._known.get(sketch, (None, 0, None))
        if atoms is None or made_for != now or uses >= self.steps:
            some_rows = G[..., :: self._stride(G.shape[-2]), :]
            uses, atoms = 0, floored(sketch.lasting_atoms(vjp._replace(G=some_rows)))
        self._known[sketch] = (now, uses + 1, atoms)
        return seen_now(atoms, G)

    def forget(self) -> None:
        self._known = {}

    def refusal(self, sketch: Sketch) -> str:
        lasting = type(sketch).lasting_atoms is not Sketch.lasting_atoms
        return "" if lasting else f"{sketch!r} {NOT_LASTING}"

    def cost(self, sketch: LayerSketch, size: Size) -> Cost:
        whole = sketch.cost(size, lasting=True)
        if not size.sides:
            return whole
        looked_at = -(-size.B // self._stride(size.B))
        part = sketch.cost(size._replace(B=looked_at), lasting=True)
        return whole._replace(
            scoring=part.scoring / self.steps,
            scoring_products=part.scoring_products / self.steps,
            drawing=whole.drawing + size.B * size.n,
        )

    def _stride(self, B: int) -> int:
        wanted = self.rows if isinstance(self.rows, int) else self.rows * B
        return max(1, int(B // max(1, wanted)))


def floored(atoms: Atoms) -> Atoms:
    """The same atoms with a floor under p; what a non-finite G made becomes uniform.

    They outlive a step: one step that is not finite must not poison those after it.
    """
    p = atoms.probabilities
    level = atoms.rank / p.shape[-1]
    p = torch.where(p.isfinite(), p, level)
    return replace(atoms, probabilities=p * (1 - STALE_FLOOR) + STALE_FLOOR * level)


def seen_now(atoms: Atoms, G: Tensor) -> Atoms:
    """The same atoms, NaN where the present G is not finite: what is dropped is not looked at."""
    unseen = (0 * column_sums(G)).sum(-1, keepdim=True)
    return replace(atoms, probabilities=atoms.probabilities + unseen)
