"""What each command does: build, measure, show, answer with an exit code."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from ..layers.transform import sketch_
from ..meters import MeasureReport, PlanReport, UnbiasedReport, bench, check_unbiased, measure, plan
from .location import measure_location
from .plots import plot_bench, plot_location, plot_measure, plot_plan
from .show import say, show_table, write_json
from .specs import Task, UsageError, load_task, parse_sketch, parse_sketches, train

FINE, NO, USAGE = 0, 1, 2


def run_check(options: Namespace) -> int:
    if options.model is None:
        reports = [
            check_unbiased(parse_sketch(text), draws=options.draws) for text in options.sketches
        ]
    else:
        task = _task(options)
        sketch_(task.model, parse_sketches(options.sketches))
        task.model.train()
        batch = task.draw()
        reports = [
            check_unbiased(
                task.model,
                lambda: task.loss_fn(task.model, batch),
                draws=options.draws,
                seed=options.seed,
            )
        ]
    _finish(options, [report.as_dict() for report in reports], lambda: _show_check(reports))
    return FINE if all(report.ok for report in reports) else NO


def run_measure(options: Namespace) -> int:
    task = _task(options)
    if options.location:
        return _run_location(options, task)
    train(task, options.steps[-1], options.learning_rate)
    report = measure(
        task.model,
        task.loss_fn,
        [task.draw() for _ in range(options.batches)],
        parse_sketches(options.sketches),
        draws=options.draws,
        split=not options.no_split,
        rounds=options.rounds,
        overhead=options.overhead / 1e3,
        seed=options.seed,
    )
    _finish(options, report.as_dict(), lambda: _show_measure(report))
    if options.plot:
        if options.no_split:
            raise UsageError("--plot shows V by layer; leave out --no-split")
        plot_measure(report, options.plot)
    return FINE if report.pays else NO


def run_plan(options: Namespace) -> int:
    task = _task(options)
    sketch = parse_sketch(options.sketches[0])
    report = plan(task.model, task.draw(), task.loss_fn, sketch=sketch, rounds=options.rounds)
    _finish(options, report.as_dict(), lambda: _show_plan(report))
    if options.plot:
        plot_plan(report, options.plot)
    return FINE if report.worthwhile else NO


def run_bench(options: Namespace) -> int:
    sketches = [parse_sketch(text) for text in options.sketches]
    report = bench(options.shapes, sketches, options.rounds, options.device)

    def show() -> None:
        show_table("Backward of a linear layer", *report.cells())

    _finish(options, report.as_dict(), show)
    if options.plot:
        plot_bench(report, options.plot)
    return FINE if any(line.times.ratio < 1 for line in report.lines) else NO


def _run_location(options: Namespace, task: Task) -> int:
    report = measure_location(
        task,
        [parse_sketch(text) for text in options.sketches],
        options.budgets,
        options.steps,
        batches=options.batches,
        batch_size=options.batch_size,
        draws=options.draws,
        learning_rate=options.learning_rate,
        seed=options.seed,
    )
    title = f"V/σ² by place: first is {report.first!r}, last is {report.last!r}"
    _finish(options, report, lambda: show_table(title, *report.cells()))
    if options.plot:
        plot_location(report, options.plot)
    return FINE


def _task(options: Namespace) -> Task:
    return load_task(options.model, options.data, options.batch_size, options.seed)


def _finish(options: Namespace, data: Any, show: Callable[[], None]) -> None:
    if options.json:
        write_json(data, options.json)
    if options.json != "-":
        show()


def _show_check(reports: list[UnbiasedReport]) -> None:
    header = ("case", "gradient", "error of the mean", "z", "")
    for report in reports:
        rows = [
            (
                *(entry.case, entry.gradient, f"{entry.error:.1e}"),
                "" if entry.z is None else f"{entry.z:.1f}",
                "ok" if entry.ok else "BIASED",
            )
            for entry in report.entries
        ]
        verdict = "unbiased" if report.ok else "BIASED"
        show_table(f"{report.subject}: {verdict} ({report.method})", header, rows)


def _show_measure(report: MeasureReport) -> None:
    say(report.headline())
    if report.variance.layers:
        show_table("V by the layer that injected it", *report.layer_cells())
    if report.nodes:
        show_table("Prop. 2.2: variance = local + propagated", *report.node_cells())


def _show_plan(report: PlanReport) -> None:
    show_table("What a sketch would save, layer by layer", *report.cells())
    say(report.conclusion())
