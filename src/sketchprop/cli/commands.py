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
    """what to type for this model, or to stay exact, and why

    Tries what fits the model: kept tokens, rows by token, whole samples, columns, and half of the
    batch as the control. For each it takes the time of a step, in turns with exact ones, and the
    noise that it adds; what counts is the time to equal quality. Says first what to paste, or to
    stay exact (exit code 1). Noise changes while a model trains: --steps 200 asks after so many.

    examples:
      sketchprop advise --model vit --steps 50 --optimizer adamw --minutes 1
      sketchprop advise --model mycode:make --minutes 5 --json advice.json
      sketchprop advise --model vit --trial 3
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
            report = replace(report, trial=trial(model, loss_fn, task.batches, **common))
    _finish(options, report)
    return FINE if report.pays else NO


def run_check(options: Namespace) -> int:
    """is the mean of a sketched gradient the exact gradient?

    Compares the mean of dX, dW and db with the exact gradient on layers of hard shapes and
    contents. The mean is exact, a finite sum over the breakpoints of the draw; with --draws, or on
    a whole model, it is a Monte Carlo mean and deviations are counted in standard errors. Shown
    are the verdict and what is biased; --verbose shows every line.

    examples:
      sketchprop check 'L1(0.1)' 'Diagonal(0.2)'
      sketchprop check 'Diagonal(0.2, paper=True)'     the paper's formula, taken literally: biased
      sketchprop check mycode:MySketch(0.2)            a sketch of your own
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
    """how much variance does it add, where, and is that worth the time it saves?

    Measures σ², the variance of the minibatch gradient, and V, what the sketches add to it: in
    total and by the layer that injected it. SGD needs ∝ ‖g‖² + σ² + V steps, g the mean gradient,
    so with ρ the cost of a step a sketch pays if ρ(V)(‖g‖² + σ² + V) ≤ ρ(0)(‖g‖² + σ²). The answer
    is given by measured time and by FLOPs.

    examples:
      sketchprop measure --model vit --sketch 'Tokens(0.3)'
      sketchprop measure --model vit --sketch 'blocks.*.mlp.*=Rows(0.3)' --draws 16
      sketchprop measure --model mycode:make --sketch 'Tokens(0.2)' --json report.json
      sketchprop measure --model mlp --steps 469 --sketch '0=L1(0.1)'     only the first layer
    """
    choice = parse_sketches(options.sketches)
    task = load_task(options.model, options.batch_size, options.seed)
    with _calm(task.device), _trained(options, task) as (batches, line):
        report = _measure(options, task, batches, choice, line)
    _finish(options, report)
    return FINE if report.pays else NO


def run_plan(options: Namespace) -> int:
    """which layers of a model are worth sketching on this machine?

    Times the backward of each layer on this machine, alone and at the shapes it has in the model,
    exact and sketched. Says which layers get faster, and by how much. If none does, the exit code
    is 1.

    examples:
      sketchprop plan --model vit
      sketchprop plan --model mycode:make --sketch 'Rows(0.3)'
    """
    sketch = parse_sketch(options.sketches[0])
    task = load_task(options.model, options.batch_size, options.seed)
    (batch,) = task.take(1)
    with _calm(task.device):
        report = plan(task.model, task.loss_fn, batch, sketch=sketch, rounds=options.rounds)
    _finish(options, report)
    return FINE if report.worthwhile else NO


def run_report(options: Namespace) -> int:
    """plan and measure, with plots, as one HTML page

    Plans and measures one model with one batch size, and writes one HTML page: does it pay, how
    much time, memory and variance; then layer by layer, with plots; then how it was measured. The
    page needs no network and no script: send it to a colleague, or keep it beside the training
    run. It is written whether the sketch pays or not. Takes about draws × batches × (sketched
    layers) steps; --minutes, --no-split and --draws make it shorter.

    examples:
      sketchprop report                                   the paper's MLP, Tokens(0.3), random data
      sketchprop report --model vit --sketch 'Tokens(0.3)' --output vit.html
      sketchprop report --model mycode:make --sketch 'blocks.*=Tokens(0.3)' --batches 4 --draws 8
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
