"""What two runs are compared by, numbers that are close and what they would learn; and how they
run without the user's hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def has_numbers(t: object) -> bool:
    """Whether there is something to compare; a fake tensor only says what would run."""
    return type(t).__name__ != "FakeTensor"  # its module takes long to import


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    narrow = a.dtype.itemsize < 4 or torch.is_autocast_enabled(a.device.type)
    tolerance = 1e-2 if narrow else 1e-4
    atol = tolerance * max(float(b.detach().abs().amax()) if b.numel() else 0.0, 1e-12)
    return a.shape == b.shape and torch.allclose(a, b, tolerance, atol, equal_nan=True)


def learned_by(*results: Tensor) -> set[Any]:
    """Where a gradient of the results would be added up: ``.variable`` is the leaf."""
    nodes: list[Any] = [get_gradient_edge(t).node for t in results if t.requires_grad]
    seen = set(nodes)
    ends = set()
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            ends.add(node)
        below = [n for n, _ in node.next_functions if n is not None and n not in seen]
        seen.update(below)
        nodes += below
    return ends


@contextmanager
def no_gradient_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """The user's hooks on these gradients do not run inside: it is no step of training."""
    held = [(p, p._backward_hooks) for p in parameters]
    try:
        for p, _ in held:
            p._backward_hooks = None
        yield
    finally:
        for p, hooks in held:
            p._backward_hooks = hooks
