"""The paper's pictures, drawn from stored results alone: its colours and axes, PNG and SVG."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .methods import COLOURS, EXACT, METHODS, PLACES
from .selection import Summary
from .store import write_file
from .sweep import Figure

WIDTH = 90
"""Letters in a line under the title."""
PLACE_LINES = {"all": "-", "last": "--", "first": ":"}
"""As in the appendix of the paper."""


def draw(figure: Figure, summaries: Sequence[Summary], subtitle: str, folder: Path) -> list[Path]:
    """Median over seeds, bars of one standard deviation; ``<folder>/figure-<name>.{png,svg}``."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    # A fixed salt and no date: the same results give the same file.
    with mpl.rc_context({"svg.hashsalt": figure.name, "font.size": 8, "svg.fonttype": "none"}):
        canvas = Canvas(figsize=(6.4, 4.2), layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.subplots()
        for series in _series(summaries):
            _plot(axes, series, figure)
        _dress(axes, figure, summaries)
        axes.set_title(f"{figure.title}\n{textwrap.fill(subtitle, WIDTH)}", fontsize=8)
        written = []
        for suffix in ("png", "svg"):
            content = io.BytesIO()
            metadata = {"Date": None} if suffix == "svg" else None
            canvas.savefig(content, format=suffix, dpi=160, metadata=metadata)
            written.append(
                write_file(folder / f"figure-{figure.name}.{suffix}", content.getvalue())
            )
    return written


def _series(summaries: Sequence[Summary]) -> list[list[Summary]]:
    """Summaries of one method in one place, by budget."""
    groups: dict[tuple[str, str], list[Summary]] = {}
    for summary in summaries:
        groups.setdefault((summary.point.method, summary.point.place), []).append(summary)
    return [sorted(group, key=lambda s: s.point.budget) for group in groups.values()]


def _plot(axes: Any, series: Sequence[Summary], figure: Figure) -> None:
    method, place = METHODS[series[0].point.method], series[0].point.place
    colour = tuple(channel / 255 for channel in COLOURS[method.colour])
    budgets = [summary.point.budget for summary in series]
    medians = [summary.median for summary in series]
    spreads = [summary.spread for summary in series]
    located = figure.name.startswith("location")
    if method.name == EXACT:
        look: dict[str, Any] = {"linestyle": "none", "marker": "*", "markersize": 11}
    elif located and not method.sketched:
        marker = "s" if method.control else "o"
        look = {"linestyle": PLACE_LINES[place], "marker": marker, "markersize": 3.5}
    else:
        look = {"linestyle": method.line, "marker": "s" if method.control else "o", "markersize": 3}
    label = method.label
    if located and method.name != EXACT and not method.sketched:
        label += {"all": ", all layers"}.get(place, f", {place} layer")
    axes.errorbar(
        budgets, medians, spreads, color=colour, label=label, linewidth=1.2, elinewidth=0.8, **look
    )


def _dress(axes: Any, figure: Figure, summaries: Sequence[Summary]) -> None:
    axes.set_xscale("log")
    budgets = sorted({summary.point.budget for summary in summaries})
    axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    axes.minorticks_off()
    axes.set_xlabel("Sampling budget ($p$ or $r/n$)")
    axes.set_ylabel("Best accuracy (%), chosen on validation")
    reached = min((s.median - s.spread for s in summaries), default=figure.lowest)
    top = max((s.median + s.spread for s in summaries), default=100.0) + 2
    axes.set_ylim(min(figure.lowest, max(0.0, reached - 2)), figure.highest or top)
    axes.grid(True, linewidth=0.4, alpha=0.6)
    axes.legend(fontsize=6, loc="lower right", framealpha=0.55, ncols=2, handlelength=4)


def order(summary: Summary) -> tuple[int, int, float]:
    """The order of tables: methods as listed, places, budgets."""
    names = list(METHODS)
    point = summary.point
    return names.index(point.method), PLACES.index(point.place), point.budget
