"""Steps whose blocks ``sketch_(..., compile=True)`` compiles, against exact; and what it costs.

Exact blocks are compiled by the same word, inside ``exact``; with ``whole`` also the exact model
as one graph, by ``torch.compile(model)``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch
from torch._inductor.utils import fresh_cache

import sketchprop as sp

from . import tokens
from .results import Line
from .timing import interleave

SKETCH = sp.Tokens(0.2, share="even")
CASES: dict[str, float | None] = {
    "ViT 96 × 4, 8 × 64 tokens": 0.66,
    "ViT 96 × 4, 16 × 64 tokens": 0.62,
    "ViT 96 × 4, 64 × 64 tokens": 0.60,
    "MiniLM-L6, 2 × 512 tokens": None,
}
"""Models of ``tokens``, and the time of a step over compiled exact that is asked for."""


def compiled(
    names: list[str], seconds: float, whole: bool
) -> tuple[list[Line], list[dict[str, object]]]:
    """Ratios of steps, and for each case the seconds of compiling and when they have paid."""
    lines, rows = [], []
    for name in names:
        steps = {"exact": _step(name, exact=True), "kept": _step(name)}
        with fresh_cache():
            took = {key: _first(once) for key, once in steps.items()}
        steps |= {
            "exact, eager": _step(name, exact=True, compile=False),
            "kept, eager": _step(name, compile=False),
        }
        if whole:
            steps["exact, whole"] = _step(name, exact=True, compile=False, whole=True)
        ratios = interleave(steps, seconds=seconds * len(steps))
        ms = {key: ratio.milliseconds for key, ratio in ratios.items()}
        method = f"{SKETCH!r}, over exact, blocks compiled"
        lines.append(Line(name, method, SKETCH.budget, ratios["kept"], None, CASES[name]))
        lines += [
            Line(name, f"{key}, over exact, blocks compiled", budget, ratios[key])
            for key, budget in (("exact, whole", 1.0), ("kept, eager", SKETCH.budget))
            if key in ratios
        ]
        rows.append(
            {
                "case": name,
                **{f"{key}, s": seconds_of for key, seconds_of in took.items()},
                **{f"{key}, ms": ms[key] for key in ("exact, eager", "kept, eager", *took)},
                "paid over kept, eager": _paid(took["kept"], ms["kept, eager"] - ms["kept"]),
                "paid over exact, eager": _paid(took["kept"], ms["exact, eager"] - ms["kept"]),
            }
        )
    return lines, rows


def _paid(seconds: float, saved: float) -> float:
    """Steps after which ``seconds`` of compiling are saved, at so many milliseconds a step."""
    return 1e3 * seconds / saved if saved > 0 else float("inf")


def _first(once: Callable[[], None]) -> float:
    """Seconds of compiling: of a step that does, beyond one that does not."""
    times = []
    for _ in range(3):
        start = perf_counter()
        once()
        times.append(perf_counter() - start)
    return times[0] - min(times[1:])


def _step(
    name: str, *, exact: bool = False, compile: bool = True, whole: bool = False
) -> Callable[[], None]:
    """A closure that runs one step; its blocks have been proved, and not been compiled yet."""
    model, inputs = tokens.prepared(name)
    sp.sketch_(model, SKETCH, compile=compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    labels = torch.randint(0, 10, (len(inputs),))
    call: Callable[..., Any] = torch.compile(model) if whole else model
    model(inputs)

    def once() -> None:
        optimizer.zero_grad()
        with sp.exact(model) if exact else nullcontext():
            tokens.loss_of(call(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return once
