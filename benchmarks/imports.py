"""What ``import sketchprop`` adds to ``import torch``: fresh processes, in turns."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time

TARGET_SECONDS = 0.2

CODE = {
    "import torch": "import torch",
    "import torch, sketchprop": "import torch, sketchprop",
}

INSIDE = """
import json, sys, time, torch
before = set(sys.modules)
start = time.perf_counter()
import sketchprop
seconds = time.perf_counter() - start
new = {name.split(".")[0] for name in set(sys.modules) - before} - {"sketchprop"}
others = sorted(new - set(sys.stdlib_module_names) - {"torch"})
print(json.dumps({"seconds": seconds, "others": others}))
"""


def imports(seconds: float) -> list[dict[str, object]]:
    """Whole processes and the statement alone; medians and quartiles, in milliseconds.

    Each round starts both processes, in random order; ``added`` is their difference within a
    round. The statement alone is timed inside further processes that have torch already.
    """
    order = random.Random(0)
    walls: dict[str, list[float]] = {name: [] for name in CODE}
    inside: list[float] = []
    others: set[str] = set()
    for code in CODE.values():
        _wall(code)  # compiled files and the page cache, once
    start = time.perf_counter()
    while len(inside) < 5 or time.perf_counter() - start < seconds:
        for name in order.sample(list(CODE), len(CODE)):
            walls[name].append(_wall(CODE[name]))
        told = json.loads(_python(INSIDE))
        inside.append(told["seconds"])
        others.update(told["others"])
    plain, both = walls.values()
    rows = [_row(name, series) for name, series in walls.items()]
    rows.append(
        _row("added, process by process", [b - a for a, b in zip(plain, both, strict=True)])
    )
    rows.append(_row("the statement alone", inside))
    return [{**row, "third-party modules": ", ".join(sorted(others)) or "none"} for row in rows]


def _row(case: str, series: list[float]) -> dict[str, object]:
    low, middle, high = statistics.quantiles(series, n=4)
    return {
        "case": case,
        "median_ms": 1e3 * middle,
        "low_ms": 1e3 * low,
        "high_ms": 1e3 * high,
        "rounds": len(series),
    }


def _wall(code: str) -> float:
    start = time.perf_counter()
    _python(code)
    return time.perf_counter() - start


def _python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
