"""Backward passes that ask a layer for some of its gradients, and come back for the others.

Zero-bubble pipelines walk a graph twice: once for dX, once for dW. Both must come from one draw,
and neither is to be computed twice. torch calls a Python function's backward both times and does
not say what it wants; the engine knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Draw = TypeVar("Draw")
Asked = tuple[bool, bool, bool]


class Left(NamedTuple):
    """What a pass left for another: the draw, the gradient it was made for, what is still owed."""

    draw: Any
    grad: Tensor
    version: int
    owed: Asked


def asked(ctx: Any) -> Asked:
    """Which of dX, dW, db this very pass asks for, of a Function whose inputs begin so.

    Where the engine cannot be asked, all that may ever be wanted.
    """
    needs: Asked = ctx.needs_input_grad[:3]
    if _only_pass(ctx) or not hasattr(ctx, "next_functions"):
        return needs
    nodes = [node for node, _ in ctx.next_functions[: 2 + needs[2]]] + [None]
    return (
        needs[0] and _executes(nodes[0]),
        needs[1] and _executes(nodes[1]),
        needs[2] and _executes(nodes[2]),
    )


def one_draw(ctx: Any, grad: Tensor, now: Asked, draw: Callable[[], Draw]) -> Draw:
    """``draw()``, or what an earlier pass over the same ``grad`` drew and has not used up."""
    if _only_pass(ctx):
        return draw()
    left: Left | None = getattr(ctx, "left", None)
    if left is not None and _continues(left, grad, now):
        made, owed = left.draw, left.owed
    else:
        made, owed = draw(), ctx.needs_input_grad[:3]
    still = tuple(was and not is_now for was, is_now in zip(owed, now, strict=True))
    # Only a graph that is kept can be walked again.
    comes_back = any(still) and _graph_is_kept()
    ctx.left = Left(made, grad, grad._version, still) if comes_back else None  # type: ignore[arg-type]
    return made  # type: ignore[no-any-return]


def _only_pass(ctx: Any) -> bool:
    """Whether no other pass over this node came before or will come: as training runs."""
    if torch.compiler.is_compiling():
        return True
    return getattr(ctx, "left", None) is None and not _graph_is_kept()


def _graph_is_kept() -> bool:
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept


def _continues(left: Left, grad: Tensor, now: Asked) -> bool:
    same = left.grad.data_ptr() == grad.data_ptr() and left.grad.shape == grad.shape
    owed = all(was or not is_now for was, is_now in zip(left.owed, now, strict=True))
    return same and left.version == grad._version and owed


def _executes(node: Any) -> bool:
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # A leaf that torch.autograd.grad captures, or a pass that the engine does not run.
        return True
