"""Times taken in turns, so that what is compared meets the same machine."""

from __future__ import annotations

import gc
import os
import platform
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from time import perf_counter, process_time
from typing import Any, TypeVar

import torch


def in_turns(
    actions: Sequence[Callable[[], Any]],
    rounds: int | tuple[int, int],
    device: torch.device,
    seconds: float = 0.0,
    prepare: Callable[[], object] = lambda: None,
) -> list[list[float]]:
    """Seconds of each action in each round, after one round of warming up.

    ``rounds``: how many, or the least and the most of them: within these it goes on until
    ``seconds`` are used up. The order changes from round to round: what ran just before decides
    what is in the caches, and in a fixed order that would favour one action in every round.
    ``prepare``: what is done before each round and not timed, forward passes for example.
    """
    least, most = (rounds, rounds) if isinstance(rounds, int) else rounds
    if least < 1:
        raise ValueError(f"rounds={rounds} times nothing; give at least 1")
    times: list[list[float]] = [[] for _ in actions]
    order = random.Random(0)
    collecting = gc.isenabled()
    gc.disable()
    try:
        start, done = 0.0, -1  # the first round warms up
        while done < least or (done < most and perf_counter() - start < seconds):
            prepare()
            for i in order.sample(range(len(actions)), len(actions)):
                elapsed, _ = timed(actions[i], device)
                if done >= 0:
                    times[i].append(elapsed)
            done += 1
            start = start if done else perf_counter()
    finally:
        if collecting:
            gc.enable()
    return times


Result = TypeVar("Result")


def timed(
    run: Callable[[], Result], device: torch.device, clock: Callable[[], float] | None = None
) -> tuple[float, Result]:
    """Seconds and the result of one run, with the device's queue empty before and after."""
    clock = clock or clock_of(device)
    synchronise(device)
    start = clock()
    result = run()
    synchronise(device)
    return clock() - start, result


def clock_of(device: torch.device) -> Callable[[], float]:
    """On one thread of a CPU its own seconds: those that other programs take do not count."""
    if device.type == "cpu" and os.name == "posix" and torch.get_num_threads() == 1:
        return process_time
    return perf_counter


TRIED, SIZE, REPEATS = 9, 384, 10
"""Products that ask whether threads help: so many times so many, of so many rows."""
NO_HELP = 0.9
"""Time on all threads over that on one, from which on threads do not help."""


@contextmanager
def unhurried(device: torch.device) -> Iterator[str]:
    """Where other programs have the cores: one thread, and its own seconds. Says so, or ''.

    On a busy machine threads wait for each other, small operations longest, and what is timed is
    the neighbours. Products that should be faster on all threads than on one tell.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1 or os.name != "posix" or _threads_help(threads):
        yield ""
        return
    torch.set_num_threads(1)
    try:
        yield (
            f"other programs have the cores, {threads} threads are no faster here than one: times "
            "are those of one thread, in its own seconds; ask again on a quiet machine"
        )
    finally:
        torch.set_num_threads(threads)


def _threads_help(threads: int) -> bool:
    x = torch.ones(SIZE, SIZE)

    def median_of(clock: Callable[[], float]) -> float:
        stamps = [clock()]
        for _ in range(TRIED + 1):
            for _ in range(REPEATS):
                x @ x
            stamps.append(clock())
        return median(b - a for a, b in pairwise(stamps[1:]))  # the first warms up

    try:
        torch.set_num_threads(1)
        one = median_of(process_time)
    finally:
        torch.set_num_threads(threads)
    return median_of(perf_counter) < NO_HELP * one


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
