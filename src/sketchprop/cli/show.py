"""Tables for people (with rich where it is installed) and JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.table import table
from ..meters.measure import plain_data


def say(text: str = "") -> None:
    """A line on standard output."""
    sys.stdout.write(text + "\n")


def complain(text: str) -> None:
    """A line on standard error."""
    sys.stderr.write(f"sketchprop: {text}\n")


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Names and words to the left, numbers to the right."""
    columns = list(zip(*rows, strict=True))
    aligned = ["<" if i == 0 or _is_text(column) else ">" for i, column in enumerate(columns)]
    try:
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        say(f"{title}\n{table(header, rows, ''.join(aligned))}\n")
        return
    # In a file or a pipe nothing is known about the width: cutting cells would lose data.
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 240)
    pretty = Table(title=escape(title), box=box.SIMPLE_HEAVY, title_justify="left")
    for name, side in zip(header, aligned, strict=True):
        pretty.add_column(escape(name), justify="left" if side == "<" else "right")
    for row in rows:
        pretty.add_row(*map(escape, row))
    console.print(pretty)


def write_json(data: Any, target: str) -> None:
    """To a file, or to standard output for ``-``."""
    text = json.dumps(plain_data(data), indent=1, ensure_ascii=False, allow_nan=False)
    if target == "-":
        say(text)
    else:
        Path(target).write_text(text + "\n", encoding="utf-8")


def _is_text(column: Sequence[str]) -> bool:
    return not any(cell.strip()[:1].isdigit() or cell.startswith("-") for cell in column)
