"""Interleaved timing: machines drift, so only ratios within one round mean anything."""

from __future__ import annotations

import gc
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sketchprop.core.stopwatch import cpu_name

PINNED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
"""Settings under which the C allocator keeps its pages instead of asking for fresh ones."""


@dataclass(frozen=True)
class Ratio:
    """Median over rounds of a time over the baseline's time in the same round."""

    median: float
    low: float
    high: float
    milliseconds: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Prepared(NamedTuple):
    """Work whose first part is not timed, a forward pass for example."""

    prepare: Callable[[], Any]
    run: Callable[[Any], object]


Work = Callable[[], object] | Prepared


def interleave(
    work: Mapping[str, Work],
    *,
    seconds: float = 3.0,
    rounds: tuple[int, int] = (9, 400),
) -> dict[str, Ratio]:
    """Times each function once per round, in random order, until ``seconds`` are used up.

    The first entry is the baseline. Medians of the ratios, with their quartiles.
    """
    for entry in work.values():
        _seconds(entry, _prepare(entry))
        _seconds(entry, _prepare(entry))
    times: dict[str, list[float]] = {name: [] for name in work}
    names = list(work)
    order = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        done = 0
        while done < rounds[0] or (done < rounds[1] and time.perf_counter() - start < seconds):
            # What ran just before decides what is in the caches: in a fixed order that would
            # favour one entry in every round.
            # All preparations come first: a forward pass right before would leave every cache
            # full of its own, which the backward of one layer among many does not meet.
            ready = {name: _prepare(work[name]) for name in names}
            for name in order.sample(names, len(names)):
                times[name].append(_seconds(work[name], ready.pop(name)))
            done += 1
    finally:
        gc.enable()
    base = times[names[0]]
    results = {}
    for name, series in times.items():
        ratios = [t / b for t, b in zip(series, base, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        milliseconds = 1e3 * statistics.median(series)
        results[name] = Ratio(statistics.median(ratios), low, high, milliseconds)
    return results


def _prepare(entry: Work) -> Any:
    return entry.prepare() if isinstance(entry, Prepared) else None


def _seconds(entry: Work, ready: Any) -> float:
    start = time.perf_counter()
    if isinstance(entry, Prepared):
        entry.run(ready)
    else:
        entry()
    return time.perf_counter() - start


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
