"""What each command does: build, measure, show, answer with an exit code."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..core.stopwatch import unhurried
from ..core.table import Report
from ..layers.transform import sketch_
from ..meters import MeasureReport, advise, bench, check_unbiased, measure, plan, trial
from ..report import html_report, setup_facts
from ..report.charts import bench_chart, noise_chart, plan_chart
from ..sketches import AnySketch, Planner
from .location import measure_location
from .plots import plot_bars, plot_location, plot_trial
from .show import Progress, complain, progress, say, show, write_json
from .specs import (
    Task,
    UsageError,
    find_device,
    load_task,
    make_optimizer,
    parse_planner,
    parse_sketch,
    parse_sketches,
    train,
)

FINE, NO, USAGE, CRASH, STOPPED = 0, 1, 2, 3, 130
"""Exit codes; 130 is what a shell gives for Ctrl-C."""


def run_check(options: Namespace) -> int:
    if options.model is None:
        sketches = [parse_sketch(text) for text in options.sketches]
        how = {"planner": _planner(options), "draws": options.draws}
        reports = [check_unbiased(sketch, **how) for sketch in sketches]
    else:
        chosen = parse_sketches(options.sketches)
        task = _task(options)
        sketch_(task.model, chosen, planner=_planner(options))
        (batch,) = task.take(1)
        drawn = {"draws": options.draws, "seed": options.seed}
        reports = [check_unbiased(task.model, task.loss_fn, batch, **drawn)]
    if options.json:
        write_json([report.as_dict() for report in reports], options.json)
    if options.json != "-":
        for report in reports:
            tables = report.tables() if options.verbose else report.biased_tables()
            show(report.headline(), tables)
    return FINE if all(report.ok for report in reports) else NO


def run_measure(options: Namespace) -> int:
    if options.plot and options.no_split:
        raise UsageError("--plot shows V by layer; leave out --no-split")
    if options.location:
        return _run_location(options)
    chosen = parse_sketches(options.sketches)
    task = _task(options)
    with _calm(task.device), progress() as line:
        _train(options, task, line)
        report = _measure(options, task, _batches(options, task), chosen, line)
    _finish(options, report, lambda path: plot_bars(noise_chart(report), path))
    return FINE if report.pays else NO


def run_advise(options: Namespace) -> int:
    if options.plot and not options.trial:
        raise UsageError("--plot shows the trial's losses; give --trial too")
    task = _task(options)
    with progress() as line:
        _train(options, task, line)
        batches = _batches(options, task)
        line.stage("trying what fits")
        report = advise(
            task.model,
            task.loss_fn,
            batches,
            optimizer=task.optimizer,
            minutes=options.minutes,
            control=not options.same_batch,
            progress=line.share,
            seed=options.seed,
        )
        if options.trial:
            others = "" if options.same_batch else ", half of the batch"
            line.stage(f"a trial: exact, {report.closest.name}{others}, in turns")
            found = trial(
                task.model,
                task.loss_fn,
                task.batches,
                task.optimizer,
                report.candidates[report.closest.name],
                minutes=options.trial,
                control=not options.same_batch,
                progress=line.share,
                seed=options.seed,
            )
            report = replace(report, trial=found)
    _finish(options, report, lambda path: plot_trial(report, path))
    return FINE if report.pays else NO


def run_plan(options: Namespace) -> int:
    sketch = parse_sketch(options.sketches[0])
    task = _task(options)
    (batch,) = task.take(1)
    with _calm(task.device):
        report = plan(task.model, task.loss_fn, batch, sketch=sketch, rounds=options.rounds)
    _finish(options, report, lambda path: plot_bars(plan_chart(report), path))
    return FINE if report.worthwhile else NO


def run_bench(options: Namespace) -> int:
    sketches = [parse_sketch(text) for text in options.sketches]
    device = find_device(options.device or "cpu")
    with _calm(device):
        report = bench(options.shapes, sketches, options.rounds, device)
    _finish(options, report, lambda path: plot_bars(bench_chart(report), path))
    return FINE if any(line.times.ratio < 1 for line in report.lines) else NO


def run_report(options: Namespace) -> int:
    """The page is written whether the sketch pays or not."""
    chosen = parse_sketches(options.sketches)
    tried = [s for s in chosen.values() if s] if isinstance(chosen, dict) else [chosen]
    task = _task(options)
    with _calm(task.device), progress() as line:
        _train(options, task, line)
        batches = _batches(options, task)
        plans = []
        for each in dict.fromkeys(tried):
            line.stage(f"planning: the backward of each layer with {each!r}")
            rounds = max(1, options.rounds)
            plans.append(plan(task.model, task.loss_fn, batches[0], sketch=each, rounds=rounds))
        measured = _measure(options, task, batches, chosen, line)
    facts = {**_facts(options, task), **setup_facts(task.device)}
    title = options.title or f"{options.model}: does sketching pay?"
    page = html_report(measured, plans, title=title, facts=facts)
    Path(options.output).write_text(page, encoding="utf-8")
    if options.json:
        data = {"measure": measured.as_dict(), "plans": [p.as_dict() for p in plans]}
        write_json({"facts": facts, **data}, options.json)
    if options.json != "-":
        show(measured.headline(), [measured.figures()])
        size = len(page.encode()) / 1e3
        say(f"report: {options.output} ({size:.0f} kB, opens in any browser)")
    return FINE if measured.pays else NO


def _run_location(options: Namespace) -> int:
    sketches = [parse_sketch(text) for text in options.sketches]
    task = _task(options)
    make_optimizer(task, options.optimizer, options.learning_rate)
    report = measure_location(
        task,
        sketches,
        options.budgets,
        options.steps,
        batches=options.batches,
        batch_size=options.batch_size,
        draws=options.draws,
        seed=options.seed,
    )
    _finish(options, report, lambda path: plot_location(report, path))
    return FINE


def _task(options: Namespace) -> Task:
    device = find_device(options.device) if options.device else None
    task = load_task(options.model, options.batch_size, options.seed)
    return task if device is None else task.to(device)


@contextmanager
def _calm(device: torch.device) -> Iterator[None]:
    """One thread where other programs have the cores, and a word about it."""
    with unhurried(device) as busy:
        if busy:
            complain(busy)
        yield


def _train(options: Namespace, task: Task, line: Progress) -> None:
    steps = options.steps[-1]
    line.stage(f"training exactly for {steps} steps")
    make_optimizer(task, options.optimizer, options.learning_rate)
    with unhurried(task.device):
        train(task, steps, line.share)


def _batches(options: Namespace, task: Task) -> list[Any]:
    """As many different batches as were asked for, or all there are, and then it says so."""
    batches = task.take(options.batches)
    if len(batches) < 2:
        raise UsageError(
            f"{len(batches)} different batch: σ² is a variance between batches, give at least two, "
            "better eight (--batches)"
        )
    if len(batches) < options.batches:
        complain(f"{len(batches)} batches are different, --batches asked for {options.batches}")
    return batches


def _measure(
    options: Namespace,
    task: Task,
    batches: list[Any],
    sketch: AnySketch | dict[str, AnySketch | None],
    line: Progress,
) -> MeasureReport:
    line.stage("measuring: variance, FLOPs, saved bytes, times")
    return measure(
        task.model,
        task.loss_fn,
        batches,
        sketch,
        planner=_planner(options),
        draws=options.draws,
        split=not options.no_split,
        rounds=options.rounds,
        overhead=options.overhead / 1e3,
        seed=options.seed,
        minutes=options.minutes,
        progress=line.share,
    )


def _planner(options: Namespace) -> Planner | None:
    return None if options.planner is None else parse_planner(options.planner)


def _facts(options: Namespace, task: Task) -> dict[str, str]:
    parameters = sum(p.numel() for p in task.model.parameters())
    data = f"random, batches of {options.batch_size}"
    facts = {
        "command": shlex.join(["sketchprop", *options.arguments]),
        "model": f"{options.model}, {parameters:,} parameters",
        "data": "the factory's" if ":" in options.model else data,
        "exact steps before": str(options.steps[-1]),
        "seed": str(options.seed),
    }
    if options.overhead:
        facts["overhead of a step"] = f"{options.overhead:g} ms"
    return facts


def _finish(options: Namespace, report: Report, plot: Callable[[str], None] | None = None) -> None:
    if options.json:
        write_json(report, options.json)
    if options.json != "-":
        show(report.headline(), report.tables())
    if plot is not None and options.plot:
        plot(options.plot)
