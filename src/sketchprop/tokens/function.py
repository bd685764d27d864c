"""The one autograd Function of kept tokens: what all parts of a block share.

A part is a frozen description without tensors. Its tensors travel beside it in nested named
tuples, which the Function flattens, because autograd takes and returns tensors in a row:

    forward(inputs)     y, and a tree of what backward will look at beside the inputs
    backward(walk)      a tree of gradients like the inputs, from the gradient of y

Autocast, which gradients this very pass asks for, their dtypes, one draw for several passes and
the refusal of second derivatives are written here, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.sampling import Uniforms
from ..ops.backward import refuse_second_backward
from ..ops.passes import asked, one_source

Tree = Any
"""Nested tuples, named or not, of tensors and ``None``; or of one value for each of them."""


class Walk(NamedTuple):
    """What one backward pass of a part looks at; ``wants``: a tree of flags like ``inputs``."""

    grad: Tensor
    inputs: Tree
    saved: Tree
    wants: Tree
    uniforms: Uniforms


class _Call(NamedTuple):
    """What a call is beside its tensors; ``shape``: a tree, True where there is a tensor."""

    part: Any
    uniforms: Uniforms
    shape: Tree


def run(part: Any, inputs: Tree, uniforms: Uniforms) -> Tensor:
    """The part's result, with its backward on kept rows."""
    _refuse_transforms()
    tensors = leaves(inputs)
    call = _Call(part, uniforms, like(inputs, iter([t is not None for t in tensors])))
    y: Tensor = _KeptTokens.apply(*tensors, call)  # type: ignore[no-untyped-call]
    return y


class _KeptTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, call = arguments
        inputs = like(call.shape, iter(tensors))
        y: Tensor
        y, saved = call.part.forward(inputs)
        more = leaves(saved)
        ctx.call = call
        ctx.saved_shape = like(saved, iter([True] * len(more)))
        ctx.tensors = tuple(t is not None for t in tensors)
        device = tensors[0].device.type
        enabled = torch.is_autocast_enabled(device)
        ctx.autocast = (device, torch.get_autocast_dtype(device), enabled, False)
        ctx.save_for_backward(*tensors, *more)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_transforms(grad)
        call = ctx.call
        tensors = iter(ctx.saved_tensors)
        inputs, saved = like(call.shape, tensors), like(ctx.saved_shape, tensors)
        needs = asked(ctx, ctx.tensors)
        with torch.no_grad(), torch.autocast(*ctx.autocast):
            uniforms = one_source(ctx, grad, needs, call.uniforms)
            wants = like(call.shape, iter(needs))
            grads = leaves(call.part.backward(Walk(grad, inputs, saved, wants, uniforms)))
            made = [
                g.to(t.dtype) if want and g is not None else None
                for g, t, want in zip(grads, leaves(inputs), needs, strict=True)
            ]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return (*refuse_second_backward(tuple(made), grad, *leaves(inputs)), None)
        return (*made, None)


def leaves(tree: Tree) -> list[Any]:
    """All values of a tree, in order."""
    values: list[Any] = []
    _collect(tree, values)
    return values


def _collect(tree: Tree, values: list[Any]) -> None:
    if isinstance(tree, tuple):
        for part in tree:
            _collect(part, values)
    else:
        values.append(tree)


def like(tree: Tree, values: Iterator[Any]) -> Tree:
    """A tree of the same shape, with the next of ``values`` in each place."""
    if not isinstance(tree, tuple):
        return next(values)
    parts = [like(part, values) if isinstance(part, tuple) else next(values) for part in tree]
    return tuple(parts) if type(tree) is tuple else type(tree)(*parts)  # a named one


def nothing_like(tree: Tree) -> Tree:
    """``None`` in every place of a tree."""
    return like(tree, repeat(None))


def any_of(tree: Tree) -> bool:
    """Whether one of the flags of a tree is set."""
    return any(any_of(part) for part in tree) if isinstance(tree, tuple) else bool(tree)


def wanted(inputs: Tree) -> bool:
    """Whether autograd will ask for a gradient of one of the inputs."""
    return torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in leaves(inputs)
    )


def _refuse_transforms(grad: Tensor | None = None) -> None:
    """``grad``: several at once, as ``is_grads_batched`` makes of them, are refused too."""
    if torch.compiler.is_compiling():
        return
    batched = grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad)
    if batched or torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "sketched blocks do not run inside torch.func.grad, vmap or jvp; use backward() or "
            "torch.autograd.grad, or call the model inside `with sketchprop.exact(model):`"
        )
