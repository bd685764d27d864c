"""A row-wise branch of a network whose backward runs on a few of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.checks import wide_dtype
from ..core.compact import scaled
from ..core.samples import Samples
from ..core.sampling import Uniforms, draw_uniforms
from .backward import refuse_second_backward
from .kept import Carry, Kept, draw_batch, draw_queries, keep, keep_among, kept_count, row_norms
from .passes import asked, one_source
from .replayed import check_rows, recorded, replayed
from .rowwise import Chain, Grads, KeptTape, Parameters, Tape, Wants, not_finite, read

SAVES = ("activations", "input")
NONZERO = 0
"""The rank of ``budget="nonzero"``: known in backward only."""


class RowWise(NamedTuple):
    """A row-wise function spelled out: its steps, and their parameters in order."""

    chain: Chain
    parameters: Parameters

    def __call__(self, x: Tensor) -> Tensor:
        return self.chain.forward(x, self.parameters, Tape(False), True)


def branch(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    budget: float | int | str,
    *,
    save: str = "activations",
    residual: bool = False,
    parameters: Iterable[Tensor] | None = None,
    sample_dim: int | None = 0,
    carry: Carry | None = None,
    uniforms: Uniforms = draw_uniforms,
    check: bool = True,
) -> Tensor:
    """``f(x)``, with a backward that runs on ``budget`` of the rows of ``x: [*, d]``.

    f, a module or a ``RowWise`` or a function, must be row-wise: every token by itself (norms,
    linear layers, activations, dropout, gates).
    In backward r rows of the output's gradient are drawn over the whole batch, p_b ∝ ‖g_b‖, and
    f's vjp runs on those alone: dx = Σ J_bᵀ g_b/p_b over the kept rows, and the gradients of f's
    parameters likewise, with the means of the exact gradients.

    Rows whose gradient is zero cost nothing: where the others fit into the budget all of them are
    kept with p = 1, and the gradient is exact (padding, labels that are ignored).
    ``budget="nonzero"`` keeps those and no others, however many: the exact gradient without the
    work on zeros. Its size depends on the data, so it waits for the device and does not compile.
    Cost of backward: ``budget`` times that of f. ``save="activations"`` keeps the results of f's
    products and gathers rows of them; ``"input"`` keeps x alone and runs f again on the kept rows,
    forward + (budget · forward) + backward, with the memory of activation checkpointing.

    ``residual``: x + f(x), at the cost of one pass over the gradient less than adding it outside.
    ``parameters``: those that f uses, where f is a function; a module brings its own.
    ``carry``: from an attention branch before this one in its block: one draw serves both, and
    the rows of f are drawn among its queries. So ``budget`` should be at most that of the queries.
    ``sample_dim``: the axis of samples, over which a draw is spread evenly; None: one sample.
    ``check``: try f on three rows by themselves and refuse one that mixes rows. Functions made of
    plain torch layers are row-wise by construction and are not tried. In ``torch.compile`` others
    must be modules without dropout, and are run again from their input.
    Where the budget keeps everything this is ``f(x)`` itself. Draws come from ``uniforms``.

    >>> mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> x = torch.randn(4, 16, 8, requires_grad=True)
    >>> branch(mlp, x, 0.25).square().sum().backward()
    >>> int((x.grad.abs().sum(-1) > 0).sum())  # tokens that this draw kept
    16
    """
    check_save(save)
    rows = x.numel() // max(1, x.shape[-1])
    rank = _rank(budget, rows)
    known = _known(f)
    P = known.parameters if known is not None else _parameters_of(f, parameters)
    wanted = x.requires_grad or any(p is not None and p.requires_grad for p in P)
    if carry is not None and (rank >= rows or rank == NONZERO):
        raise ValueError(
            f"budget={budget!r} drops nothing, so there is no draw to carry; leave out carry= "
            "here and carry=True in attention_branch"
        )
    exact = rows == 0 or rank >= rows or x.is_meta
    if exact or not wanted or not torch.is_grad_enabled():
        y = f(x)
        return x + y if residual else y
    samples = Samples.of(tuple(x.shape[:-1]), sample_dim)
    first, second, capacity = (None, None, 0) if carry is None else carry
    settings = Settings(rank, save, residual, samples, uniforms, capacity, check)
    if known is not None:
        return _Branch.apply(x, first, second, known.chain, settings, *P)  # type: ignore[no-any-return, no-untyped-call]
    if torch.compiler.is_compiling():
        _check_traceable(f)
        return _Recomputed.apply(x, first, second, f, settings, *P)  # type: ignore[no-any-return, no-untyped-call]
    return _Replayed.apply(x, first, second, f, settings, *P)  # type: ignore[no-any-return, no-untyped-call]


class Settings(NamedTuple):
    """How a branch draws and what it keeps; ``capacity``: that of a carry, 0 without one."""

    rank: int
    save: str
    residual: bool
    samples: Samples
    uniforms: Uniforms
    capacity: int
    check: bool


class _Branch(torch.autograd.Function):
    """A chain of known steps: its vjp is plain torch, so it compiles."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _: Any, index: Any, chain: Chain, settings: Settings, *P: Any
    ) -> Tensor:
        tape = Tape(settings.save == "activations")
        y = chain.forward(x.reshape(-1, x.shape[-1]), P, tape, False)
        y = shaped(y, x, chain)
        remember(ctx, x, index, settings, P)
        ctx.chain = chain
        ctx.kept = len(tape.kept)
        ctx.save_for_backward(x, *tape.kept, *P)
        return added(x, y, chain) if settings.residual else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *rest = ctx.saved_tensors
        tensors, P = rest[: ctx.kept], tuple(rest[ctx.kept :])
        with torch.no_grad(), autocast_as(ctx.autocast):
            needs = asked(ctx, ctx.tensors)
            G = grad.reshape(-1, grad.shape[-1])
            kept, carried = drawn(ctx, G, one_source(ctx, grad, needs, ctx.settings.uniforms))
            X = x.reshape(-1, x.shape[-1]).index_select(0, kept.rows)
            tape = KeptTape(
                ctx.settings.save == "activations",
                iter([t.index_select(0, kept.rows) for t in tensors]),
            )
            _, pull = ctx.chain.again(X, P, tape, False)
            dX, grads = pull(kept.values, (needs[0], *needs[5:]))
            dx = None if dX is None else _scattered(ctx, dX, kept.rows, grad, x)
            grads = as_wanted(grads, P, needs[5:])
        return returned((dx, *carried, None, None, *grads), grad, x)


class _Replayed(torch.autograd.Function):
    """Any row-wise function: run again on the kept rows, with the saved results of products."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        _: Any,
        index: Any,
        f: Callable[[Tensor], Tensor],
        settings: Settings,
        *P: Any,
    ) -> Tensor:
        products = settings.save == "activations"
        y, tensors = recorded(f, x, products=products)
        if settings.check:
            check_rows(f, x, y, tensors, products=products)
        remember(ctx, x, index, settings, P)
        ctx.f = f
        ctx.kept = len(tensors)
        ctx.save_for_backward(x, *tensors, *P)
        return x + y if settings.residual else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *rest = ctx.saved_tensors
        tensors, P = rest[: ctx.kept], rest[ctx.kept :]
        with torch.no_grad(), autocast_as(ctx.autocast):
            needs = asked(ctx, ctx.tensors)
            uniforms = one_source(ctx, grad, needs, ctx.settings.uniforms)
            kept, carried = drawn(ctx, grad.reshape(-1, grad.shape[-1]), uniforms)
            X = x.reshape(-1, x.shape[-1]).index_select(0, kept.rows)
            parts = [t.index_select(0, kept.rows) for t in tensors]
            wants = [p for p, w in zip(P, needs[5:], strict=True) if w]
            X.requires_grad_(needs[0])
            products = ctx.settings.save == "activations"
            with torch.enable_grad():
                Y = replayed(ctx.f, X, parts, products=products)
                inputs = [X, *wants] if X.requires_grad else wants
                found = seen(torch.autograd.grad(Y, inputs, kept.values, allow_unused=True), kept)
            dx = None
            if X.requires_grad:
                if found[0] is not None:
                    dx = _scattered(ctx, found[0], kept.rows, grad, x)
                found = found[1:]
            left = iter(found)
            grads = [next(left) if w else None for w in needs[5:]]
        return returned((dx, *carried, None, None, *grads), grad, x)


class _Recomputed(torch.autograd.Function):
    """Any row-wise module, as compilers trace it: run again on the kept rows, products and all."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _: Any, index: Any, f: nn.Module, settings: Settings, *P: Any
    ) -> Tensor:
        remember(ctx, x, index, settings, P)
        ctx.f = f
        ctx.save_for_backward(x, *P)
        y: Tensor = f(x)
        return x + y if settings.residual else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *P = ctx.saved_tensors
        needs = ctx.needs_input_grad
        with autocast_as(ctx.autocast):
            kept, carried = drawn(ctx, grad.reshape(-1, grad.shape[-1]), ctx.settings.uniforms)
            X = x.reshape(-1, x.shape[-1]).index_select(0, kept.rows)
            names = [name for name, _ in ctx.f.named_parameters()]

            def run(X: Tensor, *P: Tensor) -> Tensor:
                y: Tensor = torch.func.functional_call(
                    ctx.f, dict(zip(names, P, strict=True)), (X,)
                )
                return y

            Y, pull = torch.func.vjp(run, X, *P)  # type: ignore[misc]
            dX, *grads = seen(pull(kept.values.to(Y.dtype)), kept)
            dx = _scattered(ctx, dX, kept.rows, grad, x) if dX is not None and needs[0] else None
        return (dx, *carried, None, None, *as_wanted(tuple(grads), tuple(P), needs[5:]))


def _rank(budget: float | int | str, rows: int) -> int:
    if not isinstance(budget, str):
        return kept_count(budget, max(1, rows))
    if budget != "nonzero":
        raise ValueError(f"budget={budget!r} is unknown; give a share, a number or 'nonzero'")
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "budget='nonzero' keeps a number of rows that depends on the data, which cannot be "
            "compiled; give the largest share of rows that are not zero, for example 0.5"
        )
    return NONZERO


def remember(ctx: Any, x: Tensor, index: Tensor | None, settings: Settings, P: Parameters) -> None:
    """What ``drawn`` and ``asked`` look at, of a Function of x, a carry, f, settings and P."""
    ctx.settings = settings
    carried = index is not None
    ctx.tensors = (True, carried, carried, False, False, *(p is not None for p in P))
    ctx.autocast = autocast_now(x.device.type)
    ctx.among = None if index is None else index.shape[0]


def drawn(
    ctx: Any, G: Tensor, uniforms: Uniforms
) -> tuple[Kept, tuple[Tensor | None, Tensor | None]]:
    """The rows for f's vjp; and what is carried: its rows, and what they lack of g/p."""
    settings: Settings = ctx.settings
    norms = row_norms(G)
    if settings.rank == NONZERO:
        rows = norms.nonzero().flatten()  # NaN is not zero: it is seen
        return Kept(rows, G.index_select(0, rows)), (None, None)
    if not settings.capacity:
        index, scale = draw_batch(norms, settings.rank, uniforms, settings.samples)
        return keep(G, index, scale), (None, None)
    rows, scale = draw_queries(norms, ctx.among, settings.capacity, uniforms, settings.samples)
    few, scale = G.index_select(0, rows), scale.unsqueeze(-1)
    part = Kept(rows, scaled(few, scale))
    carried = scaled(few, scale - 1), rows.to(wide_dtype(G))
    return keep_among(part, settings.rank, uniforms), carried


def seen(grads: Iterable[Tensor | None], kept: Kept) -> Grads:
    """The same gradients, NaN where what was drawn is not finite and f cut that off."""
    mark = not_finite(kept.values)
    return tuple(None if g is None else g + mark.to(g.dtype) for g in grads)


def _scattered(ctx: Any, dX: Tensor, index: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """dX at its rows; added to the residual's gradient where there is one."""
    if ctx.settings.residual:
        G = grad.reshape(-1, grad.shape[-1])
        return G.index_add(0, index, dX.to(G.dtype)).view(x.shape)
    rows = x.numel() // x.shape[-1]
    zeros = torch.zeros(rows, x.shape[-1], dtype=x.dtype, device=x.device)
    return zeros.index_copy_(0, index, dX.to(x.dtype)).view(x.shape)


def shaped(y: Tensor, x: Tensor, chain: Chain) -> Tensor:
    """Rows y as ``[*, n]``; no view, which what follows could not change in place, if y is new."""
    shape = [*x.shape[:-1], y.shape[-1]]
    out: Tensor = torch.ops.aten._unsafe_view(y, shape) if chain.steps else y.view(shape)
    return out


def added(x: Tensor, y: Tensor, chain: Chain) -> Tensor:
    """x + f(x), in the memory of y = f(x) if a step made it and it can hold the sum."""
    return y.add_(x) if chain.steps and y.dtype == x.dtype else x + y


def as_wanted(grads: Grads, P: Parameters, wants: Wants) -> Grads:
    """Gradients in the dtype of their parameters, ``None`` where not wanted."""
    return tuple(
        g.to(p.dtype) if want and g is not None and p is not None else None
        for g, p, want in zip(grads, P, wants, strict=True)
    )


def returned(grads: tuple[Tensor | None, ...], *inputs: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return refuse_second_backward(grads, *inputs)
    return grads


def autocast_now(device: str) -> tuple[str, torch.dtype] | None:
    """Device and dtype of the autocast that is on, for backward to compute alike."""
    if not torch.is_autocast_enabled(device):
        return None
    return device, torch.get_autocast_dtype(device)


def autocast_as(setting: tuple[str, torch.dtype] | None) -> torch.autocast:
    """The autocast of the forward pass, or none."""
    if setting is None:
        return torch.autocast("cpu", enabled=False)
    return torch.autocast(setting[0], dtype=setting[1], cache_enabled=False)


def check_save(save: object) -> None:
    if save not in SAVES:
        raise ValueError(
            f"save={save!r} is unknown; use save='activations' (fastest) or save='input' "
            "(the memory of activation checkpointing)"
        )


def _check_traceable(f: object) -> None:
    drops = isinstance(f, nn.Module) and any(
        isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in f.modules()
    )
    if drops or not isinstance(f, nn.Module):
        raise NotImplementedError(
            f"branch({_name(f)}) cannot be compiled: its steps are not known before it runs, and "
            f"it {'drops out' if drops else 'is a function'}. Give an nn.Sequential of plain torch "
            "layers, or a RowWise that spells it out"
        )


def _known(f: object) -> RowWise | None:
    if isinstance(f, RowWise):
        return f
    found = read(f) if isinstance(f, nn.Module) else None
    return None if found is None else RowWise(*found)


def _parameters_of(f: object, given: Iterable[Tensor] | None) -> tuple[Tensor, ...]:
    if given is not None:
        return tuple(given)
    if isinstance(f, nn.Module):
        return tuple(f.parameters())
    owner = getattr(f, "__self__", None)
    if isinstance(owner, nn.Module):
        return tuple(owner.parameters())
    raise TypeError(
        f"branch cannot see the parameters of {_name(f)}; give them: "
        "branch(f, x, budget, parameters=module.parameters()), or parameters=() if it has none"
    )


def _name(f: object) -> str:
    return type(f).__name__ if isinstance(f, nn.Module) else getattr(f, "__name__", repr(f))
