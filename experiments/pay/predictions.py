"""What ``advise`` predicted, and what came of it at the same batch size."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from sketchprop.meters import Option

from ..lab.figures import label_axes, picture
from ..lab.pages import read_csv
from .outcome import Outcome, Ratio
from .ways import WAYS

ADVISED = Path("docs/results/advise")
NAMES = {
    **{way.name: way.label for way in WAYS.values() if way.kept}, "rows-0.3": "Rows(0.3)",
}  # fmt: skip
"""Of ways, as ``advise`` names them."""


MARKS = "osD^vP*"
TICKS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 16, 32)
NEAR = 2
"""Batches may be larger or smaller by so much than those that ``advise`` saw: in others a step
costs another share."""
ALIKE = 1.1
"""So may budgets: ``advise`` gives padding none, and so tries 0.19 where 0.2 was trained."""


class Pair(NamedTuple):
    """One method on one task: both are times to equal quality over exact training."""

    task: str
    way: str
    said: Option
    """What was predicted."""
    found: Ratio

    @property
    def miss(self) -> float:
        """The prediction over what was found, less 1; infinite where it was not reached."""
        return abs(predicted(self.said) / self.found.value - 1)

    @property
    def known(self) -> bool:
        """Whether what was found is a number and no bound."""
        return math.isfinite(self.found.value) and self.found.value > self.found.floor

    @property
    def inside(self) -> bool:
        """Whether the interval that is stated now holds what was found."""
        low, high = self.said.interval
        return low <= self.found.value <= high

    @property
    def within_errors(self) -> bool:
        """Whether two standard errors of the prediction do, as was stated before."""
        return abs(predicted(self.said) - self.found.value) <= 2 * self.said.error

    @property
    def promised(self) -> bool:
        """Whether a gain was predicted with the whole interval."""
        return self.said.interval[1] < 1


def predicted(option: Option) -> float:
    return math.inf if option.change is None else option.change


def read_option(row: Mapping[str, Any]) -> Option:
    """From a stored answer, or from a line of a table; what is missing there is not known."""
    names = ("time", "noise", "change", "error", "memory")
    values: dict[str, Any] = {n: float(row[n]) for n in names if row.get(n) not in (None, "")}
    return Option(row["name"], row["line"], **values)


def advised(name: str) -> list[dict[str, str]]:
    """The rows of a table that ``python -m experiments advise`` wrote; none if it did not."""
    return read_csv(ADVISED / name)


def answer_near(task: str, batch: int | None) -> dict[str, str] | None:
    """What ``advise`` said of a task, where it was asked twice at the batch that is nearest."""
    rows = [row for row in advised("summary.csv") if row["task"].partition("@")[0] == task]
    if batch is None:
        return rows[0] if rows else None
    return min(rows, key=lambda row: abs(math.log(int(row["batch"]) / batch)), default=None)


def told(task: str, way: str, batch: int) -> Option | None:
    """What was foretold of a way, or of one with nearly its budget, near this batch size."""
    asked = answer_near(task, batch)
    if asked is None or way not in NAMES or not 1 / NEAR <= batch / int(asked["batch"]) <= NEAR:
        return None
    kind, budget = _parts(NAMES[way])
    found: dict[float, Option] = {}
    for row in advised("options.csv"):
        own, other = _parts(row["name"])
        if row["task"] == asked["task"] and row["change"] and own == kind:
            apart = max(other / budget, budget / other)
            found[apart] = read_option(row)
    nearest = min(found, default=math.inf)
    return found[nearest] if nearest <= ALIKE else None


def _parts(name: str) -> tuple[str, float]:
    """
    >>> _parts("Tokens(0.189)"), _parts("Rows(0.3, unit='sample')")
    (('Tokens', 0.189), ("Rows(0.3, unit='sample')", 1.0))
    """
    match = re.fullmatch(r"(\w+)\(([\d.]+)\)", name)
    return (match[1], float(match[2])) if match else (name, 1.0)


def pairs(outcomes: Mapping[str, Outcome]) -> list[Pair]:
    """All ways on all tasks of which both are known, near the batch size that was asked about."""
    found = []
    for task, outcome in outcomes.items():
        for curve in outcome.curves:
            said, control = told(task, curve.way.name, curve.batch), outcome.same_batch(curve)
            ratio = outcome.ratio(curve, control, beyond=True) if said and control else None
            if said is not None and ratio is not None:
                found.append(Pair(task, curve.way.label, said, ratio))
    return found


def summary(found: Sequence[Pair]) -> dict[str, Any]:
    """The median miss where a number was found; how many the intervals hold, now and before; how
    many gains were promised, and came."""
    misses = [pair.miss for pair in found if pair.known]
    promised = [pair for pair in found if pair.promised]
    return {
        "pairs": found,
        "count": len(misses),
        "median": median(misses) if misses else math.nan,
        "inside": sum(pair.inside for pair in found),
        "within_errors": sum(pair.within_errors for pair in found),
        "promised": len(promised),
        "kept": sum(pair.found.value < 1 for pair in promised),
    }


def draw(found: Sequence[Pair], out: Path) -> list[Path]:
    """Found against predicted, a colour for each task and a mark for each way; open marks at the
    edge: not reached."""
    if not found:
        return []

    from matplotlib.ticker import FixedLocator

    def panel_of(axes: Sequence[Any]) -> None:
        panel = axes[0]
        both = [p for pair in found for p in (predicted(pair.said), pair.found.value)]
        seen = [p for p in both if math.isfinite(p)]
        bottom, top = min(0.5, 0.8 * min(seen)), max(1.3, 1.25 * max(seen))
        panel.set(xscale="log", yscale="log", xlim=(bottom, top), ylim=(bottom, top))
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_minor_formatter("")
            axis.set_major_locator(FixedLocator([t for t in TICKS if bottom <= t <= top]))
            axis.set_major_formatter("{x:g}")
        panel.plot([bottom, top], [bottom, top], color="0.6", lw=0.8)
        panel.axhline(1, color="0.8", lw=0.6)
        panel.axvline(1, color="0.8", lw=0.6)
        tasks = list(dict.fromkeys(pair.task for pair in found))
        ways = list(dict.fromkeys(pair.way for pair in found))
        for pair in found:
            known = math.isfinite(pair.found.value)
            value = min(pair.found.value, top)
            ends = max(bottom, pair.found.low), min(pair.found.high, top)
            middle, (least, most) = predicted(pair.said), pair.said.interval
            panel.errorbar(
                [middle], [value], xerr=[[middle - min(middle, least)], [most - middle]],
                yerr=[[max(0.0, value - ends[0])], [max(0.0, ends[1] - value)]],
                marker=MARKS[ways.index(pair.way) % len(MARKS)], ms=5, lw=1, capsize=2,
                color=f"C{tasks.index(pair.task)}", mfc=None if known else "white",
                label=f"{pair.task}, {pair.way}{'' if known else ', not reached'}",
            )  # fmt: skip
        panel.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
        label_axes(panel, "time to equal quality, over exact", "advise predicted", "found")

    return picture(out, "predictions", 1, panel_of, size=(6.6, 4.2))
