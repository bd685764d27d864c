"""The command ``sketchprop``: advise, check, measure, plan, bench, report."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from .arguments import parser
from .commands import CRASH, FINE, STOPPED, USAGE
from .plots import check_pictures
from .show import complain
from .specs import UsageError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 0: fine, 1: biased or does not pay, 2: it could not be run as typed,
    3: something else failed on the way, 130: Ctrl-C."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(typed)
    options.arguments = typed
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        _check_targets(options)
        return int(options.run(options))
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe has seen enough
        return FINE
    except KeyboardInterrupt:
        complain("stopped")
        return STOPPED
    except Exception as error:
        if options.traceback:
            raise
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        if isinstance(error, UsageError | ValueError | TypeError | ImportError):
            complain(f"error: {error}{notes}")
            return USAGE
        kind = type(error).__name__
        complain(f"failed with {kind}: {error}{notes}; --traceback shows where")
        return CRASH


def _check_targets(options: Namespace) -> None:
    """Before minutes of work: whether its results can be written."""
    for name in ("json", "plot", "output"):
        target = getattr(options, name, None)
        if target and target != "-":
            folder = Path(target).parent
            if not folder.is_dir():
                raise UsageError(f"--{name} {target}: there is no folder {str(folder)!r}")
    if getattr(options, "plot", None):
        check_pictures()
