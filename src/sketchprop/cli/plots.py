"""Pictures of reports; matplotlib is imported only here, only when one is asked for."""

from __future__ import annotations

from typing import Any

from ..meters import BenchReport, MeasureReport, PlanReport
from .location import LocationReport
from .specs import UsageError

COLOURS = {"first": "#0072b2", "last": "#d55e00", "all": "#444444"}


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install 'sketchprop[cli]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path, dpi=100, metadata={"Software": None} if path[-4:] == ".png" else None)
    except ValueError as error:  # an ending that matplotlib does not know
        raise UsageError(f"--plot {path}: {error}") from error
    _pyplot().close(figure)


def plot_measure(report: MeasureReport, path: str) -> None:
    """V by the layer that injected it, relative to σ²."""
    lines = report.variance.layers
    figure, axes = _bars([line.layer for line in lines], len(lines))
    values = [line.relative.value for line in lines]
    axes.barh(range(len(lines)), values, xerr=[line.relative.draw_error for line in lines])
    axes.set_xlabel("V/σ² injected by the layer")
    axes.set_title(f"V/σ² = {report.relative}", fontsize=10)
    _save(figure, path)


def plot_plan(report: PlanReport, path: str) -> None:
    """Exact and sketched time of each layer's backward."""
    lines = report.layers
    figure, axes = _bars([line.layer for line in lines], len(lines))
    exact = [1e3 * line.seconds for line in lines]
    kept = [1e3 * (line.seconds - line.saved_seconds) for line in lines]
    axes.barh([i - 0.2 for i in range(len(lines))], exact, 0.4, label="exact", color="#999999")
    colours = ["#009e73" if line.worth else "#d55e00" for line in lines]
    axes.barh(
        [i + 0.2 for i in range(len(lines))], kept, 0.4, label=repr(report.sketch), color=colours
    )
    axes.set_xlabel("backward, ms")
    axes.legend(frameon=False)
    _save(figure, path)


def plot_bench(report: BenchReport, path: str) -> None:
    """Sketched over exact time for each shape."""
    names = [f"{' × '.join(map(str, line.shape))}  {line.sketch}" for line in report.lines]
    figure, axes = _bars(names, len(names))
    ratios = [line.times.ratio for line in report.lines]
    axes.barh(range(len(names)), ratios, xerr=[line.times.ratio_error for line in report.lines])
    axes.axvline(1, color="#444444", linewidth=1)
    axes.set_xlabel("sketched / exact backward time")
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


def _bars(names: list[str], count: int) -> tuple[Any, Any]:
    figure, axes = _pyplot().subplots(figsize=(7, 1.2 + 0.3 * count), layout="constrained")
    axes.set_yticks(range(count), [name or "(model)" for name in names], fontsize=8)
    axes.invert_yaxis()
    return figure, axes
