"""Rows drawn in the forward pass: only r rows of X are kept for dW."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core import importance
from ..core.checks import solve_dtype
from ..core.compact import CompactGradient, KeptRows, TwoSided, Whole, scaled, take_rows
from ..core.probabilities import water_fill
from ..core.samples import Samples
from ..core.sampling import draw_uniforms
from .amortised import STALE_FLOOR
from .base import AtomSketch, Plan
from .rows import check_input

WEIGHTS = ("uniform", "input", "running")
DECAY = 0.9
"""What a running mean keeps of its past in each step."""


@dataclass(frozen=True, repr=False)
class ForwardRows(AtomSketch):
    """r rows of X, drawn in forward and saved for dW = Σ g_b x_bᵀ/p_b; dX and db are exact.

    ``weights="uniform"``: equal p. ``"input"``: p ∝ ‖x_b‖ (a row with x_b = 0 adds nothing to dW).
    ``"running"``: p ∝ ‖x_b‖ times a running mean of ‖g‖ at the row's position in its sample, with
    a floor under it, so that it is unbiased whatever changes; layers that ``sketch_`` has turned
    remember it (under ``torch.compile`` and in ``nn.MultiheadAttention`` it is ``"input"``).

    Saves r·d instead of B·d numbers for each layer, and 2(B - r)nd FLOPs of dW. What another
    operation keeps alive anyway is not freed: see ``meters.saved_bytes``. The draw is
    made in forward from the default generator, as dropout's is: activation checkpointing repeats
    it. For linear layers and attention projections.
    """

    _: KW_ONLY
    weights: str = "input"
    batch_first: bool = True

    by_rows: ClassVar[bool] = True
    one_gradient: ClassVar[bool] = False
    draws_forward: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights not in WEIGHTS:
            raise ValueError(
                f"weights={self.weights!r} is unknown; use weights='uniform', 'input' or 'running'"
            )

    @property
    def needs_input(self) -> bool:
        return self.weights != "uniform"

    def layout_of(self, dims: tuple[int, ...]) -> Samples:
        return Samples.of(dims, 0 if self.batch_first or len(dims) < 2 else 1)

    def memory(self) -> RowMemory | None:
        return RowMemory() if self.weights == "running" else None

    def choose(
        self, X: Tensor, layout: Samples, memory: object = None, u: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """In forward: the rows ``[..., r]`` to save, and the 1/p of each."""
        p = water_fill(self._roots(X, layout, memory), self.rank(X.shape[-2]))
        if u is None:
            u = draw_uniforms(X, self._shape(X))
        index, scale = self.draw(p, u)
        return layout.row_of(index), scale

    def plan(self, G: Tensor, W: Tensor | None = None, *, X: Tensor | None = None) -> Plan:
        rows = check_input(X, self) if self.needs_input else G
        roots = self._roots(rows, Samples(1, G.shape[-2], 1), None)
        return Plan(water_fill(roots, self.rank(G.shape[-2])))

    def probabilities(
        self, G: Tensor, W: Tensor | None = None, *, X: Tensor | None = None
    ) -> Tensor:
        return self.plan(G, W, X=X).probabilities

    def __call__(
        self,
        G: Tensor,
        W: Tensor | None = None,
        u: Tensor | None = None,
        *,
        X: Tensor | None = None,
        layout: Samples | None = None,
    ) -> CompactGradient:
        """The same estimate where X is still whole; ``sketched_linear`` draws in forward."""
        rows = check_input(X, self) if self.needs_input else G
        index, scale = self.choose(rows, layout or Samples(1, G.shape[-2], 1), None, u)
        return self.keep(G, Plan(scale), index, scale)

    def compact(self, G: Tensor, W: Tensor | None, u: Tensor) -> CompactGradient:
        return self(G, W, u)

    def keep(self, G: Tensor, plan: Plan, index: Tensor, scale: Tensor) -> TwoSided:
        values = scaled(take_rows(G, index), scale.unsqueeze(-1))
        # A row that is not kept is not looked at; a non-finite one must be seen.
        values = values + 0 * G.sum((-2, -1), keepdim=True)
        return TwoSided(Whole(G), KeptRows(index, values, G.shape[-2]), Whole(G))

    def _roots(self, X: Tensor, layout: Samples, memory: object) -> Tensor:
        if self.weights == "uniform":
            return torch.ones(X.shape[:-1], dtype=solve_dtype(X), device=X.device)
        roots = layout.sample_major(importance.row_energies(X).sqrt())
        if self.weights == "running" and isinstance(memory, RowMemory):
            roots = roots * memory.levels(roots, layout)
        return roots

    def _shape(self, X: Tensor) -> tuple[int, ...]:
        return tuple(X.shape[:-2]) if self.sampling == "exact" else tuple(X.shape[:-1])

    def atom_count(self, B: int, n: int, d: int) -> int:
        return B

    def product_flops(self, B: int, n: int, d: int) -> float:
        return 4 * self.rank(B) * n * d

    def flops(
        self, B: int, n: int, d: int, *, input_grad: bool = True, weight_grad: bool = True
    ) -> float:
        exact = 2.0 * B * n * d if input_grad else 0.0
        return exact + (super().flops(B, n, d, input_grad=False) if weight_grad else 0)

    def scoring_flops(self, B: int, n: int, d: int) -> float:
        return 0 if self.weights == "uniform" else 2 * B * d

    def saved_share(self, B: int) -> float:
        """Rows of X that stay in memory until backward, as a share."""
        return self.rank(B) / max(1, B)


class RowMemory:
    """The mean ‖g‖ at each position of a sample, of one layer; not part of a ``state_dict``."""

    def __init__(self) -> None:
        self._norms: Tensor | None = None

    def levels(self, roots: Tensor, layout: Samples) -> Tensor:
        """What each row's ‖g‖ is expected to be, up to a factor; ones at first."""
        norms = self._norms
        if norms is None or norms.shape[-1] != layout.tokens or norms.device != roots.device:
            return torch.ones_like(roots)
        mean = norms.mean(-1, keepdim=True)
        level = torch.where(mean > 0, norms / mean, 1.0) * (1 - STALE_FLOOR) + STALE_FLOOR
        return level.to(roots.dtype).repeat(layout.samples)

    def forget(self) -> None:
        """Starts anew, as after ``sketch_``."""
        self._norms = None

    def update(self, G: Tensor, layout: Samples) -> None:
        """After a backward pass; a gradient that is not finite is not remembered."""
        rows: Any = torch.linalg.vector_norm(G, dim=-1, dtype=solve_dtype(G))
        norms = layout.sample_major(rows).reshape(-1, layout.tokens).mean(0)
        norms = torch.where(norms.isfinite(), norms, 0.0)
        old = self._norms
        if old is not None and old.shape == norms.shape and old.device == norms.device:
            norms = DECAY * old + (1 - DECAY) * norms
        self._norms = norms
