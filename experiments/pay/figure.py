"""Quality against time, a panel for each task: exact training, kept tokens, the tuner."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ..lab.figures import label_axes, picture
from ..tasks.table import TASKS
from .outcome import Curve, Outcome
from .ways import TUNER

COLUMNS = 3
LONGEST = 3
"""Times the median: bars that are shown whole."""
EDGE, LEGEND = 0.04, 0.4
"""Of the height, above the lines and below them."""
NEGATIVE = ", negative"
TIME = "training time, whole run = 1"
COLOURS = ("k", "C0", "C2")


def draw(outcomes: Mapping[str, Outcome], out: Path) -> list[Path]:
    """``figure.{png,svg}`` of the tasks that have runs."""
    shown = [outcome for outcome in outcomes.values() if outcome.control]
    if not shown:
        return []

    def draw_all(axes: Sequence[Any]) -> None:
        for panel, outcome in zip(axes, shown, strict=False):
            _panel(panel, outcome)
        for empty in axes[len(shown) :]:
            empty.axis("off")

    return picture(out, "figure", len(shown), draw_all, size=(3.6, 3.0), columns=COLUMNS)


def lines(outcome: Outcome) -> list[Curve]:
    """The control, the best of kept tokens at budgets that stay, and the best tuner."""
    kept = [curve for curve in outcome.curves if curve.way.kept]
    tuned = [curve for curve in outcome.curves if curve.way.control == TUNER]

    def order(curve: Curve) -> tuple[float, float]:
        ratio = outcome.ratio(curve)
        return (ratio.value if ratio else math.inf), -curve.last

    best = [min(group, key=order) for group in (kept, tuned) if group]
    return [*([outcome.control] if outcome.control else []), *best]


def _panel(panel: Any, outcome: Outcome) -> None:
    """Up is better: where quality is a negative loss, the loss is shown and its axis turned."""
    task = TASKS[outcome.contest.task]
    sign = -1 if task.quality.endswith(NEGATIVE) else 1
    curves = lines(outcome)
    for curve, colour in zip(curves, COLOURS, strict=False):
        means = [sign * curve.mean(s, range(len(curve.points[s]))) for s in curve.shares]
        errors = [curve.spread(s) for s in curve.shares]
        panel.errorbar(
            curve.shares, means, errors, label=_label(outcome, curve), color=colour, marker="o",
            ms=4, lw=1.4, elinewidth=0.8, capsize=2,
        )  # fmt: skip
    panel.axhline(sign * curves[0].last, color="k", lw=0.6, ls=":")
    panel.set_xticks(outcome.contest.shares)
    panel.set_ylim(*_limits(curves, sign))
    label_axes(panel, task.label, TIME, task.quality.removesuffix(NEGATIVE))
    panel.legend(fontsize=6.5, loc="lower right", framealpha=0.7, title_fontsize=6.5,
                 title="time to equal quality")  # fmt: skip
    if sign < 0:
        panel.invert_yaxis()


def _label(outcome: Outcome, curve: Curve) -> str:
    if curve is outcome.control:
        return f"exact, batch {curve.batch}, its best"
    ratio = outcome.ratio(curve)
    return f"{curve.way.label}, batch {curve.batch}: {ratio.text() if ratio else '-'}"


def _limits(curves: Sequence[Curve], sign: int) -> tuple[float, float]:
    """Of an axis: all means and usual bars are within; one lost run must not press all the rest
    together, so a bar that is far longer than most is cut."""
    points = [(curve, share) for curve in curves for share in curve.shares]
    most = LONGEST * median(curve.spread(share) for curve, share in points)
    ends = []
    for curve, share in points:
        mean = sign * curve.mean(share, range(len(curve.points[share])))
        bar = min(most, curve.spread(share))
        ends += [mean - bar, mean + bar]
    height = max(ends) - min(ends) or 1.0
    below = [EDGE, LEGEND][::sign]  # an axis that is turned has its legend at the other end
    return min(ends) - below[1] * height, max(ends) + below[0] * height
