"""Trying layers without leaving a trace: in a model's own objects, or in a twin of a layer."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

SKETCHING = "sketching"
"""The one entry of a sketched layer's ``__dict__`` beside those of the plain layer."""


@contextmanager
def random_state_kept() -> Iterator[None]:
    """What is drawn inside leaves every generator as it was: torch's on all devices in use,
    python's and numpy's."""
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    python_state, numpy_state = random.getstate(), numpy and numpy.get_state()
    torch_states = [(put, get()) for get, put in _generators()]
    try:
        yield
    finally:
        for put, state in torch_states:
            put(state)
        random.setstate(python_state)
        if numpy is not None:
            numpy.set_state(numpy_state)


def _generators() -> Iterator[tuple[Callable[[], Tensor], Callable[[Tensor], Any]]]:
    """How to read and write each generator of torch."""
    yield torch.get_rng_state, torch.set_rng_state
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # Asking a GPU that nothing has used yet would start it.
    if device is None or (device.type == "cuda" and not torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return
    module = torch.get_device_module(device)
    if device.type == "mps":  # one generator, without an index
        yield module.get_rng_state, module.set_rng_state
        return
    for i in range(module.device_count()):
        yield partial(module.get_rng_state, i), partial(module.set_rng_state, device=i)


@contextmanager
def alone() -> Iterator[None]:
    """Autograd as on a bare machine: gradients on, no dispatch mode, nobody's saved tensors.

    A forward pass may be under way around it: under activation checkpointing, which counts the
    tensors that are saved, or under a FLOP counter.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_disable_current_modes())
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            shadow = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x)
            stack.enter_context(shadow)
        yield


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
