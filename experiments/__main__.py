"""``python -m experiments mnist --preset smoke --figure all``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sketchprop.data import DataError

from . import rcs_study
from .cifar_study import STUDIES
from .command import add_options, run_study
from .methods import ExperimentError
from .mnist_study import MNIST, figures_named
from .rows_commands import add_commands

FIGURE_NAMES = ("1a", "1b", "2a", "2b", "location", "all")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        return code
    except (ExperimentError, DataError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; give the same command again: it continues\n")
        return 130


def _mnist(options: argparse.Namespace) -> int:
    names = figures_named(options.figure, options.no_clip)
    return run_study(MNIST, options, names, extras=options.figure == "all")


def _cifar(options: argparse.Namespace) -> int:
    study = STUDIES[options.model]
    return run_study(study, options, list(study.figures), extras=options.figure == "all")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="EXPERIMENT")
    mnist = commands.add_parser("mnist", help="the paper's MLP study on MNIST")
    add_options(mnist, MNIST.name, FIGURE_NAMES)
    mnist.add_argument("--no-clip", action="store_true", help="figure 2b without gradient clipping")
    mnist.set_defaults(run=_mnist)
    cifar = commands.add_parser("cifar", help="the paper's BagNet-17 and transformer on CIFAR-10")
    cifar.add_argument("--model", required=True, choices=sorted(STUDIES), help="what is trained")
    add_options(cifar, "cifar-MODEL", ("cifar", "all"))
    cifar.set_defaults(run=_cifar)
    rcs = commands.add_parser("rcs", help="is the bias of dW why RCS does not dominate?")
    add_options(rcs, "rcs", ("rcs", "all"))
    rcs.set_defaults(run=rcs_study.run)
    add_commands(commands)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
