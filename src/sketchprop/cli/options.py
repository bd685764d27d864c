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
A sketch makes the backward pass cheaper and random; the mean of the gradient stays exact. Begin
with `advise`: it says whether a sketch saves time on your model, and what to type.

  sketchprop advise --model vit --minutes 1     a built-in model on random data
  sketchprop advise --model mine:factory        your own: `sketchprop advise --help` shows how"""

CODES = """\
exit codes: 0 fine · 1 biased, or does not pay · 2 could not be run as typed ·
            3 failed on the way, for example in your model · 130 stopped by Ctrl-C"""

MINE = """\
your own model: type --model mine:factory, with this function in mine.py of the current folder

  def factory():
      model, batches = ...          # a torch.nn.Module; a list or a DataLoader; 32 are enough
      def loss_fn(model, batch):
          return ...                # a scalar
      return model, loss_fn, batches            # or these and your optimizer"""

_TASK = "--model --batch-size"
_TRAINING = "--steps --optimizer --learning-rate --batches"
_NOISE = f"{_TRAINING} --draws --no-split --rounds=7 --minutes"

COMMANDS: Mapping[Callable[..., int], str] = {
    run_advise: f"{_TASK} {_TRAINING}=32 --minutes=2 --same-batch --compile --trial",
    run_plan: f"{_TASK} --sketch --rounds=15",
    run_measure: f"{_TASK} --sketch {_NOISE}",
    run_report: f"{_TASK} --sketch {_NOISE} --output",
    run_check: "sketches --model --batch-size --draws --verbose",
}
"""What runs a command, and the options that it takes, in the order of use; ``--x=y`` sets a
default. The docstring is the command's help: what it answers, what it does, and examples."""


def parser() -> ArgumentParser:
    """The whole command line."""
    teaching: Any = {"formatter_class": RawDescriptionHelpFormatter}
    more = f"`sketchprop COMMAND --help` says more.\n\n{CODES}"
    top = ArgumentParser(prog="sketchprop", description=ABOUT, epilog=more, **teaching)
    top.add_argument("--version", action="version", version=f"sketchprop {__version__}")
    subparsers = top.add_subparsers(
        required=True, title="commands, in the order of use", metavar="COMMAND", dest="command"
    )
    for run, names in COMMANDS.items():
        text, name = cleandoc(run.__doc__ or ""), run.__name__.removeprefix("run_")
        must = "SKETCH ..." if names.startswith("sketches") else "--model MODEL"
        command = subparsers.add_parser(
            name,
            help=text.partition("\n")[0],
            usage=f"sketchprop {name} {must} [options]",
            description=f"`{name}` {text}\n\n{MINE}",
            epilog=CODES,
            **teaching,
        )
        for word in f"{names} --json --seed --traceback".split():
            option, _, default = word.partition("=")
            details = OPTIONS[option] | ({"default": default} if default else {})
            if isinstance(details.get("default"), str | int):
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
_OPTIONAL_FILE: Any = {**_FILE, "nargs": "?", "const": "-"}
_SKETCHES: Any = {"metavar": "SKETCH", "nargs": "+"}

OPTIONS: Mapping[str, dict[str, Any]] = {
    "sketches": _option(
        f"a sketch with its budget; built in: {', '.join(sketch_names())}; or module:Class(…)",
        **_SKETCHES,
    ),
    "--model": _option(
        f"your own as module:factory (see above), or {', '.join(MODELS)} on random data"
    ),
    "--batch-size": _option("the batch size of a built-in model", _positive, 128, metavar="SIZE"),
    "--sketch": _option(
        "the sketch to try (default: Tokens(0.3)); or PATTERN=SKETCH, several times, by layer",
        **{"default": ["Tokens(0.3)"], "dest": "sketches", **_SKETCHES},
    ),
    "--steps": _option("train exactly for so many steps, then measure", _natural, 0),
    "--batches": _option("measure on so many different batches", _positive, 8),
    "--draws": _option("take so many random draws for each batch", _positive),
    "--optimizer": _option(
        "the one you train with (default: the factory's, or sgd)",
        choices=list(OPTIMIZERS),
    ),
    "--learning-rate": _option("its rate (default: 0.1 for sgd, 0.001 for adam)", float),
    "--no-split": _switch("measure V in total, not by layer: much cheaper"),
    "--rounds": _option(
        "time so many pairs of steps; measure: with 0, FLOPs alone decide", _natural
    ),
    "--minutes": _option("measure for about so long, if there is a limit", float),
    "--same-batch": _switch("the batch size is fixed: do not compare with half of it"),
    "--compile": _switch("compile blocks, kept and exact ones, before they are compared"),
    "--trial": _option(
        "then train in turns for MINUTES (5): exact, as advised, half of each batch",
        **{"kind": float, "metavar": "MINUTES", "nargs": "?", "const": 5.0},
    ),
    "--output": _option("write the page to FILE", default="sketchprop-report.html", **_FILE),
    "--verbose": _switch("print unbiased cases, too"),
    "--json": _option("write JSON to FILE, or print it instead of tables", **_OPTIONAL_FILE),
    "--seed": _option("the random seed of models, data and draws", _natural, 0),
    "--traceback": _switch("show where an error comes from"),
}
"""As ``add_argument`` takes them."""
