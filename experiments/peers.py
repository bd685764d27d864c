"""Estimators of other papers and a control, to compare with: as published, not for use."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sketchprop.core import importance
from sketchprop.core.checks import wide_dtype
from sketchprop.core.compact import (
    CompactGradient,
    KeptRows,
    OfRows,
    TwoSided,
    Whole,
    scaled,
    take_rows,
)
from sketchprop.core.samples import Samples
from sketchprop.core.sampling import draw_uniforms
from sketchprop.sketches import Rows, Sketch
from sketchprop.sketches.rows import check_input


class ShuffledRows(Rows):
    """Rows met in random order by the systematic draw: what the order of rows gives."""

    def draw(self, p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.randperm(p.shape[-1])
        index, scale = super().draw(p[order], u)
        return order[index], scale


class _WeightGradientOnly(Sketch):
    """What the two peers have in common: dW is sampled by ‖g_b‖‖x_b‖, db is exact."""

    by_rows: ClassVar[bool] = True
    one_gradient: ClassVar[bool] = False

    @property
    def needs_input(self) -> bool:
        return True

    def compact(self, G: Tensor, W: Tensor | None, u: Tensor) -> CompactGradient:
        return self(G, W, u)

    def atom_count(self, B: int, n: int, d: int) -> int:
        return B

    def product_flops(self, B: int, n: int, d: int) -> float:
        return 4 * self.rank(B) * n * d

    def scoring_flops(self, B: int, n: int, d: int) -> float:
        return 2 * B * (n + d)


@dataclass(frozen=True, repr=False)
class VCAS(_WeightGradientOnly):
    """The estimator of VCAS (arXiv 2402.17227), without its control of budgets. Unbiased.

    Whole samples are kept by independent coins, p ∝ ‖G_s‖, ``samples`` of them in the mean
    (SampleA); dX is from those. dW is from a further draw among their rows, by independent coins
    with p ∝ ‖g_b‖‖x_b‖, ``budget`` of them in the mean (SampleW). db is exact.
    The published code sets both shares while training, from a variance it measures, and draws
    samples once for each block instead of in each layer.
    """

    sampling: str = "independent"
    samples: float | int = 1.0

    def __call__(
        self,
        G: Tensor,
        W: Tensor | None = None,
        u: Tensor | None = None,
        *,
        X: Tensor | None = None,
        layout: Samples | None = None,
    ) -> CompactGradient:
        X = check_input(X, self)
        by_row = Rows(self.budget, weights="gradient_input", unit="token", sampling=self.sampling)
        first = self._by_sample(G, W, X=X, layout=layout)
        assert isinstance(first, KeptRows)
        inner = by_row(first.values, W, X=take_rows(X, first.index))
        return TwoSided(first, OfRows(first.index, inner, first.B), Whole(G))

    @property
    def _by_sample(self) -> Rows:
        return Rows(self.samples, unit="sample", sampling=self.sampling)

    def uniform_shape(self, G: Tensor, W: Tensor | None) -> tuple[int, ...]:
        return (*G.shape[:-2], 2 * G.shape[-2])

    def probabilities(self, G: Tensor, W: Tensor | None = None) -> Tensor:
        """Of the samples."""
        return self._by_sample.probabilities(G)

    def keeps_all(self, B: int, n: int, d: int) -> bool:
        return super().keeps_all(B, n, d) and self._by_sample.keeps_all(B, n, d)

    def flops(
        self, B: int, n: int, d: int, *, input_grad: bool = True, weight_grad: bool = True
    ) -> float:
        total = self._by_sample.flops(B, n, d, input_grad=input_grad, weight_grad=False)
        r = round(self._by_sample.rank(B))
        return total + (super().flops(r, n, d, input_grad=False) if weight_grad else 0)


def vcas(p: float) -> VCAS:
    """4p/3 of the samples and half of their rows for dW: together p of the exact backward."""
    return VCAS(0.5, samples=min(1.0, 4 * p / 3))


@dataclass(frozen=True, repr=False)
class WTACRS(_WeightGradientOnly):
    """The estimator of WTA-CRS (arXiv 2305.15265): r rows for dW; dX and db are exact.

    With q_b = ‖g_b‖‖x_b‖/Σ the c largest are taken as they are, and r - c more are drawn from the
    others, one by one and with replacement, each divided by the number of times it is expected:
    Σ_{b ≤ c} g_b x_bᵀ + (1 - Q_c)/(r - c) Σ_j g_j x_jᵀ/q_j, c the minimum of (1 - Q_c)/(r - c).
    That is the paper's formula, and unbiased.

    ``paper=True`` is what the published code does in its default setting: where c = 0, as for
    norms without heavy tails, r rows are drawn without replacement and **not divided by
    anything**: the mean of dW is then about r/B of the gradient, **biased**.
    The published code further draws in forward, by norms of G from the epoch before; here both
    norms are those of this step, as its theory has it.
    """

    _: KW_ONLY
    paper: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampling == "independent":
            raise ValueError("WTACRS always keeps the same number of rows; leave out sampling=")

    def __call__(
        self,
        G: Tensor,
        W: Tensor | None = None,
        u: Tensor | None = None,
        *,
        X: Tensor | None = None,
        layout: Samples | None = None,
    ) -> CompactGradient:
        u = draw_uniforms(G, self.uniform_shape(G, W)) if u is None else u
        index, scale = self.choose(G, check_input(X, self), u)
        values = scaled(take_rows(G, index), scale.unsqueeze(-1))
        return TwoSided(Whole(G), KeptRows(index, values, G.shape[-2]), Whole(G))

    def choose(self, G: Tensor, X: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """The rows, some perhaps twice, and what each is multiplied with: ``[..., r]``."""
        r = int(self.rank(G.shape[-2]))
        q, order = self.probabilities(G, X=X).sort(-1, descending=True)
        sums = q.cumsum(-1)
        taken = torch.cat([torch.zeros_like(sums[..., :1]), sums[..., : r - 1]], -1)  # Q_c
        left = (1 - taken).clamp(min=0)
        slots = torch.arange(r, device=G.device)
        c = (left / (r - slots)).argmin(-1, keepdim=True)
        rest = left.gather(-1, c)
        points = (1 - rest) + u[..., :r].to(q.dtype) * rest
        drawn = torch.searchsorted(sums, points.contiguous(), right=True)
        last = (q > 0).sum(-1, keepdim=True).clamp(min=1) - 1
        drawn = torch.minimum(drawn.clamp(max=q.shape[-1] - 1).maximum(c), last)
        place = torch.where(slots < c, slots, drawn.maximum(c))
        again = torch.where(rest > 0, rest / ((r - c) * q.gather(-1, place)), 0.0)
        scale = torch.where(slots < c, 1.0, again)
        if self.paper:
            # Weighted draws without replacement: the largest u^(1/q).
            without = (u[..., r:].to(q.dtype).log() / q).topk(r, -1).indices
            place = torch.where(c == 0, without, place)
            scale = torch.where(c == 0, 1.0, scale)
        return order.gather(-1, place), scale + 0 * q.sum(-1, keepdim=True)

    def uniform_shape(self, G: Tensor, W: Tensor | None) -> tuple[int, ...]:
        count = int(self.rank(G.shape[-2])) + (G.shape[-2] if self.paper else 0)
        return (*G.shape[:-2], count)

    def probabilities(
        self, G: Tensor, W: Tensor | None = None, *, X: Tensor | None = None
    ) -> Tensor:
        """q_b, of one draw; not the probability to be among the r."""
        energies = importance.row_energies(G) * importance.row_energies(check_input(X, self))
        norms = energies.to(wide_dtype(G)).sqrt()
        total = norms.sum(-1, keepdim=True)
        return torch.where(total == 0, torch.full_like(norms, 1 / norms.shape[-1]), norms / total)

    def flops(
        self, B: int, n: int, d: int, *, input_grad: bool = True, weight_grad: bool = True
    ) -> float:
        exact = 2.0 * B * n * d if input_grad else 0.0
        return exact + (super().flops(B, n, d, input_grad=False) if weight_grad else 0)
