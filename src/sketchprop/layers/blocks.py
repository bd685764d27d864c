"""Blocks of transformers, taken whole: their backward runs on kept tokens.

A block's class says in ``anatomy`` what one call is made of; how it is run is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ..core.cost import Size
from ..core.sampling import Uniforms, draw_uniforms
from ..ops.branch import RowWise, branch
from ..ops.kept import kept_count
from ..ops.postnorm import norm_branch
from ..ops.rowwise import Chain, Dropout, Parameters, read
from ..ops.sublayer import Projection, Rotary, attention_branch
from ..sketches import AnySketch, Tokens
from .sketched import SketchedModule

Steps = tuple[tuple[Any, ...], Parameters]
"""Row-wise steps of ``ops.rowwise``, and their parameters in order."""
RowPart = Callable[[Tensor], Tensor] | Steps
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
    again: bool = False
    """Whether the feed-forward part has to run again from its input: mixtures of experts."""
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

    unread: ClassVar[str] = "its attention is exact"
    """What becomes of attention that cannot be taken apart."""

    def anatomy(self, *args: Any, **kwargs: Any) -> Anatomy | str:
        """What this call is made of; or why the block has to run as it is."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tokens = self.sketching.sketch
        if self.is_sketching() and isinstance(tokens, Tokens) and not _leaves_a_graph():
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
        """Both branches on kept tokens, drawn from ``uniforms``."""
        notes: list[str] = []
        mlp = call.mlp
        if call.norm_first:
            mlp = (call.norms[1], *mlp)
        f, why = self._rows(mlp)
        if why:
            notes.append(f"its feed-forward part is exact: {why}")
        # The norm between the branches of a block that is normalised last, taken with the second.
        norm = None
        if not call.norm_first and call.between is None and isinstance(f, RowWise):
            norm, _ = self._rows(call.norms[:1], whole=True)
        one = call.between is None and (f is not None if call.norm_first else norm is not None)
        a, carry = self._attend(call, tokens, one and _one_draw(tokens, call.x), notes, uniforms)
        if not torch.compiler.is_compiling():
            self._note("; ".join(notes))
        save = "input" if call.again else tokens.save
        if norm is not None:
            z = norm_branch(a, norm, f, tokens.budget, save=save, carry=carry, uniforms=uniforms)
            return applied(call.norms[1:], z)
        y = a if call.norm_first else applied(call.norms[:1], a)
        if call.between is not None:
            y = call.between(y)
        if f is None:
            z = y + applied(mlp, y)
            return z if call.norm_first else applied(call.norms[1:], z)
        z = branch(
            f,
            y,
            tokens.budget,
            save=save,
            residual=True,
            parameters=None if isinstance(f, RowWise) else parameters_of(mlp),
            carry=carry,
            check=False,
            uniforms=uniforms,
        )
        return z if call.norm_first else applied(call.norms[1:], z)

    def _attend(
        self, call: Anatomy, tokens: Tokens, carries: bool, notes: list[str], uniforms: Uniforms
    ) -> tuple[Tensor, Any]:
        """The first branch and its residual, with the norm before it, and what it carries."""
        x = call.x
        parts, why = self._read_attention(call)
        if parts is None:
            if why:
                notes.append(why)
            return x + call.plain(applied(call.norms[:1], x) if call.norm_first else x), None
        attention = call.attention
        assert attention is not None
        projections, out, norm = parts
        return attention_branch(
            x,
            projections,
            out,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            norm=norm,
            attn_mask=attention.mask,
            dropout_p=attention.dropout_p,
            is_causal=attention.is_causal,
            rotary=attention.rotary,
            scale=attention.scale,
            queries=tokens.query_budget,
            keys=tokens.key_budget,
            capacity=tokens.capacity,
            save=tokens.save,
            residual=True,
            carry=carries,
            uniforms=uniforms,
        )

    def _read_attention(self, call: Anatomy) -> tuple[Any, str]:
        """Projections, what follows, the norm before; or why attention is not taken apart."""
        attention = call.attention
        if attention is None:
            return None, f"{self.unread}: {call.apart}" if call.apart else ""
        if attention.module is not None and hooked(attention.module):
            return None, f"its attention is exact: {changed(attention.module)}"
        pairs: list[Projection] = []
        for part in attention.projections:
            pair = self.projection(part)
            if pair is None:
                return None, f"{self.unread}: {changed(part)}"
            pairs.append(pair)
        out, why = self._rows(attention.out, whole=True)
        norm, other = RowWise(Chain(), ()), ""
        if call.norm_first:
            norm, other = self._rows(call.norms[:1], whole=True)
        if out is None or norm is None:
            return None, f"{self.unread}: {why or other}"
        projections = pairs[0] if len(pairs) == 1 else tuple(pairs)
        return (projections, out, norm), ""

    def projection(self, part: RowPart) -> Projection | None:
        """Weight and bias of a linear map, if this is one and nothing more."""
        steps = part if isinstance(part, tuple) else self.read(part)
        if steps is None or len(steps[1]) != 2:
            return None
        (step,), (W, b) = steps
        assert W is not None
        return (W.mT if step.transposed else W), b

    def _rows(self, parts: Iterable[RowPart], whole: bool = False) -> tuple[Any, str]:
        """The parts as one row-wise function; or ``None`` and why they run as they are.

        ``whole``: only if the steps are known. Else modules that nobody watches will do.
        """
        parts = tuple(parts)
        known = [part if isinstance(part, tuple) else self.read(part) for part in parts]
        unknown = [part for part, steps in zip(parts, known, strict=True) if steps is None]
        if not unknown:
            steps = tuple(step for found in known if found is not None for step in found[0])
            parameters = tuple(p for found in known if found is not None for p in found[1])
            return RowWise(Chain(steps), parameters), ""
        if whole or torch.compiler.is_compiling():
            return None, changed(unknown[0])
        for part in parts:
            # A mask that a step draws would be drawn anew where modules are run again.
            draws = isinstance(part, tuple) and any(isinstance(s, Dropout) for s in part[0])
            if draws or watched(part):
                return None, changed(unknown[0] if draws else part)
        return (lambda x: applied(parts, x)), ""

    def read(self, part: Callable[[Tensor], Tensor]) -> Steps | None:
        """``part`` as row-wise steps, or ``None`` where it does more than its class does."""
        if not isinstance(part, nn.Module) or watched(part):
            return None
        found = read(part)
        return None if found is None else (found[0].steps, found[1])

    def _note(self, text: str) -> None:
        if not torch.compiler.is_compiling():
            self.sketching.note = text

    @classmethod
    def sizes(
        cls, layer: nn.Module, rows: int, from_below: bool = True, trains: bool = True
    ) -> tuple[Size, ...]:
        found: tuple[Size, ...] = ()
        for name, module, role in cls.parts(layer):
            often = cls.times(layer, name)
            found += cls.sizes_of(module, role, rows * often, from_below, trains)
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

    @classmethod
    def times(cls, layer: nn.Module, name: str) -> int:
        """How often a row passes through a module of the block: more than once with experts."""
        return 1

    @classmethod
    def left_exact(cls, layer: nn.Module, sketch: AnySketch) -> str:
        if not isinstance(sketch, Tokens):
            return f"{sketch!r} is for single layers, and this is a block; name its layers"
        return ""


def applied(parts: Iterable[RowPart], x: Tensor) -> Tensor:
    """The parts as they are, one after the other."""
    for part in parts:
        x = RowWise(Chain(part[0]), part[1])(x) if isinstance(part, tuple) else part(x)
    return x


def parameters_of(parts: Iterable[RowPart]) -> tuple[Tensor, ...]:
    found: list[Tensor] = []
    for part in parts:
        if isinstance(part, tuple):
            found += [p for p in part[1] if p is not None]
        elif hasattr(part, "parameters"):
            found += part.parameters()
    return tuple(found)


def watched(part: RowPart) -> bool:
    """Whether a hook or a forward of an instance's own would miss what is not called."""
    modules = getattr(part, "modules", None)
    return modules is not None and any(hooked(module) for module in modules())


def hooked(module: nn.Module) -> bool:
    """``watched`` for a module alone, without the modules in it."""
    return bool(
        "forward" in vars(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


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
    if hasattr(module, "num_experts"):  # a stack of matrices, of which a row meets a few
        return [(p.shape[1], p.shape[2]) for p in module._parameters.values() if _stacks(p)]
    if hasattr(module, "nf") and hasattr(module, "nx"):  # transformers' Conv1D
        return [(int(module.nf), int(module.nx))]  # type: ignore[arg-type]
    return []


def _stacks(parameter: Tensor | None) -> TypeGuard[Tensor]:
    return parameter is not None and parameter.dim() == 3


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
