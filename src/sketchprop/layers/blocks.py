"""Blocks of transformers, taken whole: their backward runs on kept tokens.

A block's class says in ``anatomy`` what one call is made of; how it is run is the same for all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from ..core.cost import Size
from ..core.proof import close, has_numbers, learned_by
from ..core.random import random_state_kept
from ..core.sampling import Uniforms, draw_uniforms
from ..ops.attend import Attending, Rotary, check_mask
from ..sketches import Tokens
from ..tokens.attention import AttentionTensors
from ..tokens.attention import SelfAttention as AttentionPart
from ..tokens.draw import QueryCount, kept_count
from ..tokens.function import run
from ..tokens.parts import Block, BlockTensors, RowBranch
from ..tokens.rowwise import Chain, Linear, Parameters, RowWise, drops, read
from ..tokens.unknown import Unknown
from .adapters import read_lora
from .compiled import can_compile, run_compiled
from .sketched import (
    SketchedModule,
    altered,
    constant_in_graphs,
    file_as_shipped,
    of_library,
    rewritten,
    watched,
)

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
    stands_for: tuple[tuple[nn.Module, type], ...] = ()
    """Modules of attention that are not called, with the classes that they must be of."""


_ATTENTION, _ROWS, _ALL = "queries keys", "rows", "queries keys rows"
"""Roles that are exact together."""


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
        state = self.sketching
        if not state.compiled or torch.compiler.is_compiling() or _leaves_a_graph():
            return self.call(*args, **kwargs)
        open_shares = state.shares is not None and state.shares.open
        first = (state.proof is None or open_shares) and self.is_sketching()
        # A compiled graph does not see a hook or a method that is put on a part later.
        changed = any(map(watched, vars(self)["_modules"].values()))
        if (first and _can_prove(args, kwargs)) or changed or not can_compile(self):
            return self.call(*args, **kwargs)
        return run_compiled(self, *args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, as it runs when it is not compiled and as it is compiled."""
        state, plain = self.sketching, super().forward  # type: ignore[misc]
        if state.proof or not self.is_sketching() or _leaves_a_graph():
            return plain(*args, **kwargs)
        call = self._known(*args, **kwargs)
        if isinstance(call, str) or _keeps_all(state.sketch, call.x):
            self._note({_ALL: call} if isinstance(call, str) else {})
            return plain(*args, **kwargs)
        if not (call.x.requires_grad or any(p.requires_grad for p in self.parameters())):  # type: ignore[attr-defined]
            return plain(*args, **kwargs)  # a frozen block below all that trains
        if state.proof is None and torch.compiler.is_compiling() and _unproven(self.plain):
            return plain(*args, **kwargs)
        if state.proof is None and _can_prove(args, kwargs):
            state.proof = self._proof(call, plain, *args, **kwargs)
            if state.proof:
                self._note({_ALL: f"exact: {state.proof}"})
                warnings.warn(f"{type(self).__name__} stays exact: {state.proof}", stacklevel=2)
                return plain(*args, **kwargs)
        y = self.run(call, state.sketch)
        if state.shares is not None and state.shares.open and _can_prove(args, kwargs):
            state.shares.watch(self, y, args, kwargs)
        return self.result(y, *args, **kwargs)

    def _known(self, *args: Any, **kwargs: Any) -> Anatomy | str:
        assert isinstance(self, nn.Module)
        # Its forward may be: it was called, by what is there in its place.
        if rewritten(self, self.plain, "forward") or not file_as_shipped(self.plain):
            return "its methods, or functions of its file, were replaced"
        try:
            return self.anatomy(*args, **kwargs)
        except (AttributeError, KeyError) as error:
            return f"its parts are not those that are known: {error}"

    def _proof(self, call: Anatomy, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
        """Runs the block both ways on its first batch: why kept tokens are not it; empty if so.

        Results are compared as they come, and if they differ once more without dropout, whose
        masks attention draws in its own way; leaves that get a gradient as they come.
        """
        assert isinstance(self, nn.Module)
        modes = {module: module.training for module in self.modules()}
        buffers = {b: b.detach().clone() for b in self.buffers()}
        try:
            for training in (True, False):
                if not training:
                    self.eval()
                    call = self.anatomy(*args, **kwargs)  # type: ignore[assignment]
                with _unseen(call.x.device):
                    exact = _first(plain(*args, **kwargs))
                try:
                    with _unseen(call.x.device):
                        y = self.run(call, self.sketching.sketch)
                        kept = _first(self.result(y, *args, **kwargs))
                except (ValueError, RuntimeError) as error:  # which the exact run has not
                    return f"it does not run on kept tokens: {error}"
                if training and learned_by(exact) != learned_by(kept):
                    lost = learned_by(exact) - learned_by(kept)
                    names = [
                        n
                        for n, p in self.named_parameters()
                        if any(p is end.variable for end in lost)
                    ]
                    shown = ", ".join(names[:3]) or "a tensor that is not among its parameters"
                    return f"on kept tokens {shown} would get no gradient"
                if close(kept, exact):
                    return ""
        finally:
            for module, mode in modes.items():
                module.training = mode
            with torch.no_grad():
                for buffer, value in buffers.items():
                    if not torch.equal(buffer, value):  # an earlier block may have saved it
                        buffer.copy_(value)
        return "its result on kept tokens differs from the exact one: it does more than is known"

    def result(self, y: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What forward returns, from the last branch's result ``y: [N, T, d]``."""
        return y

    def run(self, call: Anatomy, tokens: Tokens, uniforms: Uniforms = draw_uniforms) -> Tensor:
        """Both branches on kept tokens, drawn from ``uniforms``; exact what is not known."""
        notes: dict[str, str] = {}
        x = y = call.x
        first, second = ((), call.norms[1:]) if call.norm_first else (call.norms[:1], ())
        last = () if call.norm_first else call.norms[1:]
        attention = self._attention_part(call, tokens, notes)
        rows = self._row_branch((*second, *call.mlp), call, tokens, notes)
        self._note(notes)
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
        self, parts: tuple[RowPart, ...], call: Anatomy, tokens: Tokens, notes: dict[str, str]
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
            notes[_ROWS] = f"its feed-forward part is exact: {self._unknown(parts)}"
            return None
        state, looks = self.sketching, _looks(parts)
        state.looked = looks if state.looked is None else state.looked
        if not _as_before(state.looked, looks):
            notes[_ROWS] = "its feed-forward part is exact: it is not as it was when it was checked"
            return None
        check = state.proof is None
        return RowBranch(Unknown(parts, check), rank, save, True), parameters_of(parts)

    def _attention_part(
        self, call: Anatomy, tokens: Tokens, notes: dict[str, str]
    ) -> tuple[AttentionPart, AttentionTensors] | None:
        """Attention on kept queries; ``None``: it is exact, which is noted."""
        N, T = call.x.shape[:2]
        queries = QueryCount.of(tokens.query_budget, tokens.capacity, N, T)
        keys = kept_count(tokens.key_budget, N * T)
        if queries.rank >= N * T and keys >= N * T:
            return None
        attention = call.attention
        steps: tuple[Any, ...] = ()
        before = call.norms[:1] if call.norm_first else ()
        why = self._exact_attention(call)
        if attention is not None and not why:
            parts = (before, *((part,) for part in attention.projections), attention.out)
            steps = tuple(self._steps(part) for part in parts)
            why = self._unknown(part for several in parts for part in several)
        if attention is None or why:
            notes[_ATTENTION] = f"its attention is exact: {why}"
            return None
        norm, *projections, out = steps
        if len(projections) == 1 and not isinstance(projections[0].chain.steps[0], Linear):
            name = changed(attention.projections[0])
            notes[_ATTENTION] = f"its attention is exact: {name}, and makes q, k and v at once"
            return None
        how = Attending(attention.dropout_p, attention.is_causal, attention.scale)
        part = AttentionPart(
            norm.chain, tuple(p.chain for p in projections), out.chain, attention.heads,
            attention.kv_heads or attention.heads, how, queries, keys,
            tokens.save == "activations", N, T,
        )  # fmt: skip
        check_mask(attention.mask, (N, part.heads, T, T), how)
        made = tuple(p.parameters for p in projections)
        return part, AttentionTensors(
            attention.mask, attention.rotary, norm.parameters, made, out.parameters
        )

    def _exact_attention(self, call: Anatomy) -> str:
        """Why attention is not to be taken apart; empty if it may be."""
        attention = call.attention
        if attention is None:
            return call.apart
        if attention.mask is not None and attention.mask.requires_grad:
            return "its mask is learned"
        if attention.rotary is not None and any(t.requires_grad for t in attention.rotary):
            return "its rotary angles are learned"
        if F.scaled_dot_product_attention is not torch._C._nn.scaled_dot_product_attention:
            return "torch's function for attention was replaced"
        return not_as_known(*call.stands_for)

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

    def _note(self, notes: dict[str, str]) -> None:
        """What is exact, by its roles, and why."""
        if not torch.compiler.is_compiling():
            self.sketching.note = "; ".join(notes.values())
            self.sketching.whole = frozenset(" ".join(notes).split())

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


def parameters_of(parts: Iterable[RowPart]) -> tuple[Parameters, ...]:
    """A tuple for each part."""
    return tuple(
        part.parameters
        if isinstance(part, RowWise)
        else tuple(part.parameters())
        if isinstance(part, nn.Module)
        else ()
        for part in parts
    )


def _looks(parts: Iterable[RowPart]) -> tuple[Any, ...]:
    """Of all modules what may make them draw random numbers, or do other things."""
    modules = [m for part in parts if isinstance(part, nn.Module) for m in part.modules()]
    kinds = tuple((type(m), getattr(m, "p", 0) == 0) for m in modules)
    return kinds, tuple(m.training for m in modules)


def _as_before(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Whether what was found still holds: also in eval mode, where noise is measured."""
    trained = all(old or not new for old, new in zip(before[1], now[1], strict=False))
    return bool(before[0] == now[0]) and trained


def not_as_known(*parts: tuple[nn.Module, type]) -> str:
    """In words, which module is of another class than is known, or does more; empty if none."""
    for module, kind in parts:
        if type(module) is not kind:
            return f"{type(module).__name__} is not the {kind.__name__} that is known"
        if altered(module):
            return changed(module)
    return ""


def changed(part: RowPart) -> str:
    """In words, why a module is not taken apart."""
    name = getattr(part, "__name__", type(part).__name__)
    if watched(part):
        return f"{name} has hooks, or a forward of its own, which would not be called"
    return f"{name} is not a plain layer"


@contextmanager
def _unseen(device: torch.device) -> Iterator[None]:
    """Of activation checkpointing, and of other modes, nothing inside is to be seen."""
    hooks = saved_tensors_hooks(Tensor.detach, _same)
    with random_state_kept(device), hooks, _disable_current_modes():
        yield


def _same(t: Tensor) -> Tensor:
    """What was packed. (Packed detached: a result that its own node keeps is never freed.)"""
    return t


def _first(result: Any) -> Tensor:
    """A block's result; of several, what goes on to the next block."""
    y: Tensor = result[0] if isinstance(result, tuple) else result
    return y


def _can_prove(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call can be made twice, and compared: a cache would get its keys twice."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    plain = (Tensor, int, float, str, tuple, type(None))
    return all(isinstance(v, plain) and has_numbers(v) for v in (*args, *kwargs.values()))


@constant_in_graphs
def _unproven(kind: type) -> bool:
    """Whether a block that is compiled has nobody to vouch for it: no library, no first batch."""
    if of_library(kind):
        return False
    warnings.warn(
        f"{kind.__name__} was compiled before its check on a first batch, and stays exact: run the "
        "model on a batch before torch.compile, or sketch_(..., check=False) if you are sure",
        stacklevel=2,
    )
    return True


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
