"""The command ``sketchprop``: check, measure, plan, bench, report."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from ..data import DataError
from .arguments import parser
from .show import complain
from .specs import UsageError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 0: fine, 1: biased or does not pay, 2: it could not be run as typed."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(typed)
    options.arguments = typed
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        return int(options.run(options))
    except (UsageError, DataError, ValueError, TypeError) as error:
        if options.traceback:
            raise
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        complain(f"error: {error}{notes}")
        return 2
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe has seen enough
        return 0
