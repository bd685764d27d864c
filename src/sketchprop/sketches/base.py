"""The shape of a sketch: atoms × importance × sampler × budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, ClassVar, Self

from ..core.checks import SAMPLINGS, check_budget, check_choice
from ..core.cost import Cost, Size
from ..core.samples import Samples
from ..core.sampling import Atoms, Uniforms, draw_uniforms
from ..core.vjp import CompactGradient, Vjp

NOT_LASTING = (
    "draws from the rows of one gradient: its atoms cannot come from an earlier one or from a part "
    "of it; use a sketch of columns or directions, for example L1(0.1)"
)


@dataclass(frozen=True, repr=False)
class Sketch(ABC):
    """A random Ĝ with E[Ĝ] = G, cheaper to multiply with than G.

    ``budget``: the kept fraction, a float in (0, 1], or the rank, an int.
    ``sampling``: ``"fixed"`` always keeps the same number of atoms (static shapes);
    ``"independent"`` tosses one coin per atom, the budget is then the expected size.
    ``exact_bias``: the bias gradient costs one pass over G, so it need not be noisy;
    ``False`` takes it from Ĝ, as the paper does.

    A method is its ``atoms`` (what G is a sum of, and the probability of each) and its ``cost``.
    ``sketch(Vjp(G, W, X))`` draws a compact gradient.
    """

    budget: float | int
    _: KW_ONLY
    sampling: str = "fixed"
    exact_bias: bool = True

    sees: ClassVar[str] = "G"
    """What the draw looks at, of G, W and X; without G it is drawn in forward."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", check_budget(self.budget))
        check_choice("sampling", self.sampling, SAMPLINGS)

    @abstractmethod
    def atoms(self, vjp: Vjp) -> Atoms:
        """The atoms of this very G and their probabilities."""

    @abstractmethod
    def atom_count(self, B: int, n: int, d: int) -> int:
        """How many atoms G has."""

    @abstractmethod
    def cost(self, size: Size, *, lasting: bool = False) -> Cost:
        """FLOPs of dX and dW as far as ``size`` asks for them; exact, each costs 2Bnd."""

    def lasting_atoms(self, vjp: Vjp) -> Atoms:
        """Atoms for any gradient like this one, with as many columns and any number of rows."""
        raise TypeError(f"{self!r} {NOT_LASTING}")

    def __call__(self, vjp: Vjp, uniforms: Uniforms = draw_uniforms) -> CompactGradient:
        """Draws Ĝ."""
        return self.atoms(vjp).draw(vjp, uniforms)

    def rank(self, atoms: int) -> float | int:
        """How many of ``atoms`` are kept: an int for a fixed size, else the expected number."""
        if isinstance(self.budget, int):
            return min(self.budget, atoms)
        # Makes torch.compile guard on the value: sizes that depend on a symbolic float cannot be
        # saved for backward.
        hash(self.budget)
        if self.sampling == "independent":
            return self.budget * atoms
        return max(1, round(self.budget * atoms))

    def rank_of(self, B: int, n: int, d: int) -> float | int:
        """How many of the atoms of ``G: [B, n]`` are kept."""
        return self.rank(self.atom_count(B, n, d))

    def keeps_all(self, B: int, n: int, d: int) -> bool:
        """Whether nothing would be dropped: then the exact products are the ones to compute."""
        return self.rank_of(B, n, d) >= self.atom_count(B, n, d)

    def kept(self, B: int, n: int, d: int) -> float:
        """The share of the atoms that a draw keeps."""
        return self.rank_of(B, n, d) / max(1, self.atom_count(B, n, d))

    def saved_share(self, B: int) -> float:
        """The share of X's rows that dW keeps in memory until backward."""
        return 1.0

    def samples_of(self, dims: tuple[int, ...]) -> Samples | None:
        """Which rows belong to one sample, in a layer whose input is ``[*dims, d]``.

        ``None`` where the draw does not ask.
        """
        return None

    def with_budget(self, budget: float | int) -> Self:
        """The same sketch with another budget."""
        return replace(self, budget=budget)

    def __repr__(self) -> str:
        return as_call(self)


def as_call(made: Any, hidden: str = "") -> str:
    """A frozen dataclass with a budget as one would type it: only options that were given.

    ``hidden``: an option that follows from others.
    """
    shown = [repr(made.budget)]
    for field in fields(made)[1:]:
        value = getattr(made, field.name)
        if field.init and value != field.default and field.name != hidden:
            shown.append(f"{field.name}={value!r}")
    return f"{type(made).__name__}({', '.join(shown)})"
