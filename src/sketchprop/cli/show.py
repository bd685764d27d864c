"""Text for people, JSON for programs, progress for both."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import monotonic
from typing import Any

from ..core.table import plain_data


def say(text: str = "") -> None:
    """A line on standard output."""
    sys.stdout.write(text + "\n")


def complain(text: str) -> None:
    """A line on standard error."""
    sys.stderr.write(f"sketchprop: {text}\n")


def write_json(data: Any, target: str) -> None:
    """To a file, or to standard output for ``-``."""
    text = json.dumps(plain_data(data), indent=1, ensure_ascii=False, allow_nan=False)
    if target == "-":
        say(text)
    else:
        Path(target).write_text(text + "\n", encoding="utf-8")


class Progress:
    """What is being done and how long it will take: one line that is redrawn on a terminal, and
    a line now and then anywhere else; gone when the work is done, or has failed."""

    def __init__(self, stream: Any, redraw: float = 0.2, repeat: float = 10.0) -> None:
        self._stream, self._live = stream, stream.isatty()
        self._every = redraw if self._live else repeat
        self._stage = ""
        self._start = self._drawn = monotonic()

    def stage(self, name: str) -> None:
        self._stage, self._start = name, monotonic()
        if self._live:
            self._draw("")

    def share(self, done: float) -> None:
        """``done`` of this stage, from 0 to 1."""
        now = monotonic()
        if now - self._drawn >= self._every and done > 0:
            seconds = (now - self._start) * (1 - done) / done
            self._draw(f": {100 * done:.0f} %, {seconds:.0f} s left")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _draw(self, detail: str) -> None:
        self._drawn = monotonic()
        text = self._stage + detail
        self._stream.write(f"\r\x1b[K{text}" if self._live else f"sketchprop: {text}\n")
        self._stream.flush()
