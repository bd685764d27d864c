"""``python -m experiments mnist --preset smoke --figure all``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .advise.study import ADVISE
from .amplification.study import AMPLIFICATION
from .cifar.study import STUDIES
from .depth.study import DEPTH
from .iso_flop.study import ISO_FLOP
from .lab import ExperimentError
from .mnist.study import MNIST
from .pay.study import PAY
from .redundancy.study import REDUNDANCY

COMMANDS = (MNIST, ISO_FLOP, AMPLIFICATION, DEPTH, REDUNDANCY, ADVISE, PAY)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        return code
    except ExperimentError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; give the same command again: it continues\n")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="EXPERIMENT")
    for study in COMMANDS:
        command = commands.add_parser(study.name, help=study.help)
        study.add_options(command)
        command.set_defaults(run=study.run)
    cifar = commands.add_parser("cifar", help=STUDIES["vit"].help)
    cifar.add_argument("--model", required=True, choices=sorted(STUDIES), help="what is trained")
    STUDIES["vit"].add_options(cifar)
    cifar.set_defaults(run=lambda options: STUDIES[options.model].run(options))
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
