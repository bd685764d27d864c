"""A row-wise branch of a network whose backward runs on some of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ..core.checks import check_budget
from ..core.sampling import Uniforms, draw_uniforms
from ..sketches.tokens import check_save
from ..tokens.draw import kept_count
from ..tokens.function import run, wanted
from ..tokens.parts import Block, BlockTensors, RowBranch
from ..tokens.rowwise import Chain, RowWise, read
from ..tokens.unknown import Unknown, name_of
from .sketched import watched


def branch(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    budget: float | int,
    *,
    save: str = "activations",
    residual: bool = False,
    parameters: Iterable[Tensor] | None = None,
    uniforms: Uniforms = draw_uniforms,
    check: bool = True,
) -> Tensor:
    """``f(x)``, with a backward that runs on ``budget`` of the rows of ``x: [*, d]``.

    f is a module, a ``RowWise`` or a function. It must treat every token by itself, as norms,
    linear layers, activations, dropout and gates do.
    In backward r rows of the output's gradient are drawn over the whole batch, p_b ∝ ‖g_b‖, and
    f's vjp runs on those alone: dx = Σ J_bᵀ g_b/p_b over the kept rows, and the gradients of f's
    parameters likewise. Their means are the exact gradients.

    If at most r rows have a gradient (padding, ignored labels), the gradient is exact.
    Cost of backward: ``budget`` times that of f. ``save="activations"`` keeps the results of f's
    products. ``"input"`` keeps x alone and computes them again on the kept rows, with the memory
    of activation checkpointing. Unless f is made of plain torch layers, it always runs again.

    ``residual``: returns x + f(x), with one pass over the gradient less than adding x outside.
    ``parameters``: those that f uses, if f is a function; a module brings its own.
    ``check``: tests f on three single rows, and raises if it mixes rows or draws random numbers.
    Plain torch layers need no test: they are row-wise and keep their dropout masks. Only they can
    be compiled.
    If the budget keeps everything this is ``f(x)`` itself. Draws come from ``uniforms``.

    >>> mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> x = torch.randn(4, 16, 8, requires_grad=True)
    >>> branch(mlp, x, 0.25).square().sum().backward()
    >>> int((x.grad.abs().sum(-1) > 0).sum())  # tokens that this draw kept
    16
    """
    check_save(save)
    rows = x.numel() // max(1, x.shape[-1])
    rank = kept_count(check_budget(budget), max(1, rows))
    known = f if isinstance(f, RowWise) else None
    if isinstance(f, nn.Module) and not watched(f):
        known = read(f)
    P = known.parameters if known is not None else (_parameters_of(f, parameters),)
    inputs = BlockTensors(x, rows=P)
    if rows == 0 or rank >= rows or x.is_meta or not wanted(inputs):
        y = f(x)
        return x + y if residual else y
    if known is None and torch.compiler.is_compiling():
        raise NotImplementedError(
            f"branch({name_of(f)}) cannot be compiled: its steps are not known before it runs. "
            "Give an nn.Sequential of plain torch layers, or a RowWise that spells it out"
        )
    steps = Unknown((f,), check) if known is None else known.chain
    rows_part = RowBranch(steps, rank, save == "activations", residual)
    return run(Block(None, Chain(), rows_part), inputs, uniforms)


def _parameters_of(f: object, given: Iterable[Tensor] | None) -> tuple[Tensor, ...]:
    owner = f if isinstance(f, nn.Module) else getattr(f, "__self__", None)
    if isinstance(owner, nn.Module) and (owner is f or given is None):
        return tuple(owner.parameters())
    if given is not None:
        return tuple(given)
    raise TypeError(
        f"branch cannot see the parameters of {name_of(f)}; give them: "
        "branch(f, x, budget, parameters=module.parameters()), or parameters=() if it has none"
    )
