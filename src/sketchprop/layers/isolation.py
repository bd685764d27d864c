"""Trying layers without leaving a trace: in a model's own objects, or in a twin of a layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

SKETCHING = "sketching"
"""The one entry of a sketched layer's ``__dict__`` beside those of the plain layer."""


@contextmanager
def no_gradient_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """The user's hooks on these gradients do not run: a timing is no step of training."""
    held = [(p, p._backward_hooks) for p in parameters]
    try:
        for p, _ in held:
            p._backward_hooks = None
        yield
    finally:
        for p, hooks in held:
            p._backward_hooks = hooks


def twin(layer: nn.Module) -> Any:
    """A layer that reads the same weights and can be run without a trace.

    Its parameters are leaves of their own, so that no ``.grad`` is written and no hook on a
    tensor runs; buffers and what a planner remembers are copies; hooks on modules stay behind.
    """
    other = nn.Module.__new__(type(layer))
    nn.Module.__init__(other)
    fresh = set(vars(other)) | {"forward"}
    plain = {key: value for key, value in vars(layer).items() if key not in fresh}
    vars(other).update(plain)
    if SKETCHING in plain:
        vars(other)[SKETCHING] = plain[SKETCHING].copied()
    for name, p in layer._parameters.items():
        # As a plain tensor: an entry of ``_parameters`` need not be an nn.Parameter to be read.
        alias = None if p is None else p.detach().requires_grad_(p.requires_grad)
        other._parameters[name] = alias  # type: ignore[assignment]
    for name, buffer in layer._buffers.items():
        other._buffers[name] = None if buffer is None else buffer.detach().clone()
    for name, child in layer._modules.items():
        other._modules[name] = None if child is None else twin(child)
    other.training = layer.training
    return other
