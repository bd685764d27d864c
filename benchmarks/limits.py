"""The largest batch under a limit of memory, and the time of its steps, on real documents.

Memory is that of the whole process, in a fresh one for each method and batch: torch, data, model,
gradients and AdamW. Time is compared in turns at one batch, which every method can take.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import sketchprop as sp
from experiments.depth.study import figures
from experiments.lab.figures import label_axes, picture
from experiments.lab.pages import number_text, read_json, table
from experiments.lab.trainer import generator
from experiments.tasks.table import TASKS
from sketchprop.cli.expressions import parse_sketch
from sketchprop.core.stopwatch import timed
from sketchprop.core.table import plain_data

from .peak import GRAIN, checkpoint_, in_fresh_process, largest_batch, resident
from .timing import CPU, interleave

EXACT, CHECKPOINTED = "exact", "checkpointing"
METHODS = (EXACT, CHECKPOINTED, "Tokens(0.2)", 'Tokens(0.2, save="input")')
EQUAL = 16
"""The batch at which methods are timed in turns."""
LOW, HIGH = 4, 12
"""Batches whose memory says about how many samples will fit."""
FEW = 2
"""Samples of the first step: there budgets are shared out, which takes more memory."""
Keep = Callable[[dict[str, object]], object]


def training(method: str, small: bool) -> Callable[[int], object]:
    """Steps on so many documents: forward, backward, AdamW."""
    task = TASKS["reviews"]
    problem = task.problem(small)
    torch.manual_seed(0)
    model = problem.model().train()
    if method == CHECKPOINTED:
        checkpoint_(model)
    elif method != EXACT:
        sp.sketch_(model, parse_sketch(method), problem.inner)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, task.rate, fused=True)

    def step(size: int) -> None:
        optimizer.zero_grad()
        batch = problem.draw(generator("limits", 0), size)
        torch.autograd.backward(problem.loss_of(model, batch))
        optimizer.step()

    return step


def probe(method: str, size: int, first: int, small: bool) -> dict[str, float]:
    """Bytes at most in two steps, of ``first`` samples and of ``size``; seconds of the second."""
    torch.set_num_threads(1)
    step = training(method, small)
    Path("/proc/self/clear_refs").write_text("5")  # the mark starts anew
    step(first)
    seconds, _ = timed(partial(step, size), CPU)
    return {"bytes": resident("VmHWM"), "seconds": seconds}


def limits(
    gigabytes: Sequence[float], seconds: float, stored: dict[str, Any], keep: Keep, small: bool
) -> dict[str, object]:
    """What is stored, with all that it lacks; ``keep`` is given it after each measurement."""
    known = {name: stored[name] for name in ("probes", "times") if name in stored}
    found: dict[str, Any] = {"probes": {}, "times": {}, **known}

    def probed(method: str, size: int, first: int = FEW) -> int:
        name = f"{method}/{size}/{first}"
        if name not in found["probes"]:
            words = (method, size, first, int(small))
            found["probes"][name] = in_fresh_process("benchmarks.limits", *words)
            keep(found)
        return int(found["probes"][name]["bytes"])

    for first in (FEW, EQUAL):
        probed(METHODS[-1], EQUAL, first)
    rows = [
        _row(method, limit, partial(probed, method), found["probes"])
        for limit in gigabytes
        for method in METHODS
    ]
    if not found["times"]:
        work = {method: partial(training(method, small), EQUAL) for method in METHODS}
        ratios = interleave(work, seconds=seconds * len(work))
        found["times"] = {method: plain_data(ratio) for method, ratio in ratios.items()}
    return {**found, "rows": rows}


def _row(
    method: str, limit: float, peak: Callable[[int], int], probes: dict[str, Any]
) -> dict[str, Any]:
    """Memory is nearly linear in the batch: two small ones say where to look."""
    most = round(1e9 * limit)
    each = (peak(HIGH) - peak(LOW)) / (HIGH - LOW)
    guess = max(1, int(LOW + (most - peak(LOW)) / each)) if each > 0 else HIGH
    guess -= guess % max(1, guess // GRAIN)
    size = largest_batch(peak, most, guess, peak(guess))
    if peak(size) > most:
        told = f"a batch of {size} needs {peak(size) / 1e9:.2f} GB with {method}, not {limit:g}"
        raise ValueError(f"{told}; give larger --gigabytes")
    seconds = probes[f"{method}/{size}/{FEW}"]["seconds"]
    return {"limit": limit, "method": method, "batch": size, "bytes": peak(size),
            "seconds": seconds, "each": seconds / size}  # fmt: skip


def section(stored: dict[str, Any], results: Path) -> str:
    """A part of docs/results/memory.md, and its picture beside it."""
    rows, times = stored["rows"], stored["times"]
    limits = list(dict.fromkeys(row["limit"] for row in rows))
    noise = _worst_noise(results / "redundancy" / "results.json")
    lines = []
    for method in METHODS:
        ratio, own = times[method]["median"], [row for row in rows if row["method"] == method]
        equal = ratio * (1 + noise) if method.startswith("Tokens") else ratio
        fits = (f"**{r['batch']}**: {r['seconds']:.0f} s, {r['each']:.2f} s" for r in own)
        lines.append([f"`{method}`", *fits, number_text(ratio), number_text(equal)])
    head = ["method", *(f"under {limit:g} GB" for limit in limits), "time", "time at equal noise"]
    picture(results, "memory", 1, partial(_draw, rows, limits), (5.6, 3.8))
    less, whole = (
        stored["probes"][f"{METHODS[-1]}/{EQUAL}/{first}"]["bytes"] / 1e9 for first in (FEW, EQUAL)
    )
    told = FIRST_STEP.format(size=EQUAL, few=FEW, less=less, whole=whole)
    machine = stored["machine"]
    about = f"`{stored['command']}` on {machine['cpu']}, torch {machine['torch']}, one thread."
    return "\n".join([WORDS, table(head, lines), "", told, about, ""])


def _worst_noise(stored: Path) -> float:
    """V/σ² of the worst block under ``Tokens(0.2)``; not a number where nothing is stored."""
    moment = read_json(stored, {}).get("documents/512")
    return math.nan if moment is None else float(figures(moment, moment["ways"]["0.2"])["worst"])


def _draw(rows: Sequence[dict[str, Any]], limits: Iterable[float], panels: Sequence[Any]) -> None:
    """To the right: more samples in the same memory; down: faster."""
    (axes,) = panels
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        places = [[row[field] for row in own] for field in ("batch", "each")]
        axes.plot(*places, marker="o", ms=4, label=method)
        for row, limit in zip(own, limits, strict=True):
            axes.annotate(f"{limit:g} GB", (row["batch"], row["each"]), (0, 5), fontsize=6,
                          textcoords="offset points", ha="center")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(0, 1.15 * max(row["each"] for row in rows))
    title = "MiniLM on documents of 512 tokens"
    label_axes(axes, title, "largest batch that fits", "seconds for a sample")
    axes.legend(fontsize=7)


WORDS = f"""## Documents of 512 tokens: the largest batch, and the time of a step there

![Seconds for a sample against the largest batch that fits into 2, 4 and 8 GB](memory.png)

MiniLM-L6 on movie reviews, the task `reviews`, AdamW. A cell has the largest batch, in
sixteenths, whose steps need no more than that much memory, with libraries, data, model, gradients
and optimizer; the time of a step there; and of a sample. (Freed blocks are returned at once, here
and in the table below.) *Time* is that of a step at batch {EQUAL} over exact, in turns, where freed
blocks are kept. *Time at equal noise* is that times 1 + V/σ² of the worst block,
[measured](redundancy/README.md) at batch 4: with a batch that is larger by this factor no block has
more noise than in an exact step. Nothing here was trained to a quality. At the same batch exact
training and checkpointing compute the same gradient, kept tokens one with more noise.

**Gradients of smaller batches can be accumulated**: that makes a batch of any size in the memory of
exact training, at its time for a sample. So memory alone is no reason for checkpointing or
`save="input"`, unless one sample does not fit, or the loss needs the whole batch at once.
"""
FIRST_STEP = """In its first backward pass `Tokens` shares the budgets out, and needs more memory:
with `save="input"` and a first step of {size} samples {whole:.2f} GB, of {few} and then {size}
{less:.2f} GB. Here the first step has {few} samples. Where memory is short, do so, or type
`share="even"`.
"""


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe(sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4] == "1")))
