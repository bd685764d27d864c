"""Pictures of reports; matplotlib is imported only here, only when one is asked for."""

from __future__ import annotations

import math
from typing import Any

from ..meters import Advice
from ..report.charts import Chart
from .location import LocationReport
from .specs import UsageError

STYLES = {
    "exact": "#999999",
    "sketched": "#0072b2",
    "good": "#009e73",
    "bad": "#d55e00",
    "local": "#0072b2",
    "propagated": "#e69f00",
    "shared": "#8ab8dd",
}
TRIED = ("#444444", "#0072b2", "#e69f00")
COLOURS = {"first": "#0072b2", "last": "#d55e00", "all": "#444444"}


def check_pictures() -> None:
    """Before minutes of work: whether a picture can be drawn."""
    _pyplot()


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path, dpi=100, metadata={"Software": None} if path[-4:] == ".png" else None)
    except ValueError as error:  # an ending that matplotlib does not know
        raise UsageError(f"--plot {path}: {error}") from error
    _pyplot().close(figure)


def plot_bars(chart: Chart, path: str) -> None:
    """The chart that the HTML report shows, as a picture."""
    rows = chart.rows
    figure, axes = _pyplot().subplots(figsize=(7, 1.2 + 0.3 * len(rows)), layout="constrained")
    for y, row in enumerate(rows):
        start, thick = 0.0, 0.8 if row.stacked else 0.8 / max(1, len(row.parts))
        for i, part in enumerate(row.parts):
            offset = 0.0 if row.stacked else (i + 0.5) * thick - 0.4
            last = part is row.parts[-1]
            error = row.error if last and math.isfinite(row.error) and row.error else None
            bar = {"left": start, "xerr": error, "color": STYLES[part.style]}
            axes.barh(y + offset, part.value, thick, **bar)
            start += part.value if row.stacked else 0.0
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
    axes.invert_yaxis()
    if chart.mark is not None:
        axes.axvline(chart.mark, color="#444444", linewidth=1)
    for style, text in chart.legend:
        axes.barh([], [], color=STYLES[style], label=text)
    if chart.legend:
        axes.legend(frameon=False)
    axes.set_xlabel(chart.unit)
    axes.set_title(chart.title, fontsize=10)
    _save(figure, path)


def plot_trial(advice: Advice, path: str) -> None:
    """Losses against the seconds of training: a line for each repeat of each way."""
    if advice.trial is None:
        raise UsageError("there was no trial to plot; give --trial")
    figure, axes = _pyplot().subplots(figsize=(6, 4), layout="constrained")
    for way, colour in zip(advice.trial.ways, TRIED, strict=False):
        for number, curve in enumerate(way.curves):
            axes.plot(
                [moment.seconds for moment in curve],
                [moment.loss for moment in curve],
                marker="o",
                markersize=3,
                color=colour,
                alpha=0.8,
                label=way.name if number == 0 else None,
            )
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("loss on batches kept apart")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    _save(figure, path)


def plot_location(report: LocationReport, path: str) -> None:
    """V/σ² against the budget for the first layer, the last layer and all, by method and age.

    A white triangle is a lower bound: the draws that matter there are too rare to be met.
    """
    pyplot = _pyplot()
    methods = list(dict.fromkeys(point.method for point in report.points))
    ages = list(dict.fromkeys(point.steps for point in report.points))
    figure, grid = pyplot.subplots(
        len(ages),
        len(methods),
        figsize=(2.3 * len(methods) + 0.8, 2.2 * len(ages) + 0.6),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for row, age in zip(grid, ages, strict=True):
        for axes, method in zip(row, methods, strict=True):
            for place, colour in COLOURS.items():
                points = [
                    p for p in report.points if (p.method, p.steps, p.place) == (method, age, place)
                ]
                axes.errorbar(
                    [p.budget for p in points],
                    [p.relative.value for p in points],
                    yerr=[p.relative.draw_error for p in points],
                    marker="o",
                    markersize=3,
                    color=colour,
                    label={"all": "all layers"}.get(place, f"{place} layer only"),
                )
                hidden = [p for p in points if not p.reliable]
                axes.plot(
                    [p.budget for p in hidden],
                    [p.relative.value for p in hidden],
                    linestyle="none",
                    marker="^",
                    markersize=8,
                    markerfacecolor="white",
                    color=colour,
                )
            axes.set(xscale="log", yscale="log")
            axes.set_xticks(report.budgets, [f"{b:g}" for b in report.budgets], minor=False)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            axes.set_title(f"{method}, step {age}", fontsize=8)
        row[0].set_ylabel("V/σ²")
    for axes in grid[-1]:
        axes.set_xlabel("kept fraction")
    grid[0][0].legend(frameon=False, fontsize=7)
    _save(figure, path)
