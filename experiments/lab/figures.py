"""Pictures from stored results alone, as PNG and SVG: the same file for the same results."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..methods import EXACT, METHODS, PLACES, colour
from .selection import PointResult
from .store import write_file
from .sweep import Figure

WIDTH = 90
"""Letters in a line under the title."""
PLACE_LINES = {"all": "-", "last": "--", "first": ":"}
"""As in the appendix of the paper."""


def picture(
    folder: Path,
    name: str,
    panels: int,
    draw: Callable[[Sequence[Any]], None],
    size: tuple[float, float] = (5.0, 3.8),
    *,
    salt: str = "",
    dpi: int = 140,
    columns: int = 0,
) -> list[Path]:
    """``<folder>/<name>.{png,svg}``: panels side by side, ``columns`` of them in a row (0: all).

    ``draw`` gets all places, in the last row more than ``panels`` if that is not full.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    # A fixed salt and no date, or the file would differ each time.
    fixed: Any = {"svg.hashsalt": salt or name, "font.size": 8, "svg.fonttype": "none"}
    with mpl.rc_context(fixed):
        across = min(panels, columns or panels)
        rows = math.ceil(panels / across)
        canvas = Canvas(figsize=(size[0] * across, size[1] * rows), layout="constrained")
        FigureCanvasAgg(canvas)
        draw(list(canvas.subplots(rows, across, squeeze=False).flat))
        written = []
        for suffix in ("png", "svg"):
            content = io.BytesIO()
            metadata = {"Date": None} if suffix == "svg" else None
            canvas.savefig(content, format=suffix, dpi=dpi, metadata=metadata)
            written.append(write_file(folder / f"{name}.{suffix}", content.getvalue()))
    return written


def label_axes(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=8)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, linewidth=0.4, alpha=0.6)


def budget_axis(axes: Any, budgets: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    axes.minorticks_off()


def draw_figure(
    figure: Figure, results: Sequence[PointResult], subtitle: str, folder: Path
) -> list[Path]:
    """Median over seeds against the budget, bars of one standard deviation."""

    def draw(panels: Sequence[Any]) -> None:
        (axes,) = panels
        for series in _series(results):
            _plot(axes, series, figure)
        budget_axis(axes, sorted({s.point.budget for s in results}))
        title = f"{figure.title}\n{textwrap.fill(subtitle, WIDTH)}"
        x, y = "Sampling budget ($p$ or $r/n$)", "Best accuracy (%), chosen on validation"
        label_axes(axes, title, x, y)
        reached = min((s.median - s.spread for s in results), default=figure.lowest)
        top = max((s.median + s.spread for s in results), default=100.0) + 2
        axes.set_ylim(min(figure.lowest, max(0.0, reached - 2)), figure.highest or top)
        axes.legend(fontsize=6, loc="lower right", framealpha=0.55, ncols=2, handlelength=4)

    name = f"figure-{figure.name}"
    return picture(folder, name, 1, draw, (6.4, 4.2), salt=figure.name, dpi=160)


def _series(results: Sequence[PointResult]) -> list[list[PointResult]]:
    """Results of one method in one place, by budget."""
    groups: dict[tuple[str, str], list[PointResult]] = {}
    for result in results:
        groups.setdefault((result.point.method, result.point.place), []).append(result)
    return [sorted(group, key=lambda s: s.point.budget) for group in groups.values()]


def _plot(axes: Any, series: Sequence[PointResult], figure: Figure) -> None:
    method, place = METHODS[series[0].point.method], series[0].point.place
    located = figure.name.startswith("location") and not method.sketched
    marker = "s" if method.control else "o"
    label = method.label
    if method.name == EXACT:
        look: dict[str, Any] = {"linestyle": "none", "marker": "*", "markersize": 11}
    elif located:
        look = {"linestyle": PLACE_LINES[place], "marker": marker, "markersize": 3.5}
        label += ", all layers" if place == "all" else f", {place} layer"
    else:
        look = {"linestyle": method.line, "marker": marker, "markersize": 3}
    axes.errorbar(
        [s.point.budget for s in series],
        [s.median for s in series],
        [s.spread for s in series],
        color=colour(method.colour),
        label=label,
        linewidth=1.2,
        elinewidth=0.8,
        **look,
    )


def order(result: PointResult) -> tuple[int, int, float]:
    """The order of tables: methods as listed, places, budgets."""
    names, point = list(METHODS), result.point
    return names.index(point.method), PLACES.index(point.place), point.budget
