"""Sketches of rows: the few samples and tokens that carry the gradient.

Columns compound over depth, rows need not: once a draw has left r rows of G, only those are not
zero in the layers below, where each of them has p = 1 and nothing is added.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core import importance
from ..core.checks import solve_dtype, wide_dtype
from ..core.compact import CompactGradient, KeptRows, OfRows, TwoSided, Whole, scaled, take_rows
from ..core.probabilities import water_fill
from ..core.samples import Samples
from ..core.sampling import draw_uniforms
from .base import AtomSketch, Plan, Sketch, part_of

WEIGHTS = ("gradient", "gradient_input", "uniform")
UNITS = ("sample", "token", None)


@dataclass(frozen=True, repr=False)
class Rows(AtomSketch):
    """Rows of G (samples, tokens), drawn by what they carry. Cost 4rnd + O(Bn).

    ``weights="gradient"``: p ∝ ‖g_b‖, the optimum for Ĝ itself. ``"gradient_input"``:
    p ∝ ‖g_b‖√(‖x_b‖² + α), the optimum for dW with a share α of what dX and db need (without it a
    row with x_b = 0 would have p = 0, and its dX a bias). ``"uniform"``: the rows that are not
    zero with equal probability. With all three, **where at most r units are not zero, they are
    all kept with p = 1**: one draw at the top of a network serves all layers below. Include the
    last layer for that: ``sketch_(model, Rows(0.1, unit="sample"), select.everything)``.

    ``unit="token"``: each row by itself. ``"sample"``: all tokens or pixels of a sample are kept
    or dropped together, so that zero rows survive attention and convolutions; p is then from
    √Σ of the squared weights of its rows. ``None``: samples in convolutions, tokens elsewhere.
    The sample's axis is the first of a layer's input, or with ``batch_first=False`` the second
    (``nn.MultiheadAttention`` knows its own); rows that a model has flattened into one axis each
    count as a sample.
    The draw runs through the rows sample by sample, whatever their order in memory: systematic
    sampling is then stratified over samples and positions.

    ``then``: the kept rows sketched once more, for example by columns: ``Rows(0.3,
    then=L1(0.3))`` multiplies 0.09 of G. Still unbiased: E[Ĝ | rows] has the mean G.

    >>> G = torch.zeros(100, 8)
    >>> G[[3, 50, 97]] = 1.0
    >>> Rows(0.1)(G).dense().equal(G)
    True
    """

    _: KW_ONLY
    weights: str = "gradient"
    unit: str | None = None
    batch_first: bool = True
    then: Sketch | None = None

    by_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights not in WEIGHTS:
            raise ValueError(
                f"weights={self.weights!r} is unknown; use weights='gradient', 'gradient_input' "
                "or 'uniform'"
            )
        if self.unit not in UNITS:
            raise ValueError(
                f"unit={self.unit!r} is unknown; use unit='sample' (all tokens of a sample "
                "together), 'token' (each row by itself) or None (by the kind of layer)"
            )
        if self.then is not None and not (isinstance(self.then, Sketch) and self.then.one_gradient):
            raise TypeError(
                f"then={self.then!r} does not sketch a gradient; give for example then=L1(0.3)"
            )

    @property
    def needs_input(self) -> bool:
        return self.weights == "gradient_input" or (self.then is not None and self.then.needs_input)

    def layout_of(self, dims: tuple[int, ...]) -> Samples:
        return Samples.of(dims, 0 if self.batch_first or len(dims) < 2 else 1)

    def whole_samples(self, pixels: bool) -> bool:
        """Whether a unit is a sample, in a layer whose rows are pixels or are not."""
        return self.unit == "sample" or (self.unit is None and pixels)

    def __call__(
        self,
        G: Tensor,
        W: Tensor | None = None,
        u: Tensor | None = None,
        *,
        X: Tensor | None = None,
        layout: Samples | None = None,
    ) -> CompactGradient:
        stack = G.dim() - 2
        plan = self.plan(G, W, X=X, layout=layout)
        shape = self._own_shape(G, plan.probabilities.shape[-1])
        if u is None:
            own = draw_uniforms(G, shape)
        else:
            own = u if self.then is None else part_of(u, stack, 0, shape)
        kept = self.keep(G, plan, *self.draw(plan.probabilities, own))
        if self.then is None:
            return kept
        rest = None
        if u is not None:
            wanted = self.then.uniform_shape(kept.values, W)
            rest = part_of(u, stack, max(1, own[(0,) * stack].numel()), wanted)
        X = take_rows(X, kept.index) if X is not None and self.then.needs_input else None
        return OfRows(kept.index, self.then(kept.values, W, rest, X=X), kept.B)

    def compact(self, G: Tensor, W: Tensor | None, u: Tensor) -> CompactGradient:
        return self(G, W, u)

    def plan(
        self,
        G: Tensor,
        W: Tensor | None = None,
        *,
        X: Tensor | None = None,
        layout: Samples | None = None,
    ) -> Plan:
        layout = layout or Samples(1, G.shape[-2], 1)
        roots = layout.sample_major(self._roots(G, X))
        if self.whole_samples(layout.pixels) and layout.tokens > 1:
            roots = roots.reshape(*roots.shape[:-1], layout.samples, layout.tokens)
            if self.weights == "uniform":
                roots = roots.amax(-1)
            else:
                roots = torch.linalg.vector_norm(roots, dim=-1)
        return Plan(water_fill(roots, self.rank(roots.shape[-1])), layout)

    def probabilities(
        self,
        G: Tensor,
        W: Tensor | None = None,
        *,
        X: Tensor | None = None,
        layout: Samples | None = None,
    ) -> Tensor:
        return self.plan(G, W, X=X, layout=layout).probabilities

    def keep(self, G: Tensor, plan: Plan, index: Tensor, scale: Tensor) -> KeptRows:
        layout: Samples = plan.basis
        if self.whole_samples(layout.pixels) and layout.tokens > 1:
            index = layout.rows_of_samples(index)
            scale = scale.repeat_interleave(layout.tokens, -1)
        else:
            index = layout.row_of(index)
        return KeptRows(index, scaled(take_rows(G, index), scale.unsqueeze(-1)), G.shape[-2])

    def _roots(self, G: Tensor, X: Tensor | None) -> Tensor:
        """√w for each row; zero only where the row of G is zero."""
        dtype = solve_dtype(G)
        if self.weights == "uniform":
            largest = G.abs().amax(-1).to(dtype)
            return (largest > 0).to(dtype) + 0 * largest
        norms: Tensor = torch.linalg.vector_norm(G, dim=-1, dtype=dtype)
        if self.weights == "gradient":
            return norms
        seen = importance.row_energies(check_input(X, self)).to(dtype)
        return norms * (seen + importance.FLOOR * seen.mean(-1, keepdim=True)).sqrt()

    def _own_shape(self, G: Tensor, atoms: int) -> tuple[int, ...]:
        stack = tuple(G.shape[:-2])
        return stack if self.sampling == "exact" else (*stack, atoms)

    def uniform_shape(self, G: Tensor, W: Tensor | None) -> tuple[int, ...]:
        own = self._own_shape(G, G.shape[-2])
        if self.then is None:
            return own
        # As many as the second draw may need: after independent draws its size is random.
        stack = G.dim() - 2
        rest = self.then.uniform_shape(G, W)[stack:]
        count = G.shape[-2] if self.sampling == "independent" else 1
        return (*own[:stack], count + (rest[0] if rest else 1))

    def atom_count(self, B: int, n: int, d: int) -> int:
        return B

    def keeps_all(self, B: int, n: int, d: int) -> bool:
        rows_stay = super().keeps_all(B, n, d)
        return rows_stay and (self.then is None or self.then.keeps_all(B, n, d))

    def product_flops(self, B: int, n: int, d: int) -> float:
        r = self.rank(B)
        return 4 * r * n * d if self.then is None else self.then.product_flops(round(r), n, d)

    def scoring_flops(self, B: int, n: int, d: int) -> float:
        return 2 * B * n + (2 * B * d if self.weights == "gradient_input" else 0)

    def planning_flops(self, B: int, n: int, d: int) -> float:
        own = super().planning_flops(B, n, d)
        if self.then is None:
            return own
        return own + self.then.planning_flops(max(1, round(self.rank(B))), n, d)


class _ForWeightsOnly(Sketch):
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
class VCAS(_ForWeightsOnly):
    """The estimator of VCAS (arXiv 2402.17227), for comparison; without its control of budgets.

    Whole samples are kept by independent coins, p ∝ ‖G_s‖, ``samples`` of them in the mean
    (SampleA); dX is from those. dW is from a further draw among their rows, by independent coins
    with p ∝ ‖g_b‖‖x_b‖, ``budget`` of them in the mean (SampleW). db is exact. Unbiased. Its
    sizes are random, which costs a wait for the device and a compilation for each.
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
        by_sample = Rows(self.samples, unit="sample", sampling=self.sampling)
        by_row = Rows(self.budget, weights="gradient_input", unit="token", sampling=self.sampling)
        stack = G.dim() - 2
        parts: list[Tensor | None] = [None, None]
        if u is not None:
            half = u.shape[-1] // 2
            shapes = [by_sample._own_shape(G, (layout or Samples(1, half, 1)).samples)]
            parts[0] = part_of(u, stack, 0, shapes[0])
        first = by_sample(G, W, parts[0], X=X, layout=layout)
        assert isinstance(first, KeptRows)
        if u is not None:
            parts[1] = part_of(u, stack, half, by_row.uniform_shape(first.values, W))
        inner = by_row(first.values, W, parts[1], X=take_rows(X, first.index))
        return TwoSided(first, OfRows(first.index, inner, first.B), Whole(G))

    def uniform_shape(self, G: Tensor, W: Tensor | None) -> tuple[int, ...]:
        """As many uniforms for the samples as for the rows among them."""
        count = G.shape[-2] if self.sampling == "independent" else 1
        return (*G.shape[:-2], 2 * count)

    def probabilities(self, G: Tensor, W: Tensor | None = None) -> Tensor:
        """Of the samples."""
        return Rows(self.samples, sampling=self.sampling).probabilities(G)

    def keeps_all(self, B: int, n: int, d: int) -> bool:
        return super().keeps_all(B, n, d) and Rows(self.samples).keeps_all(B, n, d)

    def flops(
        self, B: int, n: int, d: int, *, input_grad: bool = True, weight_grad: bool = True
    ) -> float:
        samples = Rows(self.samples, sampling=self.sampling)
        total = samples.flops(B, n, d, input_grad=input_grad, weight_grad=False)
        r = round(samples.rank(B))
        return total + (super().flops(r, n, d, input_grad=False) if weight_grad else 0)


@dataclass(frozen=True, repr=False)
class WTACRS(_ForWeightsOnly):
    """The estimator of WTA-CRS (arXiv 2305.15265), for comparison: r rows for dW; dX, db exact.

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
        if self.sampling != "exact":
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
        if u is None:
            u = draw_uniforms(G, self.uniform_shape(G, W))
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
        drawn = torch.minimum(drawn.clamp(max=q.shape[-1] - 1).maximum(c), _last_positive(q))
        place = torch.where(slots < c, slots, drawn.maximum(c))
        again = torch.where(rest > 0, rest / ((r - c) * q.gather(-1, place)), 0.0)
        scale = torch.where(slots < c, 1.0, again)
        if self.paper:
            # Weighted draws without replacement: the largest u^(1/q).
            keys = u[..., r:].to(q.dtype).log() / q
            without = keys.topk(r, -1).indices
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
        flat = torch.full_like(norms, 1 / norms.shape[-1])
        total = norms.sum(-1, keepdim=True)
        return torch.where(total == 0, flat, norms / total)

    def flops(
        self, B: int, n: int, d: int, *, input_grad: bool = True, weight_grad: bool = True
    ) -> float:
        exact = 2.0 * B * n * d if input_grad else 0.0
        return exact + (super().flops(B, n, d, input_grad=False) if weight_grad else 0)


def _last_positive(q: Tensor) -> Tensor:
    """The last place of a positive q, sorted from the largest: ``[..., 1]``."""
    return (q > 0).sum(-1, keepdim=True).clamp(min=1) - 1


def check_input(X: Tensor | None, sketch: object) -> Tensor:
    """The input that ``sketch`` looks at."""
    if X is None:
        raise TypeError(
            f"{sketch!r} looks at the layer's input, and none was given; pass X=..., or use a "
            "sketch that looks at the gradient alone, for example Rows(0.1)"
        )
    return X
