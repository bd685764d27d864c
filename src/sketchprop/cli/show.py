"""Reports for people (with rich where it is installed), JSON for programs, progress for both."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from ..core.table import Table
from ..meters.words import plain_data


def say(text: str = "") -> None:
    """A line on standard output."""
    sys.stdout.write(text + "\n")


def complain(text: str) -> None:
    """A line on standard error."""
    sys.stderr.write(f"sketchprop: {text}\n")


def show(headline: str, tables: Iterable[Table]) -> None:
    """The answer first, then every table that has rows."""
    if headline:
        say(headline + "\n")
    for table in tables:
        if table.rows:
            _show_table(table)


def _show_table(table: Table) -> None:
    try:
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table as Pretty
    except ImportError:
        say(f"{table}\n")
        return
    # In a file or a pipe nothing is known about the width: cutting cells would lose data.
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 240)
    pretty = Pretty(box=box.SIMPLE_HEAVY)
    for column in table.columns:
        pretty.add_column(escape(column.title), justify="left" if column.align == "<" else "right")
    for row in table.cells():
        pretty.add_row(*map(escape, row))
    for text in (table.title, table.note):
        if text:
            console.print(escape(text), highlight=False)
    console.print(pretty)


def write_json(data: Any, target: str) -> None:
    """To a file, or to standard output for ``-``."""
    text = json.dumps(plain_data(data), indent=1, ensure_ascii=False, allow_nan=False)
    if target == "-":
        say(text)
    else:
        Path(target).write_text(text + "\n", encoding="utf-8")


class Progress:
    """What is being done and how long it will take: one line that is redrawn on a terminal, and
    a line now and then anywhere else."""

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
            left = (now - self._start) * (1 - done) / done
            self._draw(f": {100 * done:.0f} %, {left:.0f} s left")

    def clear(self) -> None:
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _draw(self, detail: str) -> None:
        self._drawn = monotonic()
        text = self._stage + detail
        self._stream.write(f"\r\x1b[K{text}" if self._live else f"sketchprop: {text}\n")
        self._stream.flush()


@contextmanager
def progress() -> Iterator[Progress]:
    """A line that is gone when the work is done, or has failed."""
    line = Progress(sys.stderr)
    try:
        yield line
    finally:
        line.clear()
