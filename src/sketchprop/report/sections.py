"""The sections of the page: each a chart and the table with its numbers."""

from __future__ import annotations

from ..meters import MeasureReport, PlanReport, Verdict
from ..meters.plan import LayerPlan
from .svg import Part, Row, bars
from .tables import html_table, legend, section
from .words import amount, ratio, together

MODEL = "(model)"
"""The name of a layer that is the whole model."""


def verdict_section(report: MeasureReport) -> str:
    """ρ(V)/ρ(0), (σ² + V)/σ² and their product, by time and by FLOPs."""
    verdicts = [v for v in (report.by_time, report.by_flops) if v is not None]
    rows = [_ratio("steps needed", verdicts[0].steps, "sketched", report.relative.error)]
    for v in verdicts:
        rows.append(_ratio(f"a step, by {v.basis}", v.cost, "sketched"))
        rows.append(_ratio(f"in all, by {v.basis}", v.change, "good" if v.pays else "bad", v.error))
    header = ("by", "a step costs", "steps", "in all", "pays")
    cells = [_verdict_cells(v) for v in verdicts]
    text = (
        "What a step costs × how many are needed, over exact training. Left of the dashed line "
        "is a gain."
    )
    chart = bars(rows, title="Cost, steps and their product over exact training", mark=1.0)
    return section("Cost × steps", text, chart, html_table(header, cells))


def variance_section(report: MeasureReport) -> str:
    """V by the layer that injected it; empty if it was not split."""
    lines, total = report.variance.layers, report.added.value
    if not lines:
        return ""
    rows = [
        Row(
            line.layer or MODEL,
            f"{line.relative.value:.3g}",
            (Part(line.relative.value, "sketched", f"V/σ² = {line.relative}"),),
            error=line.relative.draw_error,
        )
        for line in lines
    ]
    cells = [
        (
            line.layer or MODEL,
            str(line.injected),
            f"{line.injected.value / total:.3f}" if total else "-",
            str(line.relative),
            line.sketch,
        )
        for line in lines
    ]
    worst = max(lines, key=lambda line: line.injected.value)
    text = f"V = {report.added} against σ² = {report.sigma2}; the parts of the layers add up to V."
    if total and len(lines) > 1:
        share = worst.injected.value / total
        text += f" The draws of layer {worst.layer or MODEL} bring most, {100 * share:.0f} % of it."
    chart = bars(rows, title="V/σ² by the layer that injected it", unit="V/σ²")
    header = ("layer", "V injected", "share", "V/σ²", "sketch")
    return section("Where the noise is made", text, chart, html_table(header, cells, words=(4,)))


def node_section(report: MeasureReport) -> str:
    """Prop. 2.2 at each node: shares of local and propagated variance."""
    rows = []
    for node in report.nodes:
        local, propagated = node.samples.local.value, node.samples.propagated.value
        whole = local + propagated
        share = local / whole if whole else 1.0
        parts = (
            Part(share, "local", f"local {node.samples.local}"),
            Part(
                1 - share if whole else 0.0, "propagated", f"propagated {node.samples.propagated}"
            ),
        )
        rows.append(
            Row(node.node, f"{100 * share:.0f} % local" if whole else "none", parts, stacked=True)
        )
    if not rows:
        return ""
    header = ("node", "variance", "local", "propagated")
    cells = [
        (node.node, *map(str, (s.total, s.local, s.propagated)))
        for node in report.nodes
        for s in (node.samples,)
    ]
    text = (
        "At each tensor that feeds sketched layers: variance made there, and variance that "
        "arrived from the layers above. Where nearly all has arrived, sketching less above helps "
        "more than sketching less here."
    )
    colours = legend({"local": "made here (local)", "propagated": "arrived (propagated)"})
    chart = bars(rows, title="Local and propagated share of the variance at each node", end=1.0)
    return section("How it travels", text, colours + chart, html_table(header, cells))


def flops_section(report: MeasureReport) -> str:
    """Backward FLOPs of each sketched layer."""
    lines = report.flops.layers
    if not lines:
        return ""
    rows, cells = [], []
    for line in lines:
        kept = ratio(line.sketched / max(1, line.exact))
        parts = (Part(line.exact / 1e6, "exact"), Part(line.sketched / 1e6, "sketched"))
        rows.append(Row(line.layer or MODEL, kept, parts))
        flops = (f"{value / 1e6:.4g}" for value in (line.exact, line.sketched))
        cells.append((line.layer or MODEL, *flops, kept[:-2]))
    text = (
        f"The backward pass of the whole model takes {report.flops.kept:.3f} of the exact FLOPs, "
        f"a step with its forward pass {report.flops.step_ratio:.3f}."
    )
    chart = bars(rows, title="Backward FLOPs by layer, exact and sketched", unit="MFLOP")
    colours = legend({"exact": "exact", "sketched": "sketched"})
    header = ("layer", "exact M", "sketched M", "ratio")
    return section("Work", text, colours + chart, html_table(header, cells))


def memory_section(report: MeasureReport) -> str:
    """Bytes saved for backward by each layer that is or could be sketched."""
    before = {line.layer: line for line in report.exact_memory.layers}
    rows, cells = [], []
    for line in report.sketched_memory.layers:
        exact = before[line.layer].saved if line.layer in before else 0
        own = line.saved - line.shared
        parts = (
            Part(own / 1e3, "sketched", f"its own: {own} bytes"),
            Part(line.shared / 1e3, "shared", line.note),
        )
        name = line.layer or MODEL
        rows.append(Row(name, f"{line.saved / 1e3:.4g} kB", parts, stacked=True))
        kilobytes = (f"{value / 1e3:.1f}" for value in (exact, line.saved, line.shared))
        cells.append((name, *kilobytes, ", ".join(line.holders)))
    if not rows:
        return ""
    total, whole = report.sketched_memory.total, report.exact_memory.total
    text = (
        f"The whole model saves {amount(total, 'B')} for backward, exact {amount(whole, 'B')}, "
        "each buffer once and without the batch itself. Sketches drawn in backward save nothing; "
        "those drawn in forward do, where nothing else keeps the buffer."
    )
    colours = legend({"sketched": "the layer's own", "shared": "kept alive by others too"})
    chart = bars(rows, title="Bytes saved for backward by layer", unit="kB")
    header = ("layer", "exact kB", "sketched kB", "shared kB", "with")
    table = html_table(header, cells, words=(4,))
    return section("Memory", text, colours + chart, table)


def plan_section(planned: PlanReport) -> str:
    """The backward of each layer alone, on this machine: exact and sketched."""
    rows = [_plan_row(line) for line in planned.layers]
    cells = [
        (
            line.layer or MODEL,
            f"{line.rows} × {' × '.join(map(str, line.shape))}",
            f"{1e3 * line.seconds:.3f}",
            "-" if line.ratio is None else f"{line.ratio:.2f}",
            "-" if line.break_even is None else f"{line.break_even:.2f}",
            ("yes" if line.worth else "no") + (f": {line.note}" if line.note else ""),
        )
        for line in planned.layers
    ]
    text = planned.conclusion().partition("\n")[0]
    colours = legend(
        {"exact": "exact", "good": "sketched: worth it", "bad": "sketched: not worth it"}
    )
    chart = bars(rows, title="Backward time of each layer, exact and sketched", unit="ms")
    header = ("layer", "rows × n × d", "exact ms", "ratio", "break-even", "sketch it?")
    table = html_table(header, cells, words=(5,))
    return section(f"The plan for {planned.sketch!r}", text, colours + chart, table)


def _plan_row(line: LayerPlan) -> Row:
    exact = Part(1e3 * line.seconds, "exact")
    if line.ratio is None:
        return Row(line.layer or MODEL, "stays exact", (exact,))
    sketched = Part(1e3 * line.seconds * line.ratio, "good" if line.worth else "bad")
    return Row(line.layer or MODEL, f"{line.ratio:.2f} ×", (exact, sketched))


def _verdict_cells(v: Verdict) -> tuple[str, ...]:
    answer = ("yes" if v.pays else "no") + ("" if v.certain else ", within its error")
    return (v.basis, ratio(v.cost)[:-2], ratio(v.steps)[:-2], together(v)[:-2], answer)


def _ratio(label: str, value: float, style: str, error: float = 0.0) -> Row:
    return Row(label, ratio(value), (Part(value, style),), error=error)
