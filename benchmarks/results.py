"""Results as a table on the screen, a JSON file and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from sketchprop.cli.show import say
from sketchprop.core.table import Column, Table, words

from .timing import Ratio, machine

FOLDER = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Line:
    """One measured ratio: what, how, against which target."""

    case: str
    method: str
    budget: float
    ratio: Ratio
    floor: float | None = None
    target: float | None = None


def show(title: str, lines: Sequence[Line], extras: dict[str, object] | None = None) -> None:
    columns = (
        *(words("case"), words("method"), Column("kept", "g"), Column("ratio", ".3f")),
        *(Column("from", ".3f"), Column("to", ".3f"), Column("floor", ".3f")),
        *(Column("target", ".2f"), words(""), Column("ms", ".3g")),
    )
    rows = [
        (
            *(line.case, line.method, line.budget, line.ratio.median),
            *(line.ratio.low, line.ratio.high, line.floor, line.target),
            "missed" if line.target is not None and line.ratio.median > line.target else "",
            line.ratio.milliseconds,
        )
        for line in lines
    ]
    say(str(Table(title, columns, rows, "Medians with their quartiles.")))
    for name, value in (extras or {}).items():
        say(f"{name}: {value}")


def compare(before: Path, after: Path) -> Table:
    """Two stored results of one command, line by line."""

    def ratios(path: Path) -> dict[tuple[str, str, float], float]:
        lines = json.loads(path.read_text())["lines"]
        return {(e["case"], e["method"], e["budget"]): e["ratio"]["median"] for e in lines}

    old, new = ratios(before), ratios(after)
    rows = [(*key, old[key], new[key], new[key] / old[key]) for key in old if key in new]
    numbers = (Column("before", ".3f"), Column("after", ".3f"), Column("after/before", ".3f"))
    columns = (words("case"), words("method"), Column("kept", "g"), *numbers)
    return Table("Time over exact", columns, rows, "Each is a median of ratios within a run.")


def save(
    path: Path, command: str, allocator: str, lines: Sequence[Line], extras: dict[str, object]
) -> None:
    content = {
        "command": command,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(allocator),
        "lines": [asdict(line) for line in lines],
        **extras,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


def plot(path: Path, lines: Sequence[Line], title: str) -> None:
    """Ratio against budget for each case, with the floor: what the reduced products alone take."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8.5, 4.5), layout="constrained")
    methods = sorted({line.method for line in lines})
    main = max(methods, key=lambda m: len({line.budget for line in lines if line.method == m}))
    for number, case in enumerate(dict.fromkeys(line.case for line in lines)):
        points = sorted(
            (line for line in lines if line.case == case and line.method == main),
            key=lambda line: line.budget,
        )
        if not points:
            continue
        color = f"C{number}"
        budgets = [line.budget for line in points]
        below = [line.ratio.median - line.ratio.low for line in points]
        above = [line.ratio.high - line.ratio.median for line in points]
        medians = [line.ratio.median for line in points]
        axes.errorbar(
            budgets, medians, [below, above], marker="o", ms=4, capsize=2, color=color, label=case
        )
        floors = [(line.budget, line.floor) for line in points if line.floor is not None]
        if floors:
            axes.plot(*zip(*floors, strict=True), ls=":", color=color)
    axes.axhline(1, color="#212121", lw=1)
    axes.annotate(
        "exact",
        (1, 1),
        (-4, 3),
        axes.get_yaxis_transform(),
        "offset points",
        ha="right",
        fontsize=8,
    )
    axes.plot([], [], ls=":", color="#757575", label="floor: the reduced products alone")
    axes.set(xlabel="kept fraction", ylabel="time over exact", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside right center", title=main, title_fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
