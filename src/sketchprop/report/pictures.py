"""Pictures of reports, all of them by matplotlib, which is imported when one is drawn."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.table import Column, Table
from ..meters import Estimate, MeasureReport, PlanReport

COLOURS = ("#8f99a3", "#2f86c8")
"""Exact grey, what replaces it blue; both are seen on white and on black."""
MOST_ROWS = 40
"""A chart of more layers shows the largest; its table has all."""
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": COLOURS[0],
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: to be searched, and in the colour of the page
    "text.parse_math": False,  # a layer may have any name
}


@dataclass(frozen=True)
class BarChart:
    """Columns of a table as bars, one before the other and thinner, a row for each of its rows."""

    table: Table
    shown: Sequence[str]
    """Titles of the columns, what is exact first."""

    @property
    def title(self) -> str:
        return self.table.title

    @property
    def size(self) -> tuple[float, float]:
        """Inches."""
        return 5.0, 0.8 + 0.24 * min(len(self.table.rows), MOST_ROWS)

    def draw(self, axes: Any) -> None:
        count, header = len(self.table.rows), self.table.header
        bars = {
            title: [_bar(row[i], self.table.columns[i]) for row in self.table.rows]
            for title in self.shown
            for i in (header.index(title),)
        }
        reach = [max(abs(bar.value) for bar in row) for row in zip(*bars.values(), strict=True)]
        rows = sorted(sorted(range(count), key=reach.__getitem__, reverse=True)[:MOST_ROWS])
        places = range(len(rows))
        for number, (title, column) in enumerate(bars.items()):
            axes.barh(
                places,
                [column[row].value for row in rows],
                0.75 / (number + 1),
                xerr=[column[row].error for row in rows],
                color=COLOURS[number + (len(bars) == 1)],
                ecolor=COLOURS[0],
                label=title,
            )
        labels = [self.table.columns[0].write(row[0]) for row in self.table.rows]
        axes.set_yticks(places, [_short(labels[row]) for row in rows])
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.4)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(bars))
        if len(rows) < count:
            axes.set_xlabel(f"the {len(rows)} largest of {count}")


def noise_chart(report: MeasureReport) -> BarChart:
    """V/σ² by the layer that injected it."""
    return BarChart(report.noise_by_layer(), ("V/σ²",))


def plan_chart(report: PlanReport) -> BarChart:
    """The backward of each layer alone, on this machine, and what the sketch saves of it."""
    table = replace(report.tables()[0], note=report.headline().partition("\n")[0])
    return BarChart(table, ("ms", "saves ms"))


def as_svg(chart: BarChart) -> str:
    """An ``<svg>`` to stand inside a page, below a heading of its own."""
    stream, matplotlib = io.StringIO(), require_matplotlib()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context(STYLE):
        figure = matplotlib.figure.Figure(figsize=chart.size, layout="constrained")
        chart.draw(figure.subplots())
        figure.savefig(stream, format="svg", transparent=True, metadata=nothing)
    text = stream.getvalue()
    return text[text.index("<svg") :]


def require_matplotlib() -> Any:
    """The package, or what to type to have it."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'sketchprop[cli]'") from error
    return matplotlib


def _bar(cell: Any, column: Column) -> Estimate:
    """A length and its error, in the unit of the column; nothing for what is not finite."""
    estimate = cell if isinstance(cell, Estimate) else Estimate(cell or 0.0, 0.0)
    lengths = (column.scale * estimate.value, column.scale * estimate.draw_error)
    return Estimate(*(length if math.isfinite(length) else 0.0 for length in lengths))


def _short(label: str, most: int = 30) -> str:
    """The end of a long name tells layers apart; the table has it whole."""
    return label if len(label) <= most else "…" + label[1 - most :]
