"""The command line, and the help that teaches it."""

from __future__ import annotations

from argparse import (
    ArgumentParser,
    ArgumentTypeError,
    RawDescriptionHelpFormatter,
    _SubParsersAction,
)

from .._version import __version__
from . import commands, report
from .specs import MODELS, sketch_names

ABOUT = """\
Sketches replace the exact backward of a layer by a cheaper random one with the right mean.
These commands say whether one is right, what it costs and whether it pays:

  check     is the mean of a sketched gradient the exact gradient?
  measure   how much variance does it add, where, and is that worth the time it saves?
  plan      which layers of a model are worth sketching on this machine?
  bench     how long does one linear layer's backward take, exact and sketched?
  report    plan and measure, with plots, as one HTML page
"""

CODES = "exit codes: 0 fine · 1 biased, or does not pay · 2 could not be run as typed"

CHECK = """\
Compares the mean of dX, dW and db with the exact gradient on layers of hard shapes and contents.
The mean is exact, a finite sum over the breakpoints of the draw; with --draws, or on a whole
model, it is a Monte Carlo mean and deviations are counted in standard errors.
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
(Prop. 2.2). SGD needs ∝ σ² + V steps, so with ρ the cost of a step a sketch pays if
ρ(V)(σ² + V) ≤ ρ(0)σ². The answer is given by measured time and by FLOPs.
"""
MEASURE_EXAMPLES = f"""\
examples:
  sketchprop measure --model mlp --sketch 'L1(0.1)'
  sketchprop measure --model vit --sketch 'blocks.*.mlp.*=L1(0.3)' --draws 16 --plot v.png
  sketchprop measure --model mycode:make --sketch 'L1(0.2)' --json report.json
      make() returns (model, loss_fn, batches); loss_fn(model, batch) is a scalar
  sketchprop measure --model mlp --data mnist --steps 469 --sketch 'L1(0.1)'
  sketchprop measure --model mlp --data mnist --location --steps 0 469 \\
      --sketch 'L1(0.1)' 'ColumnMask(0.1)' --plot location.png
      V with only the first, only the last, or every layer sketched

{CODES}"""

PLAN = """\
Times the backward of each layer on this machine, alone and at the shapes it has in the model,
exact and sketched. Says which layers get faster, by how much, and below which kept fraction.
"""
PLAN_EXAMPLES = f"""\
examples:
  sketchprop plan --model vit
  sketchprop plan --model mycode:make --sketch 'L1(0.25)' --plot plan.png
      make() returns (model, loss_fn, batches)

{CODES} (here: 1 if no layer gets faster)"""

BENCH = """\
The backward of one linear layer with bias, B rows, d inputs, n outputs: exact and sketched are
timed in turns, and the ratio is the median over pairs.
"""
BENCH_EXAMPLES = f"""\
examples:
  sketchprop bench 128x1024x1024 2048x768x3072 --sketch 'L1(0.1)' 'GradientSVD(0.1)'

{CODES} (here: 1 if nothing is faster than exact)"""

REPORT = """\
Plans and measures one model with one batch size, and writes one HTML page: does it pay, how much
time, memory and variance; then layer by layer, with plots; then how it was measured. The page
needs no network and no script: send it to a colleague, or keep it beside the training run.
"""
REPORT_EXAMPLES = f"""\
examples:
  sketchprop report                                       the paper's MLP, L1(0.1), random data
  sketchprop report --model vit --sketch 'Rows(0.3)' --output vit.html
  sketchprop report --model mycode:make --sketch 'blocks.*=L1(0.3)' --batches 4 --draws 8
      make() returns (model, loss_fn, batches); loss_fn(model, batch) is a scalar
  sketchprop report --data mnist --steps 469 --sketch 'L1(0.1)'

Takes about draws × batches × (sketched layers) steps; --no-split and --draws make it shorter.

{CODES} (the page is written in both cases)"""


def parser() -> ArgumentParser:
    """The whole command line."""
    top = ArgumentParser(
        prog="sketchprop",
        description=ABOUT,
        epilog=f"sketchprop COMMAND --help says more.\n{CODES}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"sketchprop {__version__}")
    commands_of = top.add_subparsers(required=True, metavar="COMMAND", dest="command")
    _check(commands_of)
    _measure(commands_of)
    _plan(commands_of)
    _bench(commands_of)
    _report(commands_of)
    return top


def _check(commands_of: _SubParsersAction[ArgumentParser]) -> None:
    p = _command(commands_of, "check", "is it unbiased?", CHECK, CHECK_EXAMPLES)
    names = ", ".join(sketch_names())
    p.add_argument(
        "sketches",
        nargs="+",
        metavar="SKETCH",
        help=f"a sketch with its budget; built in: {names}; or module:Class(…)",
    )
    _model(p, default=None)
    p.add_argument("--draws", type=_positive, help="Monte Carlo with this many draws")
    p.set_defaults(run=commands.run_check)


def _measure(commands_of: _SubParsersAction[ArgumentParser]) -> None:
    p = _command(commands_of, "measure", "does it pay?", MEASURE, MEASURE_EXAMPLES)
    _model(p, default="mlp")
    _sketch(p, "or PATTERN=SKETCH, several times, for layers by name")
    p.add_argument(
        "--steps",
        type=_natural,
        nargs="+",
        default=[0],
        metavar="N",
        help="train exactly for N steps first (default: 0); with --location, stop at each N",
    )
    _effort(p)
    p.add_argument(
        "--location", action="store_true", help="compare the first layer, the last, and all"
    )
    p.add_argument(
        "--budgets",
        type=float,
        nargs="+",
        default=[0.05, 0.1, 0.2, 0.5],
        help="kept fractions for --location (default: %(default)s)",
    )
    _plot(p)
    p.set_defaults(run=commands.run_measure)


def _plan(commands_of: _SubParsersAction[ArgumentParser]) -> None:
    p = _command(commands_of, "plan", "which layers are worth it?", PLAN, PLAN_EXAMPLES)
    _model(p, default="mlp")
    _sketch(p, "the one to try")
    _rounds(p)
    _plot(p)
    p.set_defaults(run=commands.run_plan)


def _bench(commands_of: _SubParsersAction[ArgumentParser]) -> None:
    p = _command(commands_of, "bench", "how fast is one layer?", BENCH, BENCH_EXAMPLES)
    p.add_argument(
        "shapes", nargs="+", type=_shape, metavar="BxDxN", help="rows x inputs x outputs"
    )
    _sketch(p, "one or more")
    _rounds(p)
    p.add_argument("--device", default="cpu", help="where (default: %(default)s)")
    _plot(p)
    p.set_defaults(run=commands.run_bench)


def _report(commands_of: _SubParsersAction[ArgumentParser]) -> None:
    p = _command(commands_of, "report", "all of it as one HTML page", REPORT, REPORT_EXAMPLES)
    _model(p, default="mlp")
    _sketch(p, "or PATTERN=SKETCH, several times, for layers by name")
    p.add_argument(
        "--output",
        default="sketchprop-report.html",
        metavar="FILE",
        help="where the page goes (default: %(default)s)",
    )
    p.add_argument("--title", help="the page's heading (default: the model's name)")
    p.add_argument(
        "--steps",
        type=_natural,
        default=0,
        metavar="N",
        help="train exactly for N steps first (default: %(default)s)",
    )
    _effort(p)
    p.set_defaults(run=report.run_report)


def _effort(p: ArgumentParser) -> None:
    p.add_argument("--batches", type=_positive, default=8, help="how many (default: %(default)s)")
    p.add_argument("--draws", type=_positive, help="for each batch (default: a pilot chooses)")
    p.add_argument(
        "--learning-rate", type=float, default=0.1, help="of --steps (default: %(default)s)"
    )
    p.add_argument("--no-split", action="store_true", help="only the total V: much cheaper")
    p.add_argument(
        "--rounds",
        type=_natural,
        default=7,
        help="pairs of steps to time (default: %(default)s); 0: judge by FLOPs",
    )
    p.add_argument(
        "--overhead",
        type=float,
        default=0.0,
        metavar="MS",
        help="milliseconds of a step outside forward and backward (optimizer, data)",
    )


def _command(
    commands_of: _SubParsersAction[ArgumentParser], name: str, short: str, about: str, examples: str
) -> ArgumentParser:
    p = commands_of.add_parser(
        name,
        help=short,
        description=about,
        epilog=examples,
        formatter_class=RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="the whole report as JSON, to FILE, or instead of the tables",
    )
    p.add_argument("--threads", type=_positive, help="limit torch to this many threads")
    p.add_argument("--seed", type=_natural, default=0, help="default: %(default)s")
    p.add_argument("--traceback", action="store_true", help="show where an error comes from")
    return p


def _model(p: ArgumentParser, default: str | None) -> None:
    known = ", ".join(MODELS)
    p.add_argument(
        "--model",
        default=default,
        help=f"{known}, or module:factory of yours" + (f" (default: {default})" if default else ""),
    )
    p.add_argument(
        "--data",
        choices=["random", "mnist"],
        default="random",
        help="for built-in models; mnist is looked for in $SKETCHPROP_DATA (default: %(default)s)",
    )
    p.add_argument("--batch-size", type=_positive, default=128, help="default: %(default)s")


def _sketch(p: ArgumentParser, more: str) -> None:
    p.add_argument(
        "--sketch",
        dest="sketches",
        nargs="+",
        default=["L1(0.1)"],
        metavar="SKETCH",
        help=f"for example 'L1(0.1)' (the default); {more}",
    )


def _rounds(p: ArgumentParser) -> None:
    p.add_argument(
        "--rounds", type=_positive, default=15, help="repetitions (default: %(default)s)"
    )


def _plot(p: ArgumentParser) -> None:
    p.add_argument("--plot", metavar="FILE", help="a picture: .png, .pdf or .svg")


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
