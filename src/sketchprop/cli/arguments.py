"""The command line, and the help that teaches it."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from typing import Any, NamedTuple

from .._version import __version__
from .commands import run_advise, run_bench, run_check, run_measure, run_plan, run_report
from .specs import MODELS, OPTIMIZERS, sketch_names

ABOUT = """\
Sketches replace the exact backward of a layer by a cheaper random one with the right mean.
These commands say whether one is right, what it costs and whether it pays:

  advise    what to type for this model, or to stay exact, and why
  check     is the mean of a sketched gradient the exact gradient?
  measure   how much variance does it add, where, and is that worth the time it saves?
  plan      which layers of a model are worth sketching on this machine?
  bench     how long does one linear layer's backward take, exact and sketched?
  report    plan and measure, with plots, as one HTML page
"""

CODES = """\
exit codes: 0 fine · 1 biased, or does not pay · 2 could not be run as typed ·
            3 failed on the way, for example in your model · 130 stopped by Ctrl-C"""

CHECK = """\
Compares the mean of dX, dW and db with the exact gradient on layers of hard shapes and contents.
The mean is exact, a finite sum over the breakpoints of the draw; with --draws, or on a whole
model, it is a Monte Carlo mean and deviations are counted in standard errors. Shown are the
verdict and what is biased; --verbose shows every line.
"""
CHECK_EXAMPLES = f"""\
examples:
  sketchprop check 'L1(0.1)' 'Diagonal(0.2)'
  sketchprop check 'Diagonal(0.2, paper=True)'     the paper's formula, taken literally: biased
  sketchprop check mycode:MySketch(0.2)            a sketch of your own
  sketchprop check 'L1(0.5)' --model vit --draws 300

{CODES}"""

MEASURE = """\
Measures σ², the variance of the minibatch gradient, and V, what the sketches add to it: in total,
by the layer that injected it, and at each node as the sum of its local and its propagated term
(Prop. 2.2). SGD needs ∝ ‖g‖² + σ² + V steps, g the mean gradient, so with ρ the cost of a step a
sketch pays if ρ(V)(‖g‖² + σ² + V) ≤ ρ(0)(‖g‖² + σ²). The answer is given by measured time and
by FLOPs.
"""
MEASURE_EXAMPLES = f"""\
examples:
  sketchprop measure --model vit --sketch 'Tokens(0.3)'
  sketchprop measure --model vit --sketch 'blocks.*.mlp.*=Rows(0.3)' --draws 16 --plot v.png
  sketchprop measure --model mycode:make --sketch 'Tokens(0.2)' --json report.json
      make() returns (model, loss_fn, batches); loss_fn(model, batch) is a scalar; of batches, a
      list or a loader, as many as --batches are taken
  sketchprop measure --model mlp --location --sketch 'L1(0.1)' 'ColumnMask(0.1)' --plot location.png
      V with only the first, only the last, or every layer sketched

{CODES}"""

ADVISE = """\
Tries what fits the model: kept tokens, rows by token, whole samples, columns, and half of the
batch as the control. For each it takes the time of a step, in turns with exact ones, and the noise
that it adds; what counts is the time to equal quality. Says first what to paste, or to stay exact.
Noise changes while a model trains: --steps 200 asks after so many.
"""
ADVISE_EXAMPLES = f"""\
examples:
  sketchprop advise --model vit --steps 50 --optimizer adamw --minutes 1
  sketchprop advise --model mycode:make --minutes 5 --json advice.json
      make() returns (model, loss_fn, batches), or (model, loss_fn, batches, optimizer);
      loss_fn(model, batch) is a scalar
  sketchprop advise --model vit --trial 3 --plot losses.png

{CODES} (here: 1 for 'stay exact')"""

PLAN = """\
Times the backward of each layer on this machine, alone and at the shapes it has in the model,
exact and sketched. Says which layers get faster, by how much, and below which kept fraction.
"""
PLAN_EXAMPLES = f"""\
examples:
  sketchprop plan --model vit
  sketchprop plan --model mycode:make --sketch 'Rows(0.3)' --plot plan.png
      make() returns (model, loss_fn, batches)

{CODES} (here: 1 if no layer gets faster)"""

BENCH = """\
The backward of one linear layer with bias, B rows, d inputs, n outputs: exact and sketched are
timed in turns, and the ratio is the median over pairs.
"""
BENCH_EXAMPLES = f"""\
examples:
  sketchprop bench 128x1024x1024 2048x768x3072 --sketch 'Rows(0.3)' 'L1(0.1)'

{CODES} (here: 1 if nothing is faster than exact)"""

REPORT = """\
Plans and measures one model with one batch size, and writes one HTML page: does it pay, how much
time, memory and variance; then layer by layer, with plots; then how it was measured. The page
needs no network and no script: send it to a colleague, or keep it beside the training run.
"""
REPORT_EXAMPLES = f"""\
examples:
  sketchprop report                                       the paper's MLP, Tokens(0.3), random data
  sketchprop report --model vit --sketch 'Tokens(0.3)' --output vit.html
  sketchprop report --model mycode:make --sketch 'blocks.*=Tokens(0.3)' --batches 4 --draws 8
      make() returns (model, loss_fn, batches); loss_fn(model, batch) is a scalar

Takes about draws × batches × (sketched layers) steps; --minutes, --no-split and --draws make it
shorter.

{CODES} (the page is written in both cases)"""


class Command(NamedTuple):
    """A command, its help, and which of the options below it takes; ``--x=y`` sets a default."""

    run: Any
    short: str
    about: str
    examples: str
    options: str


_TASK = "--model=mlp --batch-size --device"
_TRAINED = "--steps --optimizer --learning-rate --batches"
_MODEL = f"{_TASK} --sketch"
_TRIED = f"{_MODEL} --planner"
_EFFORT = f"{_TRAINED} --draws --no-split --rounds=7 --overhead --minutes"
_CHECK_OPTIONS = "sketches --planner --model --batch-size --device --draws --verbose"
_MEASURE_OPTIONS = f"{_TRIED} {_EFFORT} --location --budgets --plot"
_ADVISE_OPTIONS = f"{_TASK} {_TRAINED} --minutes=2 --same-batch --trial --plot"
_PLAN_OPTIONS = f"{_MODEL} --rounds=15 --plot"
_BENCH_OPTIONS = "shapes --sketch --rounds=15 --device --plot"
_REPORT_OPTIONS = f"{_TRIED} --output --title {_EFFORT}"

COMMANDS = (
    Command(run_advise, "what should I type?", ADVISE, ADVISE_EXAMPLES, _ADVISE_OPTIONS),
    Command(run_check, "is it unbiased?", CHECK, CHECK_EXAMPLES, _CHECK_OPTIONS),
    Command(run_measure, "does it pay?", MEASURE, MEASURE_EXAMPLES, _MEASURE_OPTIONS),
    Command(run_plan, "which layers are worth it?", PLAN, PLAN_EXAMPLES, _PLAN_OPTIONS),
    Command(run_bench, "how fast is one layer?", BENCH, BENCH_EXAMPLES, _BENCH_OPTIONS),
    Command(run_report, "all of it as one HTML page", REPORT, REPORT_EXAMPLES, _REPORT_OPTIONS),
)


def parser() -> ArgumentParser:
    """The whole command line."""
    top = ArgumentParser(
        prog="sketchprop",
        description=ABOUT,
        epilog=f"sketchprop COMMAND --help says more.\n{CODES}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"sketchprop {__version__}")
    subparsers = top.add_subparsers(required=True, metavar="COMMAND", dest="command")
    options = _options()
    for command in COMMANDS:
        p = subparsers.add_parser(
            command.run.__name__.removeprefix("run_"),
            help=command.short,
            description=command.about,
            epilog=command.examples,
            formatter_class=RawDescriptionHelpFormatter,
        )
        for given in f"{command.options} --json --threads --seed --traceback".split():
            option, _, default = given.partition("=")
            chosen = {"default": default} if default else {}
            p.add_argument(option, **{**options[option], **chosen})
        p.set_defaults(run=command.run)
    return top


def _options() -> dict[str, dict[str, Any]]:
    """Every option once, as ``add_argument`` takes it."""
    built_in = ", ".join(sketch_names())
    several = {"nargs": "+", "metavar": "SKETCH"}
    on = {"action": "store_true"}
    by_name = "or PATTERN=SKETCH, several times, for layers by name"
    nothing_timed = "0, where a verdict can do without: by FLOPs"
    factory = f"{', '.join(MODELS)}, or module:factory of yours"
    return {
        "sketches": _text(f"with a budget; built in: {built_in}; or module:Class(…)", **several),
        "shapes": _text("rows x inputs x outputs", nargs="+", type=_shape, metavar="BxDxN"),
        "--model": _text(f"{factory} (default: %(default)s)"),
        "--batch-size": _value(
            128, "of built-in models' batches, which are random", type=_positive
        ),
        "--sketch": _value(
            ["Tokens(0.3)"],
            f"which; of Tokens single layers take the rows; {by_name}",
            dest="sketches",
            **several,
        ),
        "--planner": _text("who makes the atoms: Every(50), Fresh(rows=0.1), or module:Class(…)"),
        "--steps": _value(
            [0],
            "train exactly for N first, on top of --minutes",
            type=_natural,
            nargs="+",
            metavar="N",
        ),
        "--batches": _value(8, "how many different ones to measure on", type=_positive),
        "--draws": _text("Monte Carlo draws, for each batch", type=_positive),
        "--optimizer": _text(
            f"of training; advise counts noise and time as with it, others noise as with sgd: "
            f"{', '.join(OPTIMIZERS)} (sgd, or the factory's own)",
            choices=list(OPTIMIZERS),
        ),
        "--learning-rate": _text(
            "of --steps and --trial (0.1 for sgd, 0.001 for adam)", type=float
        ),
        "--no-split": _text("only the total V: much cheaper", **on),
        "--rounds": _text(f"pairs to time (default: %(default)s); {nothing_timed}", type=_natural),
        "--overhead": _value(
            0.0,
            "milliseconds of a step outside forward and backward (optimizer, data)",
            type=float,
            metavar="MS",
        ),
        "--minutes": _text(
            "about how long measuring may take (advise: 2; else as long as it takes)", type=float
        ),
        "--location": _text("compare the first layer, the last, and all, at each of --steps", **on),
        "--budgets": _value(
            [0.05, 0.1, 0.2, 0.5], "kept fractions for --location", type=float, nargs="+"
        ),
        "--device": _text("where: cpu, cuda, mps (the factory's own, or cpu)"),
        "--same-batch": _text("the batch is given: do not try half of it", **on),
        "--trial": _text(
            "then train exact, advised and with half of each batch in turns (%(const)s minutes)",
            nargs="?",
            const=5.0,
            type=float,
            metavar="MINUTES",
        ),
        "--plot": _text("a picture: .png, .pdf or .svg", metavar="FILE"),
        "--output": _value("sketchprop-report.html", "where the page goes", metavar="FILE"),
        "--title": _text("the page's heading (the model's name)"),
        "--verbose": _text("show what is unbiased too", **on),
        "--json": _text(
            "the whole report as JSON, to FILE, or instead of the tables",
            nargs="?",
            const="-",
            metavar="FILE",
        ),
        "--threads": _text("limit torch to this many threads", type=_positive),
        "--seed": _value(0, "of models, data and draws", type=_natural),
        "--traceback": _text("show where an error comes from", **on),
    }


def _text(text: str, **options: Any) -> dict[str, Any]:
    return {"help": text, **options}


def _value(default: Any, text: str, **options: Any) -> dict[str, Any]:
    return {"default": default, "help": f"{text} (default: %(default)s)", **options}


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _shape(text: str) -> tuple[int, int, int]:
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ArgumentTypeError(f"{text!r} is not a shape; type for example 128x784x64")
    B, d, n = map(int, parts)
    return B, d, n
