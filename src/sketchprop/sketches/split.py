"""One sketch for dX and another for dW."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.compact import CompactGradient, TwoSided, Whole
from ..core.samples import Samples
from .base import Sketch, part_of


@dataclass(frozen=True, repr=False)
class Split(Sketch):
    """dX from the sketch ``input``, dW from the sketch ``weight``, each with a draw of its own.

    Each is unbiased by itself, so both are. ``None``: that side is exact. db is exact, or with
    ``exact_bias=False`` from ``weight``. ``Split(input=L1(0.1), weight=ForwardRows(0.1))`` cuts
    compute and memory together: columns of G for dX, r rows of X saved in forward for dW.

    >>> Split(input=None, weight=Sketch) # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: weight=<class ...> is not a sketch; ...
    """

    budget: float | int = field(init=False, default=1.0)
    """The budget of ``weight``, or of ``input`` where ``weight`` is exact."""
    input: Sketch | None = field(kw_only=True)
    weight: Sketch | None = field(kw_only=True)

    needs_weight: ClassVar[bool] = True
    by_rows: ClassVar[bool] = True
    one_gradient: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("input", "weight"):
            side = getattr(self, name)
            if side is not None and (not isinstance(side, Sketch) or isinstance(side, Split)):
                raise TypeError(
                    f"{name}={side!r} is not a sketch; give for example {name}=L1(0.1), or None "
                    "for an exact product"
                )
        if self.input is not None and self.input.draws_forward:
            raise ValueError(
                f"input={self.input!r} keeps rows of X for dW and leaves dX exact; use "
                "input=None, or a sketch of the gradient, for example input=L1(0.1)"
            )
        if self.draws_forward and self.input is not None and self.input.needs_input:
            raise ValueError(
                f"input={self.input!r} looks at X in backward, and weight={self.weight!r} keeps "
                "only some rows of it; use an input sketch of the gradient alone, for example L1"
            )
        main = self.weight or self.input
        if main is None:
            raise ValueError("both sides of Split are exact; give input=... or weight=...")
        object.__setattr__(self, "budget", main.budget)
        object.__setattr__(self, "sampling", main.sampling)
        super().__post_init__()

    def __repr__(self) -> str:
        bias = "" if self.exact_bias else ", exact_bias=False"
        return f"Split(input={self.input!r}, weight={self.weight!r}{bias})"

    @property
    def needs_input(self) -> bool:
        return any(side.needs_input for side in self._sides())

    @property
    def draws_forward(self) -> bool:  # type: ignore[override]
        return self.weight is not None and self.weight.draws_forward

    def memory(self) -> Any:
        return None if self.weight is None or not self.draws_forward else self.weight.memory()

    def with_budget(self, budget: float | int) -> Split:
        def changed(side: Sketch | None) -> Sketch | None:
            return None if side is None else side.with_budget(budget)

        return replace(self, input=changed(self.input), weight=changed(self.weight))

    def layout_of(self, dims: tuple[int, ...]) -> Samples:
        by_rows = [side for side in self._sides() if side.by_rows]
        return by_rows[-1].layout_of(dims) if by_rows else Samples.of(dims)

    def __call__(
        self,
        G: Tensor,
        W: Tensor | None = None,
        u: Tensor | None = None,
        *,
        X: Tensor | None = None,
        layout: Samples | None = None,
    ) -> CompactGradient:
        drawn: list[CompactGradient] = []
        start, stack = 0, G.dim() - 2
        for side in (self.input, self.weight):
            if side is None:
                drawn.append(Whole(G))
                continue
            own = None
            if u is not None:
                shape = side.uniform_shape(G, W)
                own = part_of(u, stack, start, shape)
                start += math.prod(shape[stack:])
            drawn.append(side(G, W, own, X=X, layout=layout))
        return TwoSided(drawn[0], drawn[1])

    def compact(self, G: Tensor, W: Tensor | None, u: Tensor) -> CompactGradient:
        return self(G, W, u)

    def uniform_shape(self, G: Tensor, W: Tensor | None) -> tuple[int, ...]:
        stack = G.dim() - 2
        counts = [math.prod(side.uniform_shape(G, W)[stack:]) for side in self._sides()]
        return (*G.shape[:-2], sum(counts))

    def probabilities(
        self, G: Tensor, W: Tensor | None = None, *, X: Tensor | None = None
    ) -> Tensor:
        """Of both sides, one after the other."""
        parts = []
        for side in self._sides():
            seen: dict[str, Any] = {"X": X} if side.needs_input else {}
            parts.append(side.probabilities(G, W, **seen))
        return torch.cat(parts, -1)

    def atom_count(self, B: int, n: int, d: int) -> int:
        return (self.weight or self._sides()[0]).atom_count(B, n, d)

    def keeps_all(self, B: int, n: int, d: int) -> bool:
        return all(side.keeps_all(B, n, d) for side in self._sides())

    def product_flops(self, B: int, n: int, d: int) -> float:
        sides = [4.0 * B * n * d if s is None else s.product_flops(B, n, d) for s in self._both()]
        return sum(sides) / 2

    def flops(
        self, B: int, n: int, d: int, *, input_grad: bool = True, weight_grad: bool = True
    ) -> float:
        total = 0.0
        for side, wanted, is_input in zip(
            self._both(), (input_grad, weight_grad), (True, False), strict=True
        ):
            if wanted and side is None:
                total += 2 * B * n * d
            elif wanted and side is not None:
                total += side.flops(B, n, d, input_grad=is_input, weight_grad=not is_input)
        return total

    def saved_share(self, B: int) -> float:
        return 1.0 if self.weight is None else self.weight.saved_share(B)

    def _both(self) -> tuple[Sketch | None, Sketch | None]:
        return self.input, self.weight

    def _sides(self) -> list[Sketch]:
        return [side for side in self._both() if side is not None]
