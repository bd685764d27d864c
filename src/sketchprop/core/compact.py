"""Atoms of G, and compact gradients: Ĝ without its zeros, with the products a layer owes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .probabilities import solve_dtype
from .sampling import Atoms, Uniforms, draw_uniforms
from .vjp import CompactGradient, Vjp


@dataclass(frozen=True)
class Kept:
    """The part of Ĝ that is not zero, and where it is."""

    index: Tensor
    values: Tensor


@dataclass(frozen=True)
class KeptColumns(Kept):
    """Some columns of Ĝ: ``values[..., B, r]`` are its columns ``index[..., r]`` of ``n``."""

    n: int

    def dense(self) -> Tensor:
        return scatter_columns(self.values, self.index, self.n)

    def input_grad(self, W: Tensor) -> Tensor:
        return self.values @ take_rows(W, self.index)

    def weight_grad(self, X: Tensor) -> Tensor:
        return scatter_rows(self.values.mT @ X, self.index, self.n)

    def bias_grad(self) -> Tensor:
        return scatter_columns(self.values.sum(-2, keepdim=True), self.index, self.n).squeeze(-2)


@dataclass(frozen=True)
class ColumnAtoms(Atoms):
    """The columns of G."""

    def keep(self, vjp: Vjp, index: Tensor, scale: Tensor) -> KeptColumns:
        values = scaled(take_columns(vjp.G, index), scale.unsqueeze(-2))
        return KeptColumns(index, values, vjp.G.shape[-1])


@dataclass(frozen=True)
class KeptRows(Kept):
    """Some rows of Ĝ: ``values[..., r, n]`` are its rows ``index[..., r]`` of ``B``."""

    B: int

    def dense(self) -> Tensor:
        return scatter_rows(self.values, self.index, self.B)

    def input_grad(self, W: Tensor) -> Tensor:
        return scatter_rows(self.values @ W, self.index, self.B)

    def weight_grad(self, X: Tensor) -> Tensor:
        return self.values.mT @ take_rows(X, self.index)

    def bias_grad(self) -> Tensor:
        return self.values.sum(-2)


@dataclass(frozen=True)
class RowAtoms(Atoms):
    """The rows of G, or several rows together.

    ``units: [units, rows of a unit]``, the rows of each atom; ``None``: atom i is row i.
    """

    units: Tensor | None = None

    def rows(self, index: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the units ``index``, and what each is multiplied with."""
        if self.units is None:
            return index, scale
        return self.units[index].flatten(-2), scale.repeat_interleave(self.units.shape[1], -1)

    def keep(self, vjp: Vjp, index: Tensor, scale: Tensor) -> CompactGradient:
        index, scale = self.rows(index, scale)
        values = scaled(take_rows(vjp.G, index), scale.unsqueeze(-1))
        return KeptRows(index, values, vjp.G.shape[-2])


@dataclass(frozen=True)
class InputRowAtoms(RowAtoms):
    """Rows of X for dW alone; dX and db are exact."""

    def keep(self, vjp: Vjp, index: Tensor, scale: Tensor) -> TwoSided:
        index, scale = self.rows(index, scale)
        values = scaled(rows_for_weight(vjp.G, index), scale.unsqueeze(-1))
        return TwoSided(Whole(vjp.G), KeptRows(index, values, vjp.G.shape[-2]), Whole(vjp.G))

    def of_input(self, X: Tensor, uniforms: Uniforms = draw_uniforms) -> tuple[Tensor, Tensor]:
        """In forward: the kept rows of X, with 1/p in them, and their places."""
        index, scale = self.rows(*self.choose(uniforms))
        return scaled(take_rows(X, index), scale.unsqueeze(-1)), index


@dataclass(frozen=True)
class LowRank:
    """Ĝ as a product of thin factors: ``left[..., B, r] @ right[..., r, n]``."""

    left: Tensor
    right: Tensor

    def dense(self) -> Tensor:
        return self.left @ self.right

    def input_grad(self, W: Tensor) -> Tensor:
        return self.left @ (self.right @ W)

    def weight_grad(self, X: Tensor) -> Tensor:
        return self.right.mT @ (self.left.mT @ X)

    def bias_grad(self) -> Tensor:
        return (self.left.sum(-2, keepdim=True) @ self.right).squeeze(-2)


@dataclass(frozen=True)
class Whole:
    """G itself: the exact side of a two-sided gradient."""

    G: Tensor

    def dense(self) -> Tensor:
        return self.G

    def input_grad(self, W: Tensor) -> Tensor:
        return self.G @ W

    def weight_grad(self, X: Tensor) -> Tensor:
        return self.G.mT @ X

    def bias_grad(self) -> Tensor:
        return self.G.sum(-2)


@dataclass(frozen=True)
class TwoSided:
    """One compact gradient for dX, another for dW, and one for db (by default that of dW).

    ``dense()`` is the Ĝ of dX: there is no single one.
    """

    input: CompactGradient
    weight: CompactGradient
    bias: CompactGradient | None = None

    def dense(self) -> Tensor:
        return self.input.dense()

    def input_grad(self, W: Tensor) -> Tensor:
        return self.input.input_grad(W)

    def weight_grad(self, X: Tensor) -> Tensor:
        return self.weight.weight_grad(X)

    def bias_grad(self) -> Tensor:
        return (self.bias or self.weight).bias_grad()


@dataclass(frozen=True)
class MaskedElements(Whole):
    """The paper's per-element mask: G whole, against a masked W and a masked X.

    Not smaller and not faster: dense products with zeros in them. ``weight_mask[..., n, d]`` and
    ``input_mask[..., B, d]`` hold 1/p where an element is kept and 0 elsewhere.
    """

    weight_mask: Tensor
    input_mask: Tensor

    def input_grad(self, W: Tensor) -> Tensor:
        return self.G @ (W * self.weight_mask)

    def weight_grad(self, X: Tensor) -> Tensor:
        return self.G.mT @ (X * self.input_mask)


@dataclass(frozen=True)
class ElementAtoms(Atoms):
    """Single elements of each row of W and of X: ``probabilities: [..., n + B, d]``."""

    def keep(self, vjp: Vjp, index: Tensor, scale: Tensor) -> MaskedElements:
        mask = torch.zeros_like(self.probabilities).scatter_(-1, index, scale).to(vjp.G.dtype)
        n = vjp.G.shape[-1]
        return MaskedElements(vjp.G, mask[..., :n, :], mask[..., n:, :])


def rows_for_weight(G: Tensor, index: Tensor) -> Tensor:
    """The rows ``index`` of G; not finite where any row is not, kept or dropped."""
    unseen = 0 * G.sum((-2, -1), keepdim=True)
    return take_rows(G, index) + unseen


def take_rows(A: Tensor, index: Tensor) -> Tensor:
    """A[..., index, :] with an index for each matrix of a stack."""
    if index.dim() == 1:
        return A.index_select(-2, index)
    return A.gather(-2, index.unsqueeze(-1).expand(*index.shape, A.shape[-1]))


def take_columns(A: Tensor, index: Tensor) -> Tensor:
    """A[..., index] with an index for each matrix of a stack."""
    if index.dim() == 1:
        return A.index_select(-1, index)
    return A.gather(-1, index.unsqueeze(-2).expand(*index.shape[:-1], A.shape[-2], index.shape[-1]))


def scatter_rows(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Zeros of ``size`` rows with ``values`` at the rows ``index``."""
    out = values.new_zeros(*values.shape[:-2], size, values.shape[-1])
    if index.dim() == 1:
        return out.index_copy_(-2, index, values)
    return out.scatter_(-2, index.unsqueeze(-1).expand_as(values), values)


def scatter_columns(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Zeros of ``size`` columns with ``values`` at the columns ``index``."""
    out = values.new_zeros(*values.shape[:-1], size)
    if index.dim() == 1:
        return out.index_copy_(-1, index, values)
    return out.scatter_(-1, index.unsqueeze(-2).expand_as(values), values)


def scaled(values: Tensor, scale: Tensor) -> Tensor:
    """values · scale in the dtype of ``values``: 1/p itself may not fit into half precision."""
    product = values * scale.to(solve_dtype(values))
    return product if product.dtype == values.dtype else product.to(values.dtype)
