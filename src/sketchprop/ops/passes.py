"""Several passes over one graph that share a draw.

A pass may ask a layer for some of its gradients and come back for the others: zero-bubble
pipelines walk a graph twice, once for dX, once for dW. Both must come from one draw, and neither
is to be computed twice. torch calls a Python function's backward both times and does not say what
it wants; the engine knows. A pass that asks for the same once more gets a new draw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..core.sampling import Uniforms

Draw = TypeVar("Draw")
Asked = tuple[bool, ...]


class Left(NamedTuple):
    """What a pass left for another: the draw, the gradient it was made for, what is still owed."""

    draw: Any
    grad: Tensor
    version: int
    owed: Asked


def asked(ctx: Any, tensors: Asked) -> Asked:
    """Which gradients this very pass asks for, of a Function whose inputs begin so.

    ``tensors``: which of these inputs are tensors. Where the engine cannot be asked, all that may
    ever be wanted.
    """
    needs: Asked = tuple(ctx.needs_input_grad[: len(tensors)])
    if _only_pass(ctx) or not hasattr(ctx, "next_functions"):
        return needs
    nodes = iter([node for node, _ in ctx.next_functions])
    own = [next(nodes) if tensor else None for tensor in tensors]
    return tuple(need and _executes(node) for need, node in zip(needs, own, strict=True))


def one_draw(ctx: Any, grad: Tensor, now: Asked, draw: Callable[[], Draw]) -> Draw:
    """``draw()``, or what an earlier pass over the same ``grad`` drew and has not used up."""
    if _only_pass(ctx):
        return draw()
    left: Left | None = getattr(ctx, "left", None)
    if left is not None and _continues(left, grad, now):
        made, owed = left.draw, left.owed
    else:
        made, owed = draw(), tuple(ctx.needs_input_grad[: len(now)])
    still = tuple(was and not is_now for was, is_now in zip(owed, now, strict=True))
    # Only a graph that is kept can be walked again.
    comes_back = any(still) and _graph_is_kept()
    ctx.left = Left(made, grad, grad._version, still) if comes_back else None
    return made  # type: ignore[no-any-return]


def one_source(ctx: Any, grad: Tensor, now: Asked, uniforms: Uniforms) -> Uniforms:
    """``uniforms``, or those of an earlier pass over the same ``grad`` once more, in their order.

    For a Function that makes several draws: what is drawn is a function of them and of ``grad``.
    """
    if _only_pass(ctx):
        return uniforms
    drawn: list[Tensor] = one_draw(ctx, grad, now, list)
    place = 0

    def again(p: Tensor, shape: tuple[int, ...]) -> Tensor:
        nonlocal place
        if place == len(drawn):
            drawn.append(uniforms(p, shape))
        place += 1
        return drawn[place - 1]

    return again


def _only_pass(ctx: Any) -> bool:
    """Whether no other pass over this node came before or will come: as training runs."""
    if torch.compiler.is_compiling():
        return True
    return getattr(ctx, "left", None) is None and not _graph_is_kept()


def _graph_is_kept() -> bool:
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept


def _continues(left: Left, grad: Tensor, now: Asked) -> bool:
    seen, now_seen = ((g.data_ptr(), g.shape, g.stride()) for g in (left.grad, grad))
    same = seen == now_seen
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
