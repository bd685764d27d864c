"""The paper's mask of single elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..core.compact import ElementAtoms
from ..core.cost import Cost, Size, drawing_flops
from ..core.probabilities import wide_dtype
from ..core.vjp import Vjp
from .base import Sketch


@dataclass(frozen=True, repr=False)
class ElementMask(Sketch):
    """Single elements of W (for dX) and of X (for dW) with equal probability.

    dX = G (W ∘ M_W)/p, dW = Gᵀ (X ∘ M_X)/p; db is exact. Cost 4Bnd: it saves nothing without a
    sparse product, and is here because the paper compares with it. ``"fixed"`` keeps the same
    number of elements in each row of W and X, ``"independent"`` tosses a coin per element.
    """

    sees: ClassVar[str] = "GW"

    def atoms(self, vjp: Vjp) -> ElementAtoms:
        G, d = vjp.G, vjp.weight(self).shape[-1]
        rows = (*G.shape[:-2], G.shape[-1] + G.shape[-2], d)
        rank = self.rank(d)
        p = torch.full(rows, rank / d, dtype=wide_dtype(G), device=G.device)
        return ElementAtoms(p, rank, self.sampling)

    def atom_count(self, B: int, n: int, d: int) -> int:
        return d

    def cost(self, size: Size, *, lasting: bool = False) -> Cost:
        if not size.sides:
            return Cost(0)
        # Each row of W and X is drawn apart and then multiplied with its mask.
        _, n, d, *_ = size
        drawing = (n + size.B) * (d + drawing_flops(d, self.rank(d), self.sampling))
        return Cost(size.exact_flops, 0, drawing)
