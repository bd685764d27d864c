"""Small parts of the pages about rows: tables, pictures and where the figures come from."""

from __future__ import annotations

import csv
import io
import json
import math
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import sketchprop as sp
from sketchprop.core.stopwatch import cpu_name

from .methods import COLOURS
from .store import write_file

Cells = Sequence[Sequence[str]]


def markdown(header: Sequence[str], rows: Cells) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """The union of the keys as columns, in the order in which they appear."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: _short(v) for k, v in row.items()} for row in rows)
    return write_file(path, text.getvalue().encode())


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def write_json(path: Path, content: Any) -> Path:
    return write_file(path, (json.dumps(content, indent=1) + "\n").encode())


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_page(path: Path, parts: Iterable[str]) -> Path:
    return write_file(path, ("\n\n".join(part for part in parts if part) + "\n").encode())


def colour(name: str) -> tuple[float, ...]:
    return tuple(channel / 255 for channel in COLOURS[name])


def picture(
    folder: Path,
    name: str,
    panels: int,
    draw: Callable[[Sequence[Any]], None],
    size: tuple[float, float] = (5.0, 3.8),
) -> list[Path]:
    """``<folder>/<name>.{png,svg}``: panels side by side, the same file for the same results."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": name, "font.size": 8, "svg.fonttype": "none"}):
        canvas = Figure(figsize=(size[0] * panels, size[1]), layout="constrained")
        FigureCanvasAgg(canvas)
        draw(canvas.subplots(1, panels, squeeze=False)[0])
        written = []
        for suffix in ("png", "svg"):
            content = io.BytesIO()
            metadata = {"Date": None} if suffix == "svg" else None
            canvas.savefig(content, format=suffix, dpi=140, metadata=metadata)
            written.append(write_file(folder / f"{name}.{suffix}", content.getvalue()))
    return written


def dress(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=8)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, linewidth=0.4, alpha=0.6)


def made_on() -> dict[str, Any]:
    """What a figure depends on."""
    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "sketchprop": sp.__version__,
        "python": platform.python_version(),
    }


def stamp(command: str, machine: dict[str, Any]) -> str:
    return (
        f"Written by `{command}`; sketchprop {machine['sketchprop']}, torch {machine['torch']}, "
        f"{machine['cpu']}, threads: {machine['threads']}."
    )


def figure_text(value: float, digits: int = 3) -> str:
    """Three digits, without a power of ten where people would not write one."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.{digits}g}" if abs(value) < 1e5 else f"{value:.1e}"
