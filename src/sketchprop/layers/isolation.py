"""Trying layers without leaving a trace: in a model's own objects, or in a twin of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

SKETCHING = "sketching"
"""The one entry of a sketched layer's ``__dict__`` beside those of the plain layer."""


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """In eval mode; each module's own mode comes back at the end."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


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
