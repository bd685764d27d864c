"""A block of a transformer, or one of its two parts, with a backward on kept rows."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..core.sampling import Uniforms
from .attention import SelfAttention
from .draw import Among, KeptRows, draw_among, draw_rows, keep, row_norms
from .function import Tree, Walk, any_of, nothing_like
from .rowwise import NOTHING, Chain, Parameters, as_rows, rows_of, with_residual
from .unknown import Unknown


class RowBranch(NamedTuple):
    """f(x), or x + f(x), for a row-wise f whose vjp runs on ``rank`` rows: that share of its cost.

    ``save``: whether the results of f's products are kept, or computed again on the kept rows.
    """

    f: Chain | Unknown
    rank: int
    save: bool
    residual: bool

    def forward(self, x: Tensor, P: Parameters) -> tuple[Tensor, Tree]:
        y, saved = self.f.forward(x, P, self.save)
        if not self.residual:
            return y, saved
        return (with_residual(x, y, self.f) if isinstance(self.f, Chain) else x + y), saved

    def draw(self, G: Tensor, uniforms: Uniforms) -> KeptRows:
        return keep(G, draw_rows(row_norms(G), self.rank, uniforms))


class BlockTensors(NamedTuple):
    """Tensors of a ``Block``; or their gradients; or whether these are wanted."""

    x: Any
    attention: Any = ()
    """``AttentionTensors``, where there is attention."""
    norm: Parameters = ()
    rows: Parameters = ()


class BlockSaved(NamedTuple):
    """``middle``: what attention handed on."""

    attention: Any
    middle: Tensor | None
    rows: Tree


class Block(NamedTuple):
    """Self-attention and a row-wise branch, each with its residual; one of them may be missing.

    ``norm``: between the two, in a block that is normalised last. Its result is not saved but
    computed again on the kept rows. With g the gradient of the block and S the rows drawn from it,
    that of the norm's result is g + J_fᵀ g_S/p_S, and the norm's exact vjp takes it on.
    ``carries``: one draw serves both, rows are drawn among the kept queries; else each draws.
    """

    attention: SelfAttention | None
    norm: Chain
    rows: RowBranch | None
    carries: bool = False

    def forward(self, inputs: BlockTensors) -> tuple[Tensor, BlockSaved]:
        middle, made, saved = inputs.x, NOTHING, NOTHING
        if self.attention is not None:
            middle, made = self.attention.forward(inputs.x, inputs.attention)
        if self.rows is None:
            return middle, BlockSaved(made, None, saved)
        normed, _ = self.norm.forward(middle, inputs.norm, False)
        y, saved = self.rows.forward(normed, inputs.rows)
        return y, BlockSaved(made, None if self.attention is None else middle, saved)

    def backward(self, walk: Walk) -> BlockTensors:
        inputs, wants, G = walk.inputs, walk.wants, as_rows(walk.grad)
        grads: BlockTensors = nothing_like(inputs)
        queries = None
        if self.attention is not None and self.carries:
            queries = self.attention.draw(G, walk.uniforms)
        if self.rows is not None:
            wants_middle = wants.x or any_of(wants.attention)
            dA, queries, grads = self._through_rows(self.rows, walk, queries, wants_middle, grads)
        else:
            dA = G.clone()
        if self.attention is None or dA is None:
            return grads._replace(x=None if dA is None else dA.view(inputs.x.shape))
        if queries is None:
            queries = self.attention.draw(dA, walk.uniforms)
        dX, made = self.attention.back(queries, dA, walk)
        return grads._replace(x=dX.view(inputs.x.shape), attention=made)

    def _through_rows(
        self,
        branch: RowBranch,
        walk: Walk,
        queries: KeptRows | None,
        wants_middle: bool,
        grads: BlockTensors,
    ) -> tuple[Tensor | None, KeptRows | None, BlockTensors]:
        """The gradients of the branch's input, over all rows and of the queries kept there."""
        inputs, wants, G = walk.inputs, walk.wants, as_rows(walk.grad)
        X = as_rows(inputs.x if walk.saved.middle is None else walk.saved.middle)
        if queries is None:
            among = Among(branch.draw(G, walk.uniforms), None)
        else:
            among = draw_among(queries, branch.rank, walk.uniforms)
        kept, wants_f = among.kept, wants_middle or any_of(wants.norm)
        rows, _ = self.norm.forward(X.index_select(0, kept.rows), inputs.norm, False)
        saved = rows_of(walk.saved.rows, kept.rows)
        dF, made = branch.f.back(kept.values, rows, inputs.rows, saved, wants_f, wants.rows)
        grads = grads._replace(rows=made)
        if not wants_f:
            return None, None, grads
        dX = G.clone() if branch.residual else G.new_zeros(X.shape)
        if dF is not None:
            dX.index_add_(0, kept.rows, dF.to(dX.dtype))
            queries = None if queries is None else among.add(queries, dF)
        if not self.norm.steps:
            return dX, queries, grads
        dX, norm = self.norm.back(dX, X, inputs.norm, (), wants_middle, wants.norm)
        if queries is not None and wants_middle:
            rows = X.index_select(0, queries.rows)
            none = nothing_like(inputs.norm)
            values, _ = self.norm.back(queries.values, rows, inputs.norm, (), True, none)
            queries = KeptRows(queries.rows, values)
        return dX, queries, grads._replace(norm=norm)
