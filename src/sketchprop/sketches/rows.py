"""Sketches of rows: the few samples and tokens that carry the gradient.

Columns compound over depth, rows need not: once a draw has left r rows of G, only those are not
zero in the layers below, where each of them has p = 1 and nothing is added.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core import importance
from ..core.checks import check_choice
from ..core.compact import InputRowAtoms, RowAtoms
from ..core.cost import Cost, Size, drawing_flops
from ..core.probabilities import solve_dtype, water_fill, wide_dtype
from ..core.samples import Samples
from ..core.vjp import Vjp
from .base import Sketch, as_call


@dataclass(frozen=True, repr=False)
class RowSketch(Sketch):
    """Atoms are the rows of G. A method is its ``importance(vjp)``: ``[..., B]``.

    The sample's axis is the first of a layer's input, or with ``batch_first=False`` the second
    (``nn.MultiheadAttention`` knows its own); rows that a model has flattened into one axis each
    count as a sample. The draw runs through the rows sample by sample, whatever their order in
    memory: systematic sampling is then stratified over samples and positions.
    """

    _: KW_ONLY
    batch_first: bool = True

    passes: ClassVar[float] = 2
    """Operations on each element of G that the importance takes."""

    @abstractmethod
    def importance(self, vjp: Vjp) -> Tensor:
        """w_b of ``min Σ w_b/p_b`` for each row; zero only where the row is zero."""

    def roots(self, vjp: Vjp) -> Tensor:
        """√w_b, which p is proportional to; override it where it comes without a square."""
        return self.importance(vjp).sqrt()

    def samples_of(self, dims: tuple[int, ...]) -> Samples:
        return Samples.of(dims, 0 if self.batch_first or len(dims) < 2 else 1)

    def atoms(self, vjp: Vjp) -> RowAtoms:
        samples = vjp.rows
        rank = self.rank(vjp.G.shape[-2])
        p = water_fill(samples.by_sample(self.roots(vjp)).flatten(-2), rank)
        return RowAtoms(p, rank, self.sampling, samples.units(False, p.device))

    def atom_count(self, B: int, n: int, d: int) -> int:
        return B

    def cost(self, size: Size, *, lasting: bool = False) -> Cost:
        if not size.sides:
            return Cost(0)
        B, n, d, *_ = size
        r = self.rank(B)
        drawing = drawing_flops(B, r, self.sampling) + r * n
        return Cost(2 * r * n * d * size.sides, self.passes * B * n, drawing)


@dataclass(frozen=True, repr=False)
class SampleMask(RowSketch):
    """Rows of G (samples, tokens) with equal probability. Cost 4rnd + O(Bn).

    The paper's per-sample mask is ``sampling="independent"``.
    """

    passes: ClassVar[float] = 1  # one sum, so that a non-finite gradient stays visible

    def importance(self, vjp: Vjp) -> Tensor:
        return importance.uniform_rows(vjp.G)


@dataclass(frozen=True, repr=False)
class Rows(RowSketch):
    """Rows of G (samples, tokens), drawn by how much gradient they carry. Cost 4rnd + O(Bn).

    ``by="gradient"``: p ∝ ‖g_b‖, the optimum for Ĝ itself. ``"gradient_input"``:
    p ∝ ‖g_b‖√(‖x_b‖² + α), the optimum for dW with a share α of what dX and db need (without it a
    row with x_b = 0 would have p = 0, and its dX a bias). ``"uniform"``: the rows that are not
    zero with equal probability. With all three, **if at most r units are not zero, all of them are
    kept with p = 1**: one draw at the top of a network serves all layers below. Include the last
    layer for that: ``sketch_(model, Rows(0.3, unit="sample"), select.everything)``.

    ``by="nonzero"``: all rows that are not zero and no others: the *exact* gradient of a padded
    batch or of ignored labels, without the work on zeros. Their number is known only in backward,
    which waits once for the device. Under ``torch.compile`` it is the full exact product. The
    budget only tells the FLOP formulas which share of the rows is not zero.

    ``unit="token"``: each row by itself. ``"sample"``: all tokens or pixels of a sample are kept
    or dropped together, so that zero rows survive attention and convolutions; p comes from the root
    of the sum of their squares. ``None``: samples in convolutions, tokens elsewhere.

    >>> G = torch.zeros(100, 8)
    >>> G[[3, 50, 97]] = 1.0
    >>> Rows(0.1)(Vjp(G)).dense().equal(G)
    True
    """

    _: KW_ONLY
    by: str = "gradient"
    unit: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("by", self.by, _BY)
        if self.by == "nonzero":
            object.__setattr__(self, "sampling", "independent")  # coins that are sure
        check_choice("unit", self.unit, _UNITS)

    def __repr__(self) -> str:
        return as_call(self, hidden="sampling" if self.by == "nonzero" else "")

    @property
    def sees(self) -> str:  # type: ignore[override]
        return "GX" if self.by == "gradient_input" else "G"

    def whole_samples(self, pixels: bool) -> bool:
        """Whether a unit is a sample, in a layer whose rows are pixels or are not."""
        return self.unit == "sample" or (self.unit is None and pixels)

    def atoms(self, vjp: Vjp) -> RowAtoms:
        samples = vjp.rows
        roots = samples.by_sample(self.roots(vjp))
        whole = self.whole_samples(samples.pixels) and samples.tokens > 1
        if not whole:
            roots = roots.flatten(-2)
        elif self.by in ("uniform", "nonzero"):
            roots = roots.amax(-1)
        else:
            roots = torch.linalg.vector_norm(roots, dim=-1)
        units = samples.units(whole, roots.device)
        rank = self.rank(roots.shape[-1])
        p = roots.to(wide_dtype(roots)) if self.by == "nonzero" else water_fill(roots, rank)
        return RowAtoms(p, rank, self.sampling, units)

    def importance(self, vjp: Vjp) -> Tensor:
        return self.roots(vjp).square()

    def roots(self, vjp: Vjp) -> Tensor:
        dtype = solve_dtype(vjp.G)
        if self.by == "nonzero":
            return (vjp.G.abs().amax(-1) != 0).to(dtype)
        if self.by == "uniform":
            largest = vjp.G.abs().amax(-1).to(dtype)
            return (largest > 0).to(dtype) + 0 * largest
        norms: Tensor = torch.linalg.vector_norm(vjp.G, dim=-1, dtype=dtype)
        if self.by == "gradient":
            return norms
        seen = importance.row_energies(vjp.input(self)).to(dtype)
        return norms * (seen + importance.FLOOR * seen.mean(-1, keepdim=True)).sqrt()

    def keeps_all(self, B: int, n: int, d: int) -> bool:
        if self.by == "nonzero":
            return torch.compiler.is_compiling()
        return super().keeps_all(B, n, d)

    def cost(self, size: Size, *, lasting: bool = False) -> Cost:
        rows = super().cost(size)
        reads_input = self.by == "gradient_input" and size.sides
        return rows.plus(Cost(0, 2 * size.B * size.d)) if reads_input else rows


@dataclass(frozen=True, repr=False)
class ForwardRows(RowSketch):
    """r rows of X, drawn in forward and saved for dW = Σ g_b x_bᵀ/p_b; dX and db are exact.

    ``by="input"``: p ∝ ‖x_b‖ (a row with x_b = 0 adds nothing to dW). ``"uniform"``: equal p.

    Saves r·d instead of B·d numbers for each layer, and 2(B - r)nd FLOPs of dW. What another
    operation keeps alive anyway is not freed: see ``meters.saved_bytes``. The draw is made in
    forward from the default generator, in training mode with a graph or without, as dropout's is:
    activation checkpointing repeats it. For linear layers and attention projections.
    """

    _: KW_ONLY
    by: str = "input"

    sees: ClassVar[str] = "X"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("by", self.by, _FORWARD_BY)

    def importance(self, vjp: Vjp) -> Tensor:
        X = vjp.input(self)
        if self.by == "uniform":
            return torch.ones(X.shape[:-1], dtype=solve_dtype(X), device=X.device)
        return importance.row_energies(X)

    def atoms(self, vjp: Vjp) -> InputRowAtoms:
        rows = super().atoms(vjp)
        return InputRowAtoms(rows.probabilities, rows.rank, rows.sampling, rows.units)

    def cost(self, size: Size, *, lasting: bool = False) -> Cost:
        exact = size._replace(weight_grad=False).exact_flops
        if not size.weight_grad:
            return Cost(exact)
        scoring = 0 if self.by == "uniform" else 2 * size.B * size.d
        rows = super().cost(size._replace(input_grad=False))
        return rows._replace(scoring=scoring).plus(Cost(exact))

    def saved_share(self, B: int) -> float:
        return self.rank(B) / max(1, B)


_BY: Mapping[str | None, str] = {
    "gradient": "by ‖g_b‖",
    "gradient_input": "by ‖g_b‖ and ‖x_b‖",
    "uniform": "the rows that are not zero alike",
    "nonzero": "all rows that are not zero",
}
_UNITS: Mapping[str | None, str] = {
    "sample": "all tokens of a sample together",
    "token": "each row by itself",
    None: "by the kind of layer",
}
_FORWARD_BY: Mapping[str | None, str] = {"input": "by ‖x_b‖", "uniform": "all rows alike"}
