"""The state of random generators: read, written, kept and seeded here alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


@contextmanager
def random_state_kept(device: torch.device | None = None) -> Iterator[None]:
    """What is drawn inside leaves every generator as it was: torch's on all devices in use,
    python's and numpy's; with ``device`` torch's of the CPU and of that device alone."""
    if device is None:
        puts = [(put, get()) for get, put in _generators()]
    else:
        puts = [(partial(set_random_state, d), random_state(d)) for d in {CPU, device}]
    try:
        yield
    finally:
        for put, state in puts:
            put(state)


def _generators() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How to read and write each generator."""
    yield random.getstate, random.setstate
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    if numpy is not None:
        yield numpy.get_state, numpy.set_state
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


def random_state(device: torch.device) -> Tensor:
    """The state of torch's default generator on ``device``."""
    module: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    state: Tensor = module.get_rng_state(*_place(device))
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Puts what ``random_state`` gave back."""
    module: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    module.set_rng_state(state, *_place(device))


def _place(device: torch.device) -> list[torch.device]:
    """What torch's functions want beside the state: only cpu and mps have one generator."""
    return [] if device.type in ("cpu", "mps") else [device]


def seed_generators(device: torch.device, *numbers: int) -> None:
    """Seeds the default generators of the CPU and of ``device`` with a mix of ``numbers``.

    Not ``torch.manual_seed``: where CUDA is not in use it formats a stack trace at each call,
    which takes longer than a small network's step.
    """
    mixed = hash(numbers) & (2**63 - 1)
    torch.default_generator.manual_seed(mixed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(mixed)
