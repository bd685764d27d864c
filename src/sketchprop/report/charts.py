"""Bar charts of reports, described once: drawn as SVG in the page, by matplotlib elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.table import LAYER
from ..meters import BenchReport, MeasureReport, PlanReport
from ..meters.plan import LayerPlan
from ..meters.words import ratio

Legend = tuple[tuple[str, str], ...]
"""Styles and what they mean."""


@dataclass(frozen=True)
class Part:
    """One bar of a row: parts follow each other on one line, or lie below each other."""

    value: float
    style: str
    """A class of the style sheet: exact, sketched, good, bad, local, propagated, shared."""
    hint: str = ""


@dataclass(frozen=True)
class Row:
    """A label, the text at its right end, and the bars below."""

    label: str
    text: str
    parts: tuple[Part, ...]
    stacked: bool = False
    error: float = 0.0
    """Half of the whisker at the end of the last bar."""

    @property
    def reach(self) -> float:
        values = [part.value for part in self.parts if math.isfinite(part.value)]
        end = math.fsum(values) if self.stacked else max(values, default=0.0)
        return end + (self.error if math.isfinite(self.error) else 0.0)


@dataclass(frozen=True)
class Chart:
    """Horizontal bars from zero; ``mark`` is a line across, at 1 for ratios."""

    title: str
    rows: tuple[Row, ...]
    unit: str = ""
    mark: float | None = None
    end: float | None = None
    legend: Legend = ()


def verdict_chart(report: MeasureReport) -> Chart:
    """ρ(V)/ρ(0), (‖g‖² + σ² + V)/(‖g‖² + σ²) and their product, by time and by FLOPs."""
    rows = [_ratio("steps needed", report.verdict.steps, "sketched", report.relative.error)]
    for v in (report.by_time, report.by_flops):
        if v is not None:
            rows.append(_ratio(f"a step, by {v.basis}", v.cost, "sketched"))
            style = "good" if v.pays else "bad"
            rows.append(_ratio(f"in all, by {v.basis}", v.change, style, v.error))
    return Chart("Cost, steps and their product over exact training", tuple(rows), mark=1.0)


def noise_chart(report: MeasureReport) -> Chart:
    """V/σ² by the layer that injected it."""
    rows = tuple(
        Row(
            LAYER.write(line.layer),
            f"{line.relative.value:.3g}",
            (Part(line.relative.value, "sketched", f"V/σ² = {line.relative}"),),
            error=line.relative.draw_error,
        )
        for line in report.variance.layers
    )
    return Chart("V/σ² by the layer that injected it", rows, "V/σ²")


def memory_chart(report: MeasureReport) -> Chart:
    """Bytes saved for backward by each layer that is or could be sketched."""
    rows = []
    for line in report.sketched_memory.layers:
        unshared = line.saved - line.shared
        parts = (
            Part(unshared / 1e6, "sketched", f"its own: {unshared} bytes"),
            Part(line.shared / 1e6, "shared", line.note),
        )
        name = LAYER.write(line.layer)
        rows.append(Row(name, f"{line.saved / 1e6:.3g} MB", parts, stacked=True))
    legend = (("sketched", "the layer's own"), ("shared", "kept alive by others too"))
    return Chart("Bytes saved for backward by layer", tuple(rows), "MB", legend=legend)


def plan_chart(planned: PlanReport) -> Chart:
    """The backward of each layer alone, on this machine: exact and sketched."""
    legend = (
        ("exact", "exact"),
        ("good", f"{planned.sketch!r}: worth it"),
        ("bad", f"{planned.sketch!r}: not worth it"),
    )
    rows = tuple(map(_plan_row, planned.layers))
    return Chart("Backward time of each layer, exact and sketched", rows, "ms", legend=legend)


def bench_chart(report: BenchReport) -> Chart:
    """Sketched over exact time for each shape."""
    rows = tuple(
        _ratio(
            f"{' × '.join(map(str, line.shape))}  {line.sketch}",
            line.times.ratio,
            "good" if line.times.ratio < 1 else "bad",
            line.times.ratio_error,
        )
        for line in report.lines
    )
    return Chart("Sketched over exact backward time", rows, mark=1.0)


def _plan_row(line: LayerPlan) -> Row:
    exact = Part(1e3 * line.seconds, "exact")
    if line.ratio is None:
        return Row(LAYER.write(line.layer), "stays exact", (exact,))
    sketched = Part(1e3 * line.seconds * line.ratio, "good" if line.worth else "bad")
    return Row(LAYER.write(line.layer), ratio(line.ratio), (exact, sketched))


def _ratio(label: str, value: float, style: str, error: float = 0.0) -> Row:
    return Row(label, ratio(value), (Part(value, style),), error=error)
