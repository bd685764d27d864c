"""``sketchprop report``: plan, measure, and write one HTML page about it."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from torch import Tensor, nn

from ..meters import MeasureReport, PlanReport, measure, plan
from ..meters.noise.passes import Loss
from ..report import html_report, setup_facts
from ..sketches import Sketch
from .commands import FINE, NO
from .show import say, write_json
from .specs import Task, UsageError, load_task, parse_sketches, train

REDRAW_SECONDS = 0.2


def run_report(options: Namespace) -> int:
    """Exit code 0 if the sketch pays, 1 if it does not; the page is written either way."""
    target = Path(options.output)
    if not target.parent.is_dir():
        raise UsageError(f"--output {target}: there is no folder {str(target.parent)!r}")
    sketch = parse_sketches(options.sketches)
    task = load_task(options.model, options.data, options.batch_size, options.seed)
    with progress() as line:
        measured, plans = _measurements(options, task, sketch, line)
    facts = {**_facts(options, task), **setup_facts(next(task.model.parameters()).device)}
    title = options.title or f"{options.model}: does sketching pay?"
    page = html_report(measured, plans, title=title, facts=facts)
    target.write_text(page, encoding="utf-8")
    if options.json:
        data = {"measure": measured.as_dict(), "plans": [p.as_dict() for p in plans]}
        write_json({"facts": facts, **data}, options.json)
    if options.json != "-":
        say(measured.headline())
        say(f"report: {target} ({len(page.encode()) / 1e3:.0f} kB, opens in any browser)")
    return FINE if measured.pays else NO


def _measurements(
    options: Namespace, task: Task, sketch: Sketch | dict[str, Sketch | None], line: Progress
) -> tuple[MeasureReport, list[PlanReport]]:
    loss_fn = line.counting(task.loss_fn)
    line.stage(f"training exactly for {options.steps} steps")
    train(Task(task.model, loss_fn, task.draw), options.steps, options.learning_rate)
    batches = [task.draw() for _ in range(options.batches)]
    if len(batches) < 2:
        raise UsageError(f"--batches {len(batches)}: σ² is a variance between batches, give 2 or 8")
    tried = [sketch] if isinstance(sketch, Sketch) else [s for s in sketch.values() if s]
    plans = []
    for each in dict.fromkeys(tried):
        line.stage(f"planning: the backward of each layer with {each!r}")
        plans.append(
            plan(task.model, batches[0], loss_fn, sketch=each, rounds=max(1, options.rounds))
        )
    line.stage("measuring: variance, FLOPs, saved bytes, times")
    measured = measure(
        task.model,
        loss_fn,
        batches,
        sketch,
        draws=options.draws,
        split=not options.no_split,
        rounds=options.rounds,
        overhead=options.overhead / 1e3,
        seed=options.seed,
    )
    return measured, plans


def _facts(options: Namespace, task: Task) -> dict[str, str]:
    parameters = sum(p.numel() for p in task.model.parameters())
    own = ":" in options.model
    facts = {
        "command": shlex.join(["sketchprop", *options.arguments]),
        "model": f"{options.model}, {parameters:,} parameters",
        "data": "the factory's" if own else f"{options.data}, batches of {options.batch_size}",
        "exact steps before": str(options.steps),
        "seed": str(options.seed),
    }
    if options.overhead:
        facts["overhead of a step"] = f"{options.overhead:g} ms"
    return facts


class Progress:
    """One line on a terminal: the stage, its passes and seconds; silent anywhere else."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream if stream.isatty() else None
        self._stage, self._passes = "", 0
        self._start = self._drawn = monotonic()

    def stage(self, name: str) -> None:
        self._stage, self._passes, self._start = name, 0, monotonic()
        self._draw()

    def counting(self, loss_fn: Loss) -> Loss:
        """The same loss; each pass moves the line."""

        def counted(model: nn.Module, batch: Any) -> Tensor:
            self._passes += 1
            if monotonic() - self._drawn > REDRAW_SECONDS:
                self._draw()
            return loss_fn(model, batch)

        return counted if self._stream else loss_fn

    def clear(self) -> None:
        if self._stream:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _draw(self) -> None:
        if self._stream:
            self._drawn = monotonic()
            seconds = self._drawn - self._start
            count = f": {self._passes} passes, {seconds:.0f} s" if self._passes else ""
            self._stream.write(f"\r\x1b[K{self._stage}{count}")
            self._stream.flush()


@contextmanager
def progress() -> Iterator[Progress]:
    """A line that is gone when the work is done, or has failed."""
    line = Progress(sys.stderr)
    try:
        yield line
    finally:
        line.clear()
