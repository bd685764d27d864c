"""Times taken in turns, so that what is compared meets the same machine."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch


def in_turns(
    actions: Sequence[Callable[[], Any]], rounds: int, device: torch.device
) -> list[list[float]]:
    """Seconds of each action in each round, after one round of warming up."""
    if rounds < 1:
        raise ValueError(f"rounds={rounds} times nothing; give at least 1")
    seconds: list[list[float]] = [[] for _ in actions]
    for turn in range(rounds + 1):
        for action, taken in zip(actions, seconds, strict=True):
            elapsed = seconds_of(action, device)
            if turn:
                taken.append(elapsed)
    return seconds


def seconds_of(action: Callable[[], Any], device: torch.device) -> float:
    """One run of ``action``, with the device's queue empty before and after."""
    synchronise(device)
    start = perf_counter()
    action()
    synchronise(device)
    return perf_counter() - start


def synchronise(device: torch.device) -> None:
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).synchronize()


def cpu_name() -> str:
    """What the processor calls itself."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
