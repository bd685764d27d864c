"""The command ``sketchprop``: advise, check, measure, plan, report."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ..report.pictures import require_matplotlib
from .commands import CRASH, FINE, STOPPED, USAGE
from .expressions import UsageError
from .options import parser
from .show import complain

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 0: fine, 1: biased or does not pay, 2: it could not be run as typed,
    3: something else failed on the way, 130: Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    options.words = words
    try:
        _check_files(options)
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
        if isinstance(error, ValueError | TypeError | ImportError):
            complain(f"error: {error}{notes}")
            return USAGE
        kind = type(error).__name__
        complain(f"failed with {kind}: {error}{notes}; --traceback shows where")
        return CRASH


def _check_files(options: Namespace) -> None:
    """Before minutes of work: whether its results can be written."""
    for name in ("json", "output"):
        path = getattr(options, name, None)
        if path and path != "-" and not Path(path).parent.is_dir():
            folder = str(Path(path).parent)
            raise UsageError(f"--{name} {path}: there is no folder {folder!r}")
    if options.command == "report":
        require_matplotlib()
