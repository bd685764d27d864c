"""Kept tokens: what the blocks of a transformer take instead of a sketch for each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace

from ..core.checks import check_budget, check_choice
from ..core.cost import Cost, Size
from .base import as_call
from .rows import Rows

SAVES: Mapping[str | None, str] = {
    "activations": "fastest",
    "input": "the memory of activation checkpointing",
}
SHARES: Mapping[str | None, str] = {
    "measured": "by the noise of each block, as the first backward pass finds it",
    "even": "the same budgets in all blocks",
}
ROOM = 1.25
"""Most queries of one sample, as a multiple of the even share."""


QUERIES, KEYS = 0.1, 0.4
"""More shares than of rows, unless given. At equal shares attention makes much of the noise, so
that it keeps a tenth more; 0.7 of the rows of K and V at a budget of 0.3 add next to no noise.
What each choice adds is in docs/results/tokens-noise."""


def more(budget: float | int, share: float) -> float:
    """A larger budget; all where it is a number of rows."""
    return 1.0 if isinstance(budget, int) else min(1.0, round(budget + share, 10))


def check_save(save: object) -> None:
    check_choice("save", save, SAVES)


@dataclass(frozen=True, repr=False)
class Tokens:
    """Runs the backward of a transformer's blocks on a random subset of the tokens.

    ``sketch_(model, Tokens(0.3))`` takes whole blocks, not single layers: norms, activations,
    attention and linear layers of a block run backward on kept rows alone. One draw serves a
    block. Every gradient is unbiased.

    ``budget``: the kept share of all rows of a batch in the row-wise branches.
    ``queries``: the kept share of tokens in attention and in the layers that make its queries and
    read its result, by default ``budget + 0.1``. ``keys``: rows of K and V, by default
    ``budget + 0.4``.
    ``share="measured"``: the budgets fix the FLOPs of all blocks together. The first backward
    pass measures the noise of each, which takes as long as some passes, and distributes the FLOPs
    (``sketchprop.layers.depth``). ``"even"``: the same budgets in all blocks.
    ``save="input"`` keeps only the input of a branch and computes the kept rows again: it needs
    the memory of activation checkpointing.
    Linear layers outside of known blocks get ``Rows(budget)``. If no more rows have a gradient than
    are kept (padding, one label for a sequence), the gradient is exact.

    >>> Tokens(0.3)
    Tokens(0.3)
    >>> Tokens(0.3).query_budget, Tokens(0.3).key_budget
    (0.4, 0.7)
    """

    budget: float | int
    _: KW_ONLY
    queries: float | int | None = None
    keys: float | int | None = None
    save: str = "activations"
    share: str = "measured"
    query_budget: float | int = field(init=False, repr=False, compare=False)
    """Kept tokens of each sample in attention."""
    key_budget: float | int = field(init=False, repr=False, compare=False)
    """Kept rows of K and V."""
    capacity: float = field(init=False, repr=False, compare=False)
    """Most queries of one sample, over the even share: room for a sample that matters more."""

    def __post_init__(self) -> None:
        for name in ("budget", "queries", "keys"):
            value = getattr(self, name)
            if name == "budget" or value is not None:
                object.__setattr__(self, name, check_budget(value))
        check_save(self.save)
        check_choice("share", self.share, SHARES)
        rows, usual = self.budget, more(self.budget, QUERIES)
        queries = usual if self.queries is None else self.queries
        keys = more(rows, KEYS) if self.keys is None else self.keys
        # Where rows are drawn among hardly more queries a tight bound would hold for the rows too:
        # there it is the room that the default number of queries would have.
        shares = isinstance(rows, float) and isinstance(queries, float)
        room = ROOM * usual / queries if shares and rows <= queries < usual else ROOM
        for name, value in (("query_budget", queries), ("key_budget", keys), ("capacity", room)):
            object.__setattr__(self, name, value)

    @property
    def rest(self) -> Rows:
        """What a linear layer outside of all blocks gets."""
        return Rows(self.budget)

    def of(self, part: str) -> Rows:
        """What one linear layer of a block costs and keeps, by its ``Size.part``."""
        budgets = {"queries": self.query_budget, "keys": self.key_budget}
        return Rows(budgets.get(part, self.budget))

    def keeps_all(self, B: int, n: int, d: int) -> bool:
        return all(self.of(part).keeps_all(B, n, d) for part in ("rows", "queries", "keys"))

    def kept(self, B: int, n: int, d: int) -> float:
        return self.rest.kept(B, n, d)

    def cost(self, size: Size, *, lasting: bool = False) -> Cost:
        """FLOPs of one matrix by its part in a block; attention's own products are not in it."""
        sketch = self.of(size.part)
        if size.part == "exact" or sketch.keeps_all(*size[:3]):
            return Cost(size.exact_flops)
        return sketch.cost(size)

    def with_budget(self, budget: float | int) -> Tokens:
        """Another budget; ``queries`` and ``keys`` that were given stay, the others follow it."""
        return replace(self, budget=budget)

    def __repr__(self) -> str:
        return as_call(self)
