"""Blocks of transformers, taken whole: their backward runs on kept tokens.

A block's class says in ``anatomy`` what one call is made of; how it is run is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..core.cost import Size
from ..core.sampling import Uniforms, draw_uniforms
from ..ops.attend import Attending, Rotary, check_mask
from ..sketches import Tokens
from ..tokens.attention import AttentionTensors
from ..tokens.attention import SelfAttention as AttentionPart
from ..tokens.draw import QueryCount, kept_count
from ..tokens.function import leaves, run
from ..tokens.parts import Block, BlockTensors, RowBranch
from ..tokens.rowwise import Chain, Linear, Parameters, RowWise, drops, hooked, read
from ..tokens.unknown import Unknown
from .adapters import read_lora
from .sketched import SketchedModule

RowPart = Callable[[Tensor], Tensor] | RowWise
"""A row-wise part of a block: a module or a function, or its steps where these say more."""


class SelfAttention(NamedTuple):
    """Attention of a block's input to itself, up to the residual."""

    projections: tuple[RowPart, ...]
    """One that makes q, k and v, packed, or three."""
    out: tuple[RowPart, ...]
    """What follows attention."""
    heads: int
    kv_heads: int | None = None
    mask: Tensor | None = None
    """To be added, or boolean with True where a query may look; broadcasts to [N, H, T, T]."""
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    rotary: Rotary | None = None
    """Cosines and sines that rotate q and k by halves."""
    module: nn.Module | None = None
    """Whose forward this stands for: if it has hooks, it is called."""


class Anatomy(NamedTuple):
    """One call of a block on ``x: [N, T, d]``: two branches, each with its norm and residual.

    ``norm_first``: x + f(norm(x)), else norm(x + f(x)). ``plain``: attention as the block's own
    modules compute it, from the (normed) x up to the residual; used where ``attention`` cannot be
    taken apart. ``between``: an exact part between the two branches, such as cross-attention.
    """

    x: Tensor
    attention: SelfAttention | None
    plain: Callable[[Tensor], Tensor]
    norms: tuple[RowPart, RowPart]
    mlp: tuple[RowPart, ...]
    norm_first: bool
    between: Callable[[Tensor], Tensor] | None = None
    apart: str = ""
    """Why ``attention`` is not given."""


class SketchedBlock(SketchedModule):
    """Mixed into a block's class by ``sketch_(model, Tokens(…))``.

    In eval mode, under ``exact`` and ``no_grad``, in exported graphs, where the budgets keep
    everything and for arguments that ``anatomy`` refuses, forward is the block's own.
    """

    roles: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Parts of linear layers by the beginning of their names: "queries", "keys", "packed" (a
    third for queries) or "exact"; all others are "rows"."""
    left: ClassVar[str] = ""
    """What of the block always stays exact, and why."""

    vouched: ClassVar[bool] = True
    """Whether a feed-forward part that is not known may run again on kept rows, once three rows
    of a batch have shown that it takes each by itself. In blocks that are built in it is exact."""

    def anatomy(self, *args: Any, **kwargs: Any) -> Anatomy | str:
        """What this call is made of; or why the block has to run as it is."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tokens = self.sketching.sketch
        if self.is_sketching() and not _leaves_a_graph():
            call = self.anatomy(*args, **kwargs)
            if isinstance(call, str):
                self._note(call)
            elif _keeps_all(tokens, call.x):
                self._note("")
            else:
                return self.result(self.run(call, tokens), *args, **kwargs)
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def result(self, y: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What forward returns, from the last branch's result ``y: [N, T, d]``."""
        return y

    def run(self, call: Anatomy, tokens: Tokens, uniforms: Uniforms = draw_uniforms) -> Tensor:
        """Both branches on kept tokens, drawn from ``uniforms``; exact what is not known."""
        notes: list[str] = []
        x = y = call.x
        first, second = ((), call.norms[1:]) if call.norm_first else (call.norms[:1], ())
        last = () if call.norm_first else call.norms[1:]
        attention = self._attention_part(call, tokens, notes)
        rows = self._row_branch((*second, *call.mlp), call, tokens, notes)
        self._note("; ".join(notes))
        if attention is None:
            y = x + call.plain(applied(call.norms[:1] if call.norm_first else (), x))
        between = None if rows is None or call.between is not None else self._steps(first)
        if attention is not None and between is not None and rows is not None:
            part, tensors = attention
            branch, P = rows
            block = Block(part, between.chain, branch, _one_draw(tokens, x))
            inputs = BlockTensors(x, tensors, between.parameters, P)
            return applied(last, run(block, inputs, uniforms))
        if attention is not None:
            y = run(Block(attention[0], Chain(), None), BlockTensors(x, attention[1]), uniforms)
        y = applied(first, y)
        if call.between is not None:
            y = call.between(y)
        if rows is None:
            return applied(last, y + applied((*second, *call.mlp), y))
        branch, P = rows
        return applied(last, run(Block(None, Chain(), branch), BlockTensors(y, rows=P), uniforms))

    def _row_branch(
        self, parts: tuple[RowPart, ...], call: Anatomy, tokens: Tokens, notes: list[str]
    ) -> tuple[RowBranch, Parameters] | None:
        """The feed-forward part on kept rows; ``None``: it is exact, which is noted."""
        N, T = call.x.shape[:2]
        rank = kept_count(tokens.budget, N * T)
        if rank >= N * T:
            return None
        save = tokens.save == "activations"
        steps = self._steps(parts)
        if steps is not None:
            return RowBranch(steps.chain, rank, save, True), steps.parameters
        # Of a RowWise that drops out the masks would be drawn anew.
        again = all(
            not drops(part.chain) if isinstance(part, RowWise) else not watched(part)
            for part in parts
        )
        if not self.vouched or not again or torch.compiler.is_compiling():
            notes.append(f"its feed-forward part is exact: {self._unknown(parts)}")
            return None
        f = Unknown(lambda x: applied(parts, x))
        return RowBranch(f, rank, save, True), parameters_of(parts)

    def _attention_part(
        self, call: Anatomy, tokens: Tokens, notes: list[str]
    ) -> tuple[AttentionPart, AttentionTensors] | None:
        """Attention on kept queries; ``None``: it is exact, which is noted."""
        N, T = call.x.shape[:2]
        queries = QueryCount.of(tokens.query_budget, tokens.capacity, N, T)
        keys = kept_count(tokens.key_budget, N * T)
        attention = call.attention
        if queries.rank >= N * T and keys >= N * T:
            return None
        before = call.norms[:1] if call.norm_first else ()
        if why := self._exact_attention(attention, before, call.apart):
            notes.append(f"its attention is exact: {why}")
            return None
        assert attention is not None
        norm, out = self._steps(before), self._steps(attention.out)
        projections = [self._steps((part,)) for part in attention.projections]
        assert norm is not None
        assert out is not None
        how = Attending(attention.dropout_p, attention.is_causal, attention.scale)
        kv_heads = attention.kv_heads or attention.heads
        chains = tuple(steps.chain for steps in projections if steps is not None)
        part = AttentionPart(
            norm.chain, chains, out.chain, attention.heads, kv_heads, how, queries, keys,
            tokens.save == "activations", N, T,
        )  # fmt: skip
        check_mask(attention.mask, (N, part.heads, T, T), how)
        made = tuple(steps.parameters for steps in projections if steps is not None)
        return part, AttentionTensors(
            attention.mask, attention.rotary, norm.parameters, made, out.parameters
        )

    def _exact_attention(
        self, attention: SelfAttention | None, before: tuple[RowPart, ...], apart: str
    ) -> str:
        """Why attention is not taken apart; empty if it is."""
        if attention is None:
            return apart
        if attention.module is not None and hooked(attention.module):
            return changed(attention.module)
        if attention.mask is not None and attention.mask.requires_grad:
            return "its mask is learned"
        if attention.rotary is not None and any(t.requires_grad for t in attention.rotary):
            return "its rotary angles are learned"
        packed = self._steps(attention.projections) if len(attention.projections) == 1 else None
        if packed is not None and not isinstance(packed.chain.steps[0], Linear):
            return f"{changed(attention.projections[0])}, and makes q, k and v at once"
        return self._unknown((*before, *attention.projections, *attention.out))

    def _unknown(self, parts: Iterable[RowPart]) -> str:
        """In words, which part is not known; empty if all are."""
        return next((changed(part) for part in parts if self._steps((part,)) is None), "")

    def _steps(self, parts: Iterable[RowPart]) -> RowWise | None:
        """The parts as one row-wise function; ``None`` if one of them is not known."""
        whole = RowWise.of()
        for part in parts:
            steps = part if isinstance(part, RowWise) else self.read(part)
            if steps is None:
                return None
            whole += steps
        return whole

    def read(self, part: Callable[[Tensor], Tensor]) -> RowWise | None:
        """``part`` as row-wise steps, or ``None`` where it does more than its class does."""
        if not isinstance(part, nn.Module) or watched(part):
            return None
        return read(part) or read_lora(part, self.read)

    def _note(self, text: str) -> None:
        if not torch.compiler.is_compiling():
            self.sketching.note = text

    @classmethod
    def sizes(
        cls, layer: nn.Module, rows: int, from_below: bool = True, trains: bool = True
    ) -> tuple[Size, ...]:
        found: tuple[Size, ...] = ()
        for _, module, role in cls.parts(layer):
            found += cls.sizes_of(module, role, rows, from_below, trains)
        return found

    @classmethod
    def sizes_of(
        cls,
        module: nn.Module,
        role: str,
        rows: int,
        from_below: bool = True,
        trains: bool = True,
    ) -> tuple[Size, ...]:
        """Those of one module of the block."""
        return tuple(
            Size(rows, n, d, from_below or trains, trains, part)
            for n, d, part in _matrices(module, role)
        )

    @classmethod
    def matrices(cls, layer: nn.Module) -> tuple[tuple[int, int], ...]:
        return tuple((size.n, size.d) for size in cls.sizes(layer, 1))

    @classmethod
    def parts(cls, layer: nn.Module) -> list[tuple[str, nn.Module, str]]:
        """The modules of the block that have a weight matrix: name, module, role."""
        found = []
        for name, module in layer.named_modules():
            if name and _weight_shapes(module):
                known = [role for start, role in cls.roles if name.startswith(start)]
                found.append((name, module, known[0] if known else "rows"))
        return found


def applied(parts: Iterable[RowPart], x: Tensor) -> Tensor:
    """The parts as they are, one after the other."""
    for part in parts:
        x = part(x)
    return x


def parameters_of(parts: Iterable[RowPart]) -> tuple[Tensor, ...]:
    found: list[Tensor] = []
    for part in parts:
        if isinstance(part, RowWise):
            found += [p for p in leaves(part.parameters) if p is not None]
        elif hasattr(part, "parameters"):
            found += part.parameters()
    return tuple(found)


def watched(part: RowPart) -> bool:
    """Whether a hook or a forward of an instance's own would miss what is not called."""
    modules = getattr(part, "modules", None)
    return modules is not None and any(hooked(module) for module in modules())


def changed(part: RowPart) -> str:
    """In words, why a module is not taken apart."""
    name = getattr(part, "__name__", type(part).__name__)
    if watched(part):
        return f"{name} has hooks, or a forward of its own, which would not be called"
    return f"{name} is not a plain layer"


def _leaves_a_graph() -> bool:
    """Whether what runs now is written down for use elsewhere."""
    jit: Any = torch.jit
    return jit.is_tracing() or jit.is_scripting() or torch.compiler.is_exporting()


def _keeps_all(tokens: Tokens, x: Tensor) -> bool:
    N, T = x.shape[:2]
    return (
        not x.numel()
        or x.is_meta
        or (
            kept_count(tokens.budget, N * T) >= N * T
            and kept_count(tokens.query_budget, T) >= T
            and kept_count(tokens.key_budget, N * T) >= N * T
        )
    )


def _one_draw(tokens: Tokens, x: Tensor) -> bool:
    """Whether the rows of the feed-forward part can be drawn among the kept queries."""
    N, T = x.shape[:2]
    rows, queries = kept_count(tokens.budget, N * T), kept_count(tokens.query_budget, T)
    # Queries are rounded in each sample and rows in the batch: equal shares may differ by that.
    return queries < T and rows < N * T and rows - N * queries <= N / 2


def _weight_shapes(module: nn.Module) -> list[tuple[int, int]]:
    """(n, d) of the weight matrices that are a module's own."""
    if isinstance(module, nn.MultiheadAttention):
        E = module.embed_dim
        if module.in_proj_weight is not None:
            return [(3 * E, E)]
        return [(E, E), (E, module.kdim or E), (E, module.vdim or E)]
    if isinstance(module, nn.Linear):
        return [(module.out_features, module.in_features)]
    if hasattr(module, "nf") and hasattr(module, "nx"):  # transformers' Conv1D
        return [(int(module.nf), int(module.nx))]  # type: ignore[arg-type]
    return []


def _matrices(module: nn.Module, role: str) -> Iterable[tuple[int, int, str]]:
    shapes = _weight_shapes(module)
    if role != "packed":
        yield from ((n, d, role) for n, d in shapes)
    elif len(shapes) == 1:
        n, d = shapes[0]
        yield from ((n // 3, d, "queries"), (n - n // 3, d, "keys"))
    else:
        for (n, d), part in zip(shapes, ("queries", "keys", "keys"), strict=True):
            yield n, d, part
