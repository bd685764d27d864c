"""Bar charts as inline SVG: widths in per cent and labels above their bars, so that one drawing
fits a wide screen and a phone with letters of the same size. Colours come from the page's style.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from .charts import Chart, Row

ROW, BAR, GAP, TOP, AXIS = 46, 13, 2, 4, 24
"""Pixels: a row with its label, the height of its bars together, between them, margins."""

LETTER, NARROWEST = 7, 330
"""Pixels: a letter of an axis, and a chart on a phone."""
MOST_BARS = 40
"""A chart with more rows shows the largest; its table has all."""


def bars(chart: Chart) -> str:
    """The chart as SVG, with a note where it leaves rows out."""
    chosen = _largest(chart.rows)
    marks = [] if chart.mark is None else [chart.mark]
    limit, step = _scale(chart.end or max([row.reach for row in chosen] + marks, default=1) or 1.0)
    height = TOP + ROW * len(chosen) + AXIS
    body = [_axis(limit, step, height, chart.unit)]
    for mark in marks:
        x = _percent(mark / limit)
        body.append(f'<line class="mark" x1="{x}" x2="{x}" y1="0" y2="{height - AXIS}"/>')
    body += [_row(row, TOP + ROW * i, limit) for i, row in enumerate(chosen)]
    drawing = "".join(body)
    count, less = len(chart.rows), len(chart.rows) - len(chosen)
    note = f'<p class="note">The {len(chosen)} largest of {count} layers.</p>' if less else ""
    return (
        f'<svg class="chart" role="img" width="100%" height="{height}">'
        f"<title>{escape(chart.title)}</title>{drawing}</svg>{note}"
    )


def _largest(rows: Sequence[Row]) -> list[Row]:
    """At most ``MOST_BARS`` rows, in their own order."""
    order = sorted(range(len(rows)), key=lambda i: -rows[i].reach)[:MOST_BARS]
    return [rows[i] for i in sorted(order)]


def _row(row: Row, y: int, limit: float) -> str:
    pieces = [
        f'<text x="0" y="{y + 15}">{escape(_short(row.label))}</text>',
        f'<text class="value" x="100%" y="{y + 15}" text-anchor="end">{escape(row.text)}</text>',
    ]
    top, start = y + 21.0, 0.0
    below = 1 if row.stacked else max(1, len(row.parts))
    thick = (BAR - GAP * (below - 1)) / below
    for part in row.parts:
        value = part.value if math.isfinite(part.value) else limit
        hint = f"<title>{escape(part.hint)}</title>" if part.hint else ""
        pieces.append(
            f'<rect class="{part.style}" x="{_percent(start / limit)}" y="{top:g}" '
            f'width="{_percent(value / limit)}" height="{thick:g}">{hint}</rect>'
        )
        if row.stacked:
            start += value
        else:
            top += thick + GAP
    if row.error and math.isfinite(row.error) and row.parts:
        tip = start or row.parts[-1].value
        low, high = _percent(max(0.0, tip - row.error) / limit), _percent((tip + row.error) / limit)
        middle = y + 21 + BAR / 2
        pieces.append(
            f'<line class="whisker" x1="{low}" x2="{high}" y1="{middle:g}" y2="{middle:g}"/>'
        )
    return "".join(pieces)


def _axis(limit: float, step: float, height: int, unit: str) -> str:
    bottom = height - AXIS
    pieces = []
    count = round(limit / step)
    labels = [f"{i * step:g}" for i in range(count + 1)]
    labels[-1] += f" {unit}" if unit else ""
    # The last one ends at the edge: on a phone it would cover the one before.
    if LETTER * (len(labels[-1]) + len(labels[-2]) / 2 + 1) > NARROWEST / count:
        labels[-2] = labels[-2] if count == 1 else ""
    for i, label in enumerate(labels):
        x = _percent(i / count)
        side = "start" if i == 0 else "end" if i == count else "middle"
        pieces.append(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{bottom}"/>')
        pieces.append(
            f'<text class="tick" x="{x}" y="{bottom + 16}" text-anchor="{side}">{label}</text>'
        )
    return "".join(pieces)


def _scale(furthest: float) -> tuple[float, float]:
    """The end of an axis and the step of its ticks: 1, 2 or 5 times a power of ten.

    >>> _scale(1.3), _scale(401.4)
    ((1.5, 0.5), (500, 100))
    """
    rough = furthest / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    return step * math.ceil(furthest / step * 0.9999), step


def _percent(share: float) -> str:
    return f"{100 * min(1.0, max(0.0, share)):.4g}%"


def _short(label: str, most: int = 38) -> str:
    """The end of a long name tells layers apart; the table has it whole."""
    return label if len(label) <= most else "…" + label[1 - most :]
