"""Interleaved timing: machines drift, so only ratios within one round mean anything."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sketchprop.core.stopwatch import cpu_name, in_turns, timed

CPU = torch.device("cpu")
PINNED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
"""Settings under which the C allocator keeps its pages instead of asking for fresh ones."""


class Prepared:
    """Work whose first part, a forward pass for example, is not timed."""

    def __init__(self, first: Callable[[], Any], second: Callable[[Any], object]) -> None:
        self.first, self.second = first, second

    def prepare(self) -> None:
        self.ready = self.first()

    def __call__(self) -> None:
        given = self.ready
        del self.ready  # a graph is freed as soon as its backward has run
        self.second(given)


Work = Callable[[], Any] | Prepared


@dataclass(frozen=True)
class Ratio:
    """Median over rounds of a time over the baseline's time in the same round."""

    median: float
    low: float
    high: float
    milliseconds: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interleave(
    work: Mapping[str, Work],
    *,
    seconds: float = 3.0,
    rounds: tuple[int, int] = (9, 400),
    behind: bool = False,
    device: torch.device = CPU,
) -> dict[str, Ratio]:
    """Times each function once per round, in random order, until ``seconds`` are used up.

    The first entry is the baseline. Medians of the ratios, with their quartiles. ``behind``: what
    is prepared is prepared right before it is timed, not with that of all others.
    """
    gc.collect()
    if behind:
        alone = {name: _one_at_a_time(each) for name, each in work.items()}
        return _ratios(work, [[next(clock) for clock in alone.values()] for _ in range(rounds[1])])

    def prepare() -> None:
        # All of them first: a forward pass right before would leave every cache full of its own,
        # which the backward of one layer among many does not meet.
        for each in work.values():
            if isinstance(each, Prepared):
                each.prepare()

    times = in_turns(list(work.values()), rounds, device, seconds, prepare)
    return _ratios(work, list(zip(*times, strict=True)))


def _one_at_a_time(each: Work) -> Iterator[float]:
    """Seconds of each run."""
    while True:
        if isinstance(each, Prepared):
            each.prepare()
        yield timed(each, CPU)[0]


def _ratios(names: Iterable[str], rounds: Sequence[Sequence[float]]) -> dict[str, Ratio]:
    results = {}
    times = list(zip(*rounds, strict=True))
    for name, series in zip(names, times, strict=True):
        ratios = [t / b for t, b in zip(series, times[0], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        milliseconds = 1e3 * statistics.median(series)
        results[name] = Ratio(statistics.median(ratios), low, high, milliseconds)
    return results


def restart_pinned(allocator: str) -> None:
    """Starts this command anew with the allocator pinned: the settings are read at start only."""
    if allocator == "pinned" and any(os.environ.get(k) != v for k, v in PINNED.items()):
        environment = {**os.environ, **PINNED}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]], environment)


def machine(allocator: str) -> dict[str, object]:
    """What a result depends on."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "allocator": allocator,
        "allocator_settings": {k: os.environ.get(k) for k in PINNED},
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
