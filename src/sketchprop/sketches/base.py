"""The shape of a sketch: atoms × weights × sampler × budget."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core.checks import check_budget, check_sampling
from ..core.compact import CompactGradient
from ..core.samples import Samples
from ..core.sampling import draw_uniforms, sample_independent, systematic


@dataclass(frozen=True, repr=False)
class Sketch(ABC):
    """A random Ĝ with E[Ĝ] = G, cheaper to multiply with than G.

    ``budget``: the kept fraction, a float in (0, 1], or the rank, an int.
    ``sampling``: ``"exact"`` always keeps the same number of atoms (static shapes);
    ``"independent"`` tosses one coin per atom, the budget is then the expected size.
    ``exact_bias``: the bias gradient costs one pass over G, so it need not be noisy;
    ``False`` takes it from Ĝ, as the paper does.

    Calling a sketch with ``G: [..., B, n]`` and ``W: [..., n, d]`` draws a compact gradient.
    Leading dimensions are a stack of independent layers, each with its own draw.
    """

    budget: float | int
    _: KW_ONLY
    sampling: str = "exact"
    exact_bias: bool = True

    needs_weight: ClassVar[bool] = False
    """Whether the draw looks at W; if not, ``None`` may be given for it."""
    by_rows: ClassVar[bool] = False
    """Whether the draw asks which rows belong to one sample; if not, ``layout`` is ignored."""
    one_gradient: ClassVar[bool] = True
    """Whether dX, dW and db all come from one Ĝ."""
    draws_forward: ClassVar[bool] = False
    """Whether the draw for dW is made in forward, so that only some rows of X are saved."""

    @property
    def needs_input(self) -> bool:
        """Whether the draw looks at the layer's input X."""
        return False

    def memory(self) -> Any:
        """What a layer has to remember from step to step for this sketch; ``None``: nothing."""
        return None

    def with_budget(self, budget: float | int) -> Sketch:
        """The same sketch with another budget."""
        return replace(self, budget=budget)

    def saved_share(self, B: int) -> float:
        """The share of X's rows that dW keeps in memory until backward."""
        return 1.0

    def layout_of(self, dims: tuple[int, ...]) -> Samples:
        """Which rows belong to one sample, in a layer whose input is ``[*dims, d]``."""
        return Samples.of(dims)

    def __repr__(self) -> str:
        shown = [repr(self.budget)]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                shown.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", check_budget(self.budget))
        check_sampling(self.sampling)

    def __call__(
        self,
        G: Tensor,
        W: Tensor | None = None,
        u: Tensor | None = None,
        *,
        X: Tensor | None = None,
        layout: Samples | None = None,
    ) -> CompactGradient:
        """Draws Ĝ; ``u`` fixes the uniforms (``uniform_shape`` says which shape), for tests.

        ``X: [..., B, d]`` is for sketches with ``needs_input``, ``layout`` for those ``by_rows``.
        """
        if u is None:
            u = draw_uniforms(G, self.uniform_shape(G, W))
        return self.compact(G, W, u)

    @abstractmethod
    def compact(self, G: Tensor, W: Tensor | None, u: Tensor) -> CompactGradient:
        """Ĝ for given uniforms: pure."""

    @abstractmethod
    def uniform_shape(self, G: Tensor, W: Tensor | None) -> tuple[int, ...]:
        """The shape of ``u``."""

    @abstractmethod
    def probabilities(self, G: Tensor, W: Tensor | None = None) -> Tensor:
        """The inclusion probability of each atom."""

    @abstractmethod
    def atom_count(self, B: int, n: int, d: int) -> int:
        """How many atoms G has."""

    def flops(
        self, B: int, n: int, d: int, *, input_grad: bool = True, weight_grad: bool = True
    ) -> float:
        """FLOPs of dX and dW, scoring, solving and drawing included; exact, each costs 2Bnd.

        ``input_grad=False`` and ``weight_grad=False`` are for layers that owe only one of them.
        """
        sides = input_grad + weight_grad
        products = self.product_flops(B, n, d) * sides / 2
        return products + (self.planning_flops(B, n, d) if sides else 0)

    @abstractmethod
    def product_flops(self, B: int, n: int, d: int) -> float:
        """FLOPs of the products with W and X, half of them for dX and half for dW."""

    def planning_flops(self, B: int, n: int, d: int) -> float:
        """FLOPs of all that comes before those products: weights, probabilities, draw, Ĝ."""
        atoms = self.atom_count(B, n, d)
        size = self.rank(atoms)
        rescaled = size * B * n / max(1, atoms)
        return self.scoring_flops(B, n, d) + self._solving_flops(atoms, size) + rescaled

    def scoring_flops(self, B: int, n: int, d: int) -> float:
        """FLOPs of the weights; here one function of each element of G and a sum."""
        return 2 * B * n

    def planning_product_flops(self, B: int, n: int, d: int) -> float:
        """The share of ``planning_flops`` that is matrix products, as a flop counter sees it."""
        return 0

    def _solving_flops(self, atoms: int, size: float) -> float:
        # water_fill: a sort and six operations for each atom. Sampling: three for each atom and
        # a search for each kept one, or one comparison for each atom and a sort of the mask.
        log = math.log2(max(2, atoms))
        if self.sampling == "exact":
            return atoms * (log + 9) + size * (log + 4)
        return atoms * (2 * log + 7) + 3 * size

    def rank(self, atoms: int) -> float | int:
        """How many of ``atoms`` are kept: an int for exact sampling, else the expected number."""
        if isinstance(self.budget, int):
            return min(self.budget, atoms)
        if self.sampling == "independent":
            return self.budget * atoms
        return max(1, round(self.budget * atoms))

    def keeps_all(self, B: int, n: int, d: int) -> bool:
        """Whether nothing would be dropped: then the exact products are the ones to compute."""
        atoms = self.atom_count(B, n, d)
        return self.rank(atoms) >= atoms


class Plan(NamedTuple):
    """What a sketch decides from G and W before it draws."""

    probabilities: Tensor
    basis: Any = None


class AtomSketch(Sketch):
    """G = Σ atoms; keep a few, each scaled by 1/pᵢ."""

    @abstractmethod
    def plan(self, G: Tensor, W: Tensor | None) -> Plan:
        """The atoms and their probabilities."""

    @abstractmethod
    def keep(self, G: Tensor, plan: Plan, index: Tensor, scale: Tensor) -> CompactGradient:
        """The atoms ``index[..., r]``, each times ``scale[..., r]``."""

    def compact(self, G: Tensor, W: Tensor | None, u: Tensor) -> CompactGradient:
        return self.follow(self.plan(G, W), G, u)

    def follow(self, plan: Plan, G: Tensor, u: Tensor) -> CompactGradient:
        """Ĝ for given uniforms and a given plan."""
        return self.keep(G, plan, *self.draw(plan.probabilities, u))

    def draw(self, p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """The kept atoms ``index[..., r]`` and their ``scale[..., r]``, 1/pᵢ."""
        if self.sampling == "exact":
            index = systematic(p, u, int(self.rank(p.shape[-1])))
            return index, _take(p, index).reciprocal()
        kept = sample_independent(p, u)
        # One host synchronisation: the size of an independent draw is random. In a stack
        # the shorter draws are padded with atoms times 0.
        size = int(kept.sum(-1).max()) if kept.numel() else 0
        index = kept.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :size]
        return index, torch.where(_take(kept, index), _take(p, index).reciprocal(), 0.0)

    def uniform_shape(self, G: Tensor, W: Tensor | None) -> tuple[int, ...]:
        stack = tuple(G.shape[:-2])
        if self.sampling == "exact":
            return stack
        return (*stack, self.atom_count(G.shape[-2], G.shape[-1], 0))

    def probabilities(self, G: Tensor, W: Tensor | None = None) -> Tensor:
        return self.plan(G, W).probabilities


def part_of(u: Tensor, stack: int, start: int, shape: tuple[int, ...]) -> Tensor:
    """The uniforms of one draw among those of several: ``u: [*stack, all]`` from ``start`` on."""
    return u[..., start : start + math.prod(shape[stack:])].reshape(shape)


def _take(p: Tensor, index: Tensor) -> Tensor:
    return (
        p[index]
        if p.dim() == 1 and index.dim() == 1
        else p.expand(*index.shape[:-1], -1).gather(-1, index)
    )
