"""Pages from templates, tables as files, and what a measurement depends on."""

from __future__ import annotations

import csv
import io
import json
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import sketchprop as sp
from sketchprop.core.stopwatch import cpu_name

from ..methods import METHODS
from . import ExperimentError
from .store import write_file

PAGE = "README.md"
TEMPLATE, DEFAULT = "page.md.jinja", "sweep.md.jinja"


def write_page(out: Path, templates: Path, facts: Mapping[str, Any]) -> Path:
    """``README.md`` from the folder's ``page.md.jinja``, or from the one of all sweeps."""
    made = Environment(
        loader=FileSystemLoader([templates, *Path(__file__).parents[:2]]),
        autoescape=False,  # Markdown, of numbers and of our own words
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"to": format, "text": number_text}
    made.globals |= {"table": table, "methods": METHODS}
    name = TEMPLATE if (templates / TEMPLATE).is_file() else DEFAULT
    return write_file(out / PAGE, made.get_template(name).render(facts).encode())


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def number_text(value: float, digits: int = 3) -> str:
    """Three digits, without a power of ten where people would not write one."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.{digits}g}" if abs(value) < 1e5 else f"{value:.1e}"


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], short: bool = True) -> Path:
    """The union of the keys as columns, in the order in which they appear."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: _short(v) if short else v for k, v in row.items()} for row in rows)
    return write_file(path, text.getvalue().encode())


def read_csv(path: Path) -> list[dict[str, str]]:
    """Its rows; none where there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def write_json(path: Path, content: Any) -> Path:
    return write_file(path, (json.dumps(content, indent=1) + "\n").encode())


def read_json(path: Path, default: Any = None) -> Any:
    """``default``, if there is one, where nothing was stored yet."""
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    if default is None:
        told = f"{path.parent} has no {path.name}; run the same command without --stored"
        raise ExperimentError(told)
    return default


def made_on() -> dict[str, Any]:
    """What a measured time depends on."""
    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "sketchprop": sp.__version__,
        "python": platform.python_version(),
    }
