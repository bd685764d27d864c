"""Estimators of other papers and a control, to compare with: as published, not for use."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from sketchprop.core import importance
from sketchprop.core.compact import (
    KeptRows,
    OfRows,
    RowAtoms,
    TwoSided,
    Whole,
    scaled,
    take_rows,
)
from sketchprop.core.cost import Cost, Size
from sketchprop.core.probabilities import wide_dtype
from sketchprop.core.sampling import Uniforms, draw_uniforms
from sketchprop.core.vjp import Vjp
from sketchprop.sketches import Rows, RowSketch


class ShuffledRows(Rows):
    """Rows met in random order by the systematic draw: what the order of rows gives."""

    def atoms(self, vjp: Vjp) -> RowAtoms:
        atoms = super().atoms(vjp)
        p = atoms.probabilities
        order = torch.randperm(p.shape[-1])
        units = order.unsqueeze(-1) if atoms.units is None else atoms.units[order]
        return replace(atoms, probabilities=p[..., order], units=units)


@dataclass(frozen=True)
class _Samples(RowAtoms):
    """Samples for dX; for dW rows among them, drawn once more."""

    _: KW_ONLY
    rows_of_samples: Rows

    def draw(self, vjp: Vjp, uniforms: Uniforms = draw_uniforms) -> TwoSided:
        first = super().draw(vjp, uniforms)
        assert isinstance(first, KeptRows)
        assert vjp.X is not None
        kept = Vjp(first.values, vjp.W, take_rows(vjp.X, first.index))
        inner = self.rows_of_samples(kept, uniforms)
        return TwoSided(first, OfRows(first.index, inner, first.B), Whole(vjp.G))


@dataclass(frozen=True, repr=False)
class VCAS(RowSketch):
    """The estimator of VCAS (arXiv 2402.17227), without its control of budgets. Unbiased.

    Whole samples are kept by independent coins, p ∝ ‖G_s‖, ``samples`` of them in the mean
    (SampleA); dX is from those. dW is from a further draw among their rows, by independent coins
    with p ∝ ‖g_b‖‖x_b‖, ``budget`` of them in the mean (SampleW). db is exact.
    The published code sets both shares while training, from a variance it measures, and draws
    samples once for each block instead of in each layer.
    """

    sampling: str = "independent"
    samples: float | int = 1.0

    sees: ClassVar[str] = "GX"

    @property
    def by_sample(self) -> Rows:
        return Rows(self.samples, unit="sample", sampling=self.sampling)

    @property
    def by_row(self) -> Rows:
        return Rows(self.budget, by="gradient_input", unit="token", sampling=self.sampling)

    def importance(self, vjp: Vjp) -> Tensor:
        return self.by_sample.importance(vjp)

    def atoms(self, vjp: Vjp) -> _Samples:
        vjp.input(self)
        drawn = self.by_sample.atoms(vjp)
        return _Samples(
            drawn.probabilities,
            drawn.rank,
            drawn.sampling,
            drawn.units,
            rows_of_samples=self.by_row,
        )

    def keeps_all(self, B: int, n: int, d: int) -> bool:
        return super().keeps_all(B, n, d) and self.by_sample.keeps_all(B, n, d)

    def cost(self, size: Size, *, lasting: bool = False) -> Cost:
        samples = self.by_sample.cost(size._replace(weight_grad=False))
        kept = size._replace(B=round(self.by_sample.rank(size.B)), input_grad=False)
        return samples.plus(self.by_row.cost(kept))


@dataclass(frozen=True, repr=False)
class BalancedVCAS(VCAS):
    """4p/3 of the samples and half of their rows for dW: together p of the exact backward."""

    @property
    def by_sample(self) -> Rows:
        return Rows(min(1.0, 4 * self.budget / 3), unit="sample", sampling=self.sampling)

    @property
    def by_row(self) -> Rows:
        return Rows(0.5, by="gradient_input", unit="token", sampling=self.sampling)


@dataclass(frozen=True, repr=False)
class WTACRS(RowSketch):
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

    sees: ClassVar[str] = "GX"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampling == "independent":
            raise ValueError("WTACRS always keeps the same number of rows; leave out sampling=")

    def importance(self, vjp: Vjp) -> Tensor:
        return wta_probabilities(vjp.G, vjp.input(self)).square()

    def atoms(self, vjp: Vjp) -> _Winners:
        q, order = wta_probabilities(vjp.G, vjp.input(self)).sort(-1, descending=True)
        return _Winners(q, self.rank(q.shape[-1]), order=order, paper=self.paper)

    def cost(self, size: Size, *, lasting: bool = False) -> Cost:
        exact = Cost(size._replace(weight_grad=False).exact_flops)
        if not size.weight_grad:
            return exact
        rows = super().cost(size._replace(input_grad=False))
        return rows.plus(Cost(exact.products, 2 * size.B * size.d))


def wta_probabilities(G: Tensor, X: Tensor) -> Tensor:
    """q_b, of one draw; not the probability to be among the r."""
    energies = importance.row_energies(G) * importance.row_energies(X)
    norms = energies.to(wide_dtype(G)).sqrt()
    total = norms.sum(-1, keepdim=True)
    return torch.where(total == 0, torch.full_like(norms, 1 / norms.shape[-1]), norms / total)


@dataclass(frozen=True)
class _Winners(RowAtoms):
    """Rows from the most likely on; ``order``: where each of them is in G."""

    _: KW_ONLY
    order: Tensor
    paper: bool = False

    def choose(self, uniforms: Uniforms = draw_uniforms) -> tuple[Tensor, Tensor]:
        """The rows, some perhaps twice, and what each is multiplied with: ``[..., r]``."""
        q, r = self.probabilities, int(self.rank)
        sums = q.cumsum(-1)
        taken = torch.cat([torch.zeros_like(sums[..., :1]), sums[..., : r - 1]], -1)  # Q_c
        left = (1 - taken).clamp(min=0)
        slots = torch.arange(r, device=q.device)
        c = (left / (r - slots)).argmin(-1, keepdim=True)
        rest = left.gather(-1, c)
        # One draw for each slot, from what is left: q is then the probability of that draw.
        tail = torch.arange(q.shape[-1], device=q.device) >= c
        each = torch.where(tail & (rest > 0), q / rest, 0.0).unsqueeze(-2)
        u = uniforms(each.expand(*q.shape[:-1], r, -1), (*q.shape[:-1], r))
        points = (1 - rest) + u.to(q.dtype) * rest
        drawn = torch.searchsorted(sums, points.contiguous(), right=True)
        last = (q > 0).sum(-1, keepdim=True).clamp(min=1) - 1
        drawn = torch.minimum(drawn.clamp(max=q.shape[-1] - 1).maximum(c), last)
        place = torch.where(slots < c, slots, drawn.maximum(c))
        again = torch.where(rest > 0, rest / ((r - c) * q.gather(-1, place)), 0.0)
        scale = torch.where(slots < c, 1.0, again)
        if self.paper:
            # Weighted draws without replacement: the largest u^(1/q).
            coins = uniforms(q, tuple(q.shape))
            without = (coins.to(q.dtype).log() / q).topk(r, -1).indices
            place = torch.where(c == 0, without, place)
            scale = torch.where(c == 0, 1.0, scale)
        return self.order.gather(-1, place), scale + 0 * q.sum(-1, keepdim=True)

    def keep(self, vjp: Vjp, index: Tensor, scale: Tensor) -> TwoSided:
        values = scaled(take_rows(vjp.G, index), scale.unsqueeze(-1))
        return TwoSided(Whole(vjp.G), KeptRows(index, values, vjp.G.shape[-2]), Whole(vjp.G))
