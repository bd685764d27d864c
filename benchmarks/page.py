"""docs/results/speed.md and memory.md from the stored results: python -m benchmarks page"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from . import limits, peak
from .results import FOLDER

CLONE = Path(__file__).parents[1]
PAGE = CLONE / "docs" / "results" / "speed.md"
HEAD = """# Speed, measured

Written by `python -m benchmarks page` from `benchmarks/results/`. Every figure is a time over the
exact one: exact, sketched and floor run in turns, in random order, in one process, under the same
allocator settings; medians of the ratios within a round, with their quartiles. The floor is the
two reduced products of a column sketch alone, their factors at hand. A **bold** ratio misses the
target that was set for it.

The order matters on small layers. Here all forward passes of a round come before its backward
passes, so that a backward follows another one, as in a network. Right behind a forward pass, with
cold caches, sketched passes take a larger share, which the lines 'right behind its
forward' show. Ratios close to their target lie within the spread of it.

"""


def write_page() -> Path:
    parts, peaks, memory = [HEAD], [], []
    for path in sorted(FOLDER.glob("*.json")):
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not str(stored.get("command", "")).startswith("python -m benchmarks "):
            continue
        if path.stem.startswith("peak"):
            peaks.append(stored)
            continue
        if path.stem.startswith("limits"):
            memory += [limits.section(stored, PAGE.parent)] if "rows" in stored else []
            continue
        parts.append(_section(path, stored))
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.with_name("memory.md").write_text(peak.page(peaks, memory), encoding="utf-8")
    for picture in FOLDER.glob("*.png"):
        shutil.copy(picture, PAGE.parent / picture.name)
    PAGE.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
    return PAGE


def _section(path: Path, stored: dict[str, Any]) -> str:
    machine = stored["machine"]
    lines = [f"## {path.stem.replace('-', ', ', 1).replace('-', ' ')}", ""]
    lines.append(
        f"`{stored['command']}` on {machine['cpu']}, torch {machine['torch']}, "
        f"{machine['allocator']} allocator, {stored['when'][:10]}."
    )
    lines.append("")
    if stored["lines"]:
        lines += ["| case | method | kept | ratio | quartiles | floor | target |"]
        lines += ["|---|---|---|---|---|---|---|"]
        lines += [_row(line) for line in stored["lines"]]
    for row in stored.get("rows", [])[:1]:
        lines += ["| " + " | ".join(row) + " |", "|---" * len(row) + "|"]
    for row in stored.get("rows", []):
        cells = [f"{v:,.4g}" if isinstance(v, float) else f"{v}" for v in row.values()]
        lines.append("| " + " | ".join(cells) + " |")
    known = {"command", "when", "machine", "lines", "rows"}
    lines += ["", *(f"{name}: {value}." for name, value in stored.items() if name not in known)]
    if path.with_suffix(".png").exists():
        lines += ["", f"![ratio against budget]({path.stem}.png)"]
    return "\n".join(lines) + "\n"


def _row(line: dict[str, Any]) -> str:
    ratio, floor, target = line["ratio"], line["floor"], line["target"]
    median = f"{ratio['median']:.3f}"
    if target is not None and ratio["median"] > target:
        median = f"**{median}**"
    cells = [line["case"], line["method"], f"{line['budget']:g}", median]
    cells.append(f"{ratio['low']:.3f} - {ratio['high']:.3f}")
    cells.append("" if floor is None else f"{floor:.3f}")
    cells.append("" if target is None else f"{target:.2f}")
    return "| " + " | ".join(cells) + " |"
