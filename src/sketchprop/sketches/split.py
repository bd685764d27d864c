"""One sketch for dX and another for dW."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

from ..core.compact import TwoSided, Whole
from ..core.cost import Cost, Size
from ..core.samples import Samples
from ..core.sampling import Uniforms, draw_uniforms
from ..core.vjp import Vjp
from .base import Sketch
from .tokens import Tokens


@dataclass(frozen=True)
class Split:
    """A pair: dX from the sketch ``input``, dW from the sketch ``weight``, each with its own draw.

    Each is unbiased by itself, so both are. ``None``: that side is exact. db is exact, or with
    ``exact_bias=False`` from ``weight``. ``Split(input=Rows(0.3), weight=ForwardRows(0.3))``
    cuts compute and memory together, at the noise of two draws: rows of G for dX, r rows of X saved
    in forward for dW.

    >>> Split(input=None, weight=Sketch) # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: weight=<class ...> is not a sketch; ...
    """

    _: KW_ONLY
    input: Sketch | None
    weight: Sketch | None
    exact_bias: bool = True

    def __post_init__(self) -> None:
        for name in ("input", "weight"):
            side = getattr(self, name)
            if side is not None and not isinstance(side, Sketch):
                raise TypeError(
                    f"{name}={side!r} is not a sketch; give for example {name}=Rows(0.3), or None "
                    "for an exact product"
                )
        if self.input is not None and "G" not in self.input.sees:
            raise ValueError(
                f"input={self.input!r} keeps rows of X for dW and leaves dX exact; use "
                "input=None, or a sketch of the gradient, for example input=Rows(0.3)"
            )
        if self.forward is not None and self.input is not None and "X" in self.input.sees:
            raise ValueError(
                f"input={self.input!r} looks at X in backward, and weight={self.weight!r} keeps "
                "only some rows of it; use an input sketch of the gradient alone, for example L1"
            )
        if not self.sides:
            raise ValueError("both sides of Split are exact; give input=... or weight=...")

    @property
    def sides(self) -> list[Sketch]:
        """Those that are not exact."""
        return [side for side in (self.input, self.weight) if side is not None]

    @property
    def forward(self) -> Sketch | None:
        """The side that is drawn in forward."""
        return self.weight if self.weight is not None and "G" not in self.weight.sees else None

    @property
    def sees(self) -> str:
        """What the draws in backward look at."""
        return "".join(side.sees for side in self.sides if "G" in side.sees)

    @property
    def budget(self) -> float | int:
        """The budget of ``weight``, or of ``input`` where ``weight`` is exact."""
        return self.sides[-1].budget

    def __call__(self, vjp: Vjp, uniforms: Uniforms = draw_uniforms) -> TwoSided:
        """Draws both sides, where X is whole; layers draw rows of X in forward."""
        sides = (self.input, self.weight)
        return TwoSided(*(Whole(vjp.G) if side is None else side(vjp, uniforms) for side in sides))

    def keeps_all(self, B: int, n: int, d: int) -> bool:
        return all(side.keeps_all(B, n, d) for side in self.sides)

    def kept(self, B: int, n: int, d: int) -> float:
        return self.sides[-1].kept(B, n, d)

    def cost(self, size: Size, *, lasting: bool = False) -> Cost:
        total = Cost(0)
        for side, owed in (
            (self.input, size._replace(weight_grad=False)),
            (self.weight, size._replace(input_grad=False)),
        ):
            if side is None or side.keeps_all(*size[:3]):
                total = total.plus(Cost(owed.exact_flops))
            else:
                total = total.plus(side.cost(owed, lasting=lasting))
        return total

    def saved_share(self, B: int) -> float:
        return 1.0 if self.weight is None else self.weight.saved_share(B)

    def samples_of(self, dims: tuple[int, ...]) -> Samples | None:
        of_sides = [side.samples_of(dims) for side in self.sides]
        return of_sides[-1] or of_sides[0]

    def with_budget(self, budget: float | int) -> Split:
        """The same pair with another budget on both sides."""
        input, weight = (
            None if side is None else side.with_budget(budget) for side in (self.input, self.weight)
        )
        return replace(self, input=input, weight=weight)

    def __repr__(self) -> str:
        bias = "" if self.exact_bias else ", exact_bias=False"
        return f"Split(input={self.input!r}, weight={self.weight!r}{bias})"


LayerSketch = Sketch | Split
"""What one layer is sketched by."""
AnySketch = Sketch | Split | Tokens
"""What ``sketch_`` takes: ``Tokens`` for blocks, the others for layers."""
