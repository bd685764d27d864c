"""What each command does: build, measure, show, answer with an exit code. The docstring of a
command is the help that teaches it."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..core.stopwatch import unhurried
from ..core.table import Report, as_text
from ..layers.transform import sketch_
from ..meters import MeasureReport, advise, check_unbiased, measure, plan, trial
from ..report import html_report, setup_facts
from ..sketches import AnySketch
from .expressions import UsageError, parse_sketch, parse_sketches
from .show import Progress, complain, say, write_json
from .tasks import Task, load_task

FINE, NO, USAGE, CRASH, STOPPED = 0, 1, 2, 3, 130
"""Exit codes; 130 is what a shell gives for Ctrl-C."""


def run_advise(options: Namespace) -> int:
    """says what to type for your model, or to stay exact, and why

    It tries what fits the model: kept tokens, rows by token, whole samples, columns. It times a
    step with each, in turns with exact steps, and measures the noise that each adds. It compares
    the time to equal quality with that of exact training, and with half of the batch. The answer
    comes first: a line to paste; or, with exit code 1, 'halve the batch', 'stay exact', 'too close
    to call', or 'no answer yet', where the batches do not show a gradient. Noise changes during
    training: --steps 200 trains for 200 steps before it measures.

    examples:
      sketchprop advise --model vit --minutes 1                  a first look, on random data
      sketchprop advise --model mine:factory --optimizer adamw --steps 200
      sketchprop advise --model mine:factory --trial 3           and tries its advice
    """
    if options.compile and options.trial:
        raise UsageError("--trial trains uncompiled; leave out --compile")
    task = load_task(options.model, options.batch_size, options.seed)
    with _trained(options, task) as (batches, line):
        line.stage("trying what fits")
        model, loss_fn, optimizer = task.model, task.loss_fn, task.optimizer
        common: Any = {"control": not options.same_batch, "seed": options.seed}
        common |= {"optimizer": optimizer, "progress": line.share}
        how: Any = {"minutes": options.minutes, "compile": options.compile}
        report = advise(model, loss_fn, batches, **how, **common)
        if options.trial:
            best = report.closest.name
            others = "" if options.same_batch else ", half of the batch"
            line.stage(f"a trial: exact, {best}{others}, in turns")
            common |= {"sketch": report.candidates[best], "minutes": options.trial}
            try:
                report = replace(report, trial=trial(model, loss_fn, task.batches, **common))
            except BaseException:
                _finish(options, report)  # what is known is not lost
                raise
    _finish(options, report)
    return FINE if report.pays else NO


def run_check(options: Namespace) -> int:
    """proves that the mean of a sketched gradient is the exact gradient

    It compares the mean of dX, dW and db with the exact gradient, on layers of difficult shapes
    and contents. It computes this mean exactly, as a finite sum over all draws. With --draws, or on
    a whole model, it takes a Monte Carlo mean and counts deviations in standard errors. It prints a
    verdict and what is biased; --verbose prints all cases. You need it for a sketch of your own.

    examples:
      sketchprop check mine:MySketch(0.2)              a sketch of your own
      sketchprop check 'L1(0.1)' 'Diagonal(0.2)'
      sketchprop check 'Diagonal(0.2, paper=True)'     the paper's formula, taken literally: biased
      sketchprop check 'L1(0.5)' --model vit --draws 300
    """
    if options.model is None:
        sketches = [parse_sketch(text) for text in options.sketches]
        reports = [check_unbiased(sketch, draws=options.draws) for sketch in sketches]
    else:
        choice = parse_sketches(options.sketches)
        task = load_task(options.model, options.batch_size, options.seed)
        sketch_(task.model, choice)
        (batch,) = task.take(1)
        how = {"draws": options.draws, "seed": options.seed}
        reports = [check_unbiased(task.model, task.loss_fn, batch, **how)]
    if options.json:
        write_json([report.as_dict() for report in reports], options.json)
    if options.json != "-":
        for report in reports:
            say(as_text(report) if options.verbose else str(report))
    return FINE if all(report.ok for report in reports) else NO


def run_measure(options: Namespace) -> int:
    """measures the noise that a sketch adds, and whether the time it saves is worth it

    It measures σ², the variance of the minibatch gradient, and V, the variance that the sketch
    adds, in total and by layer. SGD needs ∝ ‖g‖² + σ² + V steps, g the mean gradient. With ρ the
    cost of a step, by time or in FLOPs, a sketch pays if ρ(V)(‖g‖² + σ² + V) ≤ ρ(0)(‖g‖² + σ²).

    examples:
      sketchprop measure --model vit --sketch 'Tokens(0.3)'
      sketchprop measure --model mine:factory --sketch 'Tokens(0.2)' --json report.json
      sketchprop measure --model vit --sketch 'blocks.*.mlp.*=Rows(0.3)' --draws 16
      sketchprop measure --model mlp --steps 469 --sketch '0=L1(0.1)'     only the first layer
    """
    choice = parse_sketches(options.sketches)
    task = load_task(options.model, options.batch_size, options.seed)
    with _calm(task.device), _trained(options, task) as (batches, line):
        report = _measure(options, task, batches, choice, line)
    _finish(options, report)
    return FINE if report.pays else NO


def run_plan(options: Namespace) -> int:
    """times each layer, exact and sketched: which ones get faster on this machine?

    It times the backward pass of each layer alone, at the shapes that it has in the model. It says
    nothing about noise: ask advise or measure. The exit code is 1 if no layer gets faster.

    examples:
      sketchprop plan --model vit
      sketchprop plan --model mine:factory --sketch 'Rows(0.3)'
    """
    sketch = parse_sketch(options.sketches[0])
    task = load_task(options.model, options.batch_size, options.seed)
    (batch,) = task.take(1)
    with _calm(task.device):
        report = plan(task.model, task.loss_fn, batch, sketch=sketch, rounds=options.rounds)
    _finish(options, report)
    return FINE if report.worthwhile else NO


def run_report(options: Namespace) -> int:
    """writes plan and measure, with plots, as one HTML page

    The page says whether a sketch pays, what it costs in time, memory and noise, and draws this
    layer by layer. It needs no network and no script: send it to a colleague. The command takes
    about draws × batches × (sketched layers) steps; --minutes, --no-split and --draws limit it.

    examples:
      sketchprop report --model vit --sketch 'Tokens(0.3)' --output vit.html
      sketchprop report --model mine:factory --sketch 'blocks.*=Tokens(0.3)' --batches 4 --draws 8
    """
    choice = parse_sketches(options.sketches)
    sketches = [s for s in choice.values() if s] if isinstance(choice, dict) else [choice]
    task = load_task(options.model, options.batch_size, options.seed)
    with _calm(task.device), _trained(options, task) as (batches, line):
        plans = []
        for sketch in dict.fromkeys(sketches):
            line.stage(f"planning: the backward of each layer with {sketch!r}")
            rounds = max(1, options.rounds)
            plans.append(plan(task.model, task.loss_fn, batches[0], sketch=sketch, rounds=rounds))
        measured = _measure(options, task, batches, choice, line)
    parameters = sum(p.numel() for p in task.model.parameters())
    random = f"random, batches of {options.batch_size}"
    facts = {
        "command": shlex.join(["sketchprop", *options.words]),
        "model": f"{options.model}, {parameters:,} parameters",
        "data": "the factory's" if ":" in options.model else random,
        "exact steps before": str(options.steps),
        "seed": str(options.seed),
        **setup_facts(task.device),
    }
    title = f"{options.model}: does sketching pay?"
    page = html_report(measured, plans, title=title, facts=facts)
    Path(options.output).write_text(page, encoding="utf-8")
    if options.json:
        write_json({"facts": facts, "measure": measured, "plans": plans}, options.json)
    if options.json != "-":
        say(as_text(measured, [measured.figures()]))
        size = len(page.encode()) / 1e3
        say(f"report: {options.output} ({size:.0f} kB, opens in any browser)")
    return FINE if measured.pays else NO


@contextmanager
def _calm(device: torch.device) -> Iterator[None]:
    """One thread where other programs have the cores, and a word about it."""
    with unhurried(device) as busy:
        if busy:
            complain(busy)
        yield


@contextmanager
def _trained(options: Namespace, task: Task) -> Iterator[tuple[list[Any], Progress]]:
    """After --steps: as many different batches as were asked for, or all there are, and then it
    says so; and a line of progress."""
    with Progress(sys.stderr) as line:
        line.stage(f"training exactly for {options.steps} steps")
        task.make_optimizer(options.optimizer, options.learning_rate)
        with unhurried(task.device):
            task.train(options.steps, line.share)
        batches = task.take(options.batches)
        if len(batches) < 2:
            raise UsageError(
                f"{len(batches)} different batch: σ² is a variance between batches, give at least "
                "two, better eight (--batches)"
            )
        if len(batches) < options.batches:
            complain(f"{len(batches)} batches are different, --batches asked for {options.batches}")
        yield batches, line


def _measure(
    options: Namespace,
    task: Task,
    batches: list[Any],
    sketch: AnySketch | dict[str, AnySketch | None],
    line: Progress,
) -> MeasureReport:
    line.stage("measuring: variance, FLOPs, saved bytes, times")
    how = {name: getattr(options, name) for name in ("draws", "rounds", "seed", "minutes")}
    how |= {"split": not options.no_split, "progress": line.share}
    return measure(task.model, task.loss_fn, batches, sketch, **how)


def _finish(options: Namespace, report: Report) -> None:
    if options.json:
        write_json(report, options.json)
    if options.json != "-":
        say(as_text(report))
