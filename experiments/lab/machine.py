"""Where runs train: no part of what they are, but a GPU rounds and draws differently."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.benchmark import Timer

from . import ExperimentError


@dataclass(frozen=True)
class Machine:
    device: str = ""
    """As torch names it; empty: a GPU where there is one."""
    tf32: bool = False
    compile: bool = False

    @property
    def where(self) -> torch.device:
        found = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if found.type == "cuda" and not torch.cuda.is_available():
            raise ExperimentError("--device cuda: torch finds no GPU here; leave the option out")
        return found

    @property
    def gpus(self) -> int:
        return torch.cuda.device_count() if self.where.type == "cuda" else 0

    @contextmanager
    def used(self) -> Iterator[None]:
        """``machine()`` is this one inside."""
        token = _USED.set(self)
        if self.tf32:
            torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            _USED.reset(token)


HERE = Machine()
_USED = ContextVar("machine", default=HERE)


def machine() -> Machine:
    return _USED.get()


def seconds_of(step: Callable[[], None]) -> float:
    """Of one step, the median over a moment; the first, which allocates and compiles, left out."""
    step()
    # torch's clock waits for a GPU; on a CPU others may have the cores.
    own: Any = {} if machine().gpus else {"timer": time.thread_time}
    timer = Timer("step()", globals={"step": step}, **own)
    return timer.blocked_autorange(min_run_time=0.3).median
