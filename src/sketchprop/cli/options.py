"""The command line: every option once, and which of them each command takes."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping
from inspect import cleandoc
from typing import Any

from .._version import __version__
from .commands import run_advise, run_check, run_measure, run_plan, run_report
from .expressions import sketch_names
from .tasks import MODELS, OPTIMIZERS

ABOUT = """\
Sketches replace the exact backward of a layer by a cheaper random one with the right mean.
These commands say whether one is right, what it costs and whether it pays."""

CODES = """\
exit codes: 0 fine · 1 biased, or does not pay · 2 could not be run as typed ·
            3 failed on the way, for example in your model · 130 stopped by Ctrl-C"""

MINE = """\
--model mycode:make, a function of yours: make() returns (model, loss_fn, batches), or these and an
optimizer; loss_fn(model, batch) is a scalar; of batches, a list or a loader, the first are taken"""

_TASK = "--model=mlp --batch-size"
_TRAINING = "--steps --optimizer --learning-rate --batches"
_NOISE = f"{_TRAINING} --draws --no-split --rounds=7 --minutes"

COMMANDS: Mapping[Callable[..., int], str] = {
    run_advise: f"{_TASK} {_TRAINING} --minutes=2 --same-batch --compile --trial",
    run_check: "sketches --model --batch-size --draws --verbose",
    run_measure: f"{_TASK} --sketch {_NOISE}",
    run_plan: f"{_TASK} --sketch --rounds=15",
    run_report: f"{_TASK} --sketch {_NOISE} --output",
}
"""What runs a command, and the options that it takes; ``--x=y`` sets a default. The docstring is
the command's help: its question, what it does, and examples."""


def parser() -> ArgumentParser:
    """The whole command line."""
    teaching: Any = {"formatter_class": RawDescriptionHelpFormatter}
    more = f"sketchprop COMMAND --help says more.\n{CODES}"
    top = ArgumentParser(prog="sketchprop", description=ABOUT, epilog=more, **teaching)
    top.add_argument("--version", action="version", version=f"sketchprop {__version__}")
    subparsers = top.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for run, names in COMMANDS.items():
        question, _, text = cleandoc(run.__doc__ or "").partition("\n\n")
        about, _, examples = text.partition("examples:\n")
        command = subparsers.add_parser(
            run.__name__.removeprefix("run_"),
            help=question,
            description=f"{question}\n\n{about}",
            epilog=f"examples:\n{examples}\n\n{MINE}\n\n{CODES}",
            **teaching,
        )
        for name in f"{names} --json --seed --traceback".split():
            option, _, default = name.partition("=")
            details = OPTIONS[option] | ({"default": default} if default else {})
            if details.get("default") is not None:
                details["help"] += " (default: %(default)s)"
            command.add_argument(option, **details)
        command.set_defaults(run=run)
    return top


def _number_from(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"{text!r} is not a number from {least} on")
        return int(text)

    return number


_natural, _positive = _number_from(0), _number_from(1)


def _option(text: str, kind: Any = None, default: Any = None, **details: Any) -> dict[str, Any]:
    return {"help": text, "type": kind, "default": default, **details}


def _switch(text: str) -> dict[str, Any]:
    return {"help": text, "action": "store_true"}


_FILE: Any = {"metavar": "FILE"}
_SKETCHES: Any = {"metavar": "SKETCH", "nargs": "+"}

OPTIONS: Mapping[str, dict[str, Any]] = {
    "sketches": _option(
        f"with a budget; built in: {', '.join(sketch_names())}; or module:Class(…)", **_SKETCHES
    ),
    "--model": _option(f"{', '.join(MODELS)} on random data, or module:factory of yours"),
    "--batch-size": _option("of built-in models", _positive, 128),
    "--sketch": _option(
        "which; of Tokens single layers take the rows; or PATTERN=SKETCH, several times, for "
        "layers by name",
        default=["Tokens(0.3)"],
        dest="sketches",
        **_SKETCHES,
    ),
    "--steps": _option("train exactly for so many first, on top of --minutes", _natural, 0),
    "--batches": _option("how many different ones to measure on", _positive, 8),
    "--draws": _option("Monte Carlo draws, for each batch", _positive),
    "--optimizer": _option(
        "of training; advise counts noise and time as with it, others noise as with sgd (sgd, or "
        "the factory's)",
        choices=list(OPTIMIZERS),
    ),
    "--learning-rate": _option("of --steps and --trial (0.1 for sgd, 0.001 for adam)", float),
    "--no-split": _switch("only the total V: much cheaper"),
    "--rounds": _option("pairs to time; 0, where FLOPs can give the verdict alone", _natural),
    "--minutes": _option("about how long measuring may take, if there is a limit", float),
    "--same-batch": _switch("the batch is given: do not try half of it"),
    "--compile": _switch("kept tokens, compiled, against compiled exact blocks"),
    "--trial": _option(
        "then train exact, advised and with half of each batch in turns (%(const)s minutes)",
        float,
        nargs="?",
        const=5.0,
        metavar="MINUTES",
    ),
    "--output": _option("where the page goes", default="sketchprop-report.html", **_FILE),
    "--verbose": _switch("show what is unbiased too"),
    "--json": _option(
        "the whole report as JSON, to FILE, or instead of the tables", nargs="?", const="-", **_FILE
    ),
    "--seed": _option("of models, data and draws", _natural, 0),
    "--traceback": _switch("show where an error comes from"),
}
"""As ``add_argument`` takes them."""
