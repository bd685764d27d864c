"""Quality against time, a panel for each task and one legend for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ..lab.figures import label_axes, picture
from ..tasks.table import TASKS
from .outcome import Curve, Outcome
from .ways import EXACT

COLUMNS = 3
LONGEST = 3
"""Times the median: bars that are shown whole."""
EDGE = 0.04
"""Of the height, above and below."""
NEGATIVE = ", negative"
CONTROL = "exact, the batch that ends best"
SAME = "exact, the batch of Tokens(0.3)"
OTHER = "exact, other batches"
LOOKS: dict[str, dict[str, Any]] = {
    CONTROL: {"color": "k", "ls": "-", "marker": "o", "zorder": 4},
    SAME: {"color": "0.45", "ls": "--", "marker": "s"},
    OTHER: {"color": "0.75", "ls": "-", "marker": "v"},
}


def draw(outcomes: Mapping[str, Outcome], out: Path) -> list[Path]:
    """``figure.{png,svg}`` of the tasks that have runs."""
    shown = [outcome for outcome in outcomes.values() if outcome.curves]
    if not shown:
        return []

    def draw_all(axes: Sequence[Any]) -> None:
        handles: dict[str, Any] = {}
        for panel, outcome in zip(axes, shown, strict=False):
            handles |= _panel(panel, outcome)
        for empty in axes[len(shown) :]:
            empty.axis("off")
        first = [label for label in LOOKS if label in handles]
        labels = [*first, *(label for label in handles if label not in LOOKS)]
        axes[len(shown)].legend(
            [handles[label] for label in labels], labels, loc="center left", frameon=False
        )

    return picture(out, "figure", len(shown) + 1, draw_all, size=(3.4, 2.9), columns=COLUMNS)


def _panel(panel: Any, outcome: Outcome) -> dict[str, Any]:
    """Draws the curves of a task; what stands for each in the legend.

    Up is better: where quality is a negative loss, the loss is shown and its axis turned. Open
    points: a way at its second batch size.
    """
    control = outcome.control
    handles: dict[str, Any] = {}
    task = TASKS[outcome.contest.task]
    sign = -1 if task.quality.endswith(NEGATIVE) else 1
    curves = sorted(outcome.curves, key=lambda curve: curve is control)
    for curve in curves:
        label = _label(outcome, curve)
        look = LOOKS.get(label) or {
            "color": curve.way.colour, "ls": curve.way.line, "marker": "o", "zorder": 3,
        }  # fmt: skip
        if label not in LOOKS and label in handles:
            look["mfc"] = "white"
        means = [sign * curve.mean(s, range(len(curve.points[s]))) for s in curve.shares]
        errors = [curve.spread(s) for s in curve.shares]
        drawn = panel.errorbar(
            curve.shares, means, errors, ms=4, lw=1.2, elinewidth=0.8, capsize=2, **look
        )
        handles.setdefault(label, drawn)
    if control is not None and 1.0 in control.points:
        panel.axhline(sign * control.last, color="k", lw=0.6, ls=":")
    panel.set_xticks(outcome.contest.shares)
    panel.set_ylim(*_limits(curves, sign))
    label_axes(panel, task.label, "time, of the whole", task.quality.removesuffix(NEGATIVE))
    if sign < 0:
        panel.invert_yaxis()
    return handles


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
    edge = EDGE * (max(ends) - min(ends)) or 1.0
    return min(ends) - edge, max(ends) + edge


def _label(outcome: Outcome, curve: Curve) -> str:
    if curve.way.name != EXACT:
        return curve.way.label
    if curve is outcome.control:
        return CONTROL
    return SAME if curve.batch == outcome.kept_batch else OTHER
