"""The answer of ``trial``: losses against seconds, and who is ahead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from ...core.table import Column, Table, as_text, words
from ..measure import plain_data
from ..noise.estimate import Estimate
from ..words import change_in_words, with_error

EXACT = "exact"
HALF = "half of the batch"
CERTAIN = 2
"""Standard errors from which on a difference counts."""


@dataclass(frozen=True)
class Moment:
    """Where a run was: seconds and steps of its own training, its loss on batches kept apart."""

    seconds: float
    steps: int
    loss: float


@dataclass(frozen=True)
class Way:
    """One way to train, and its curves: one for each repeat, from the same weights."""

    name: str
    line: str
    """What to paste; empty for exact gradients."""
    curves: tuple[tuple[Moment, ...], ...]

    @property
    def loss(self) -> Estimate:
        """At the end, the mean over repeats."""
        return _estimate([curve[-1].loss for curve in self.curves])

    @property
    def steps(self) -> float:
        return fmean(curve[-1].steps for curve in self.curves)


@dataclass(frozen=True)
class Trial:
    """The answer of ``trial``: printable, ``.ways``, ``.ahead``, ``.change(name)``."""

    ways: tuple[Way, ...]
    """Exact training first."""
    different: int
    """Batches that were trained on; each way met them in the same order."""
    held: int
    """Batches that were kept apart for the losses."""
    seconds: float

    @property
    def repeats(self) -> int:
        return len(self.ways[0].curves)

    def way(self, name: str) -> Way:
        found = [way for way in self.ways if way.name == name]
        if not found:
            known = ", ".join(repr(way.name) for way in self.ways)
            raise KeyError(f"{name!r} was not tried; there are {known}")
        return found[0]

    @property
    def ahead(self) -> str:
        """The way with the least loss at the end, all having trained equally long."""
        return min(self.ways, key=lambda way: _or_infinite(way.loss.value)).name

    def gain(self, name: str) -> Estimate:
        """The loss of exact training less that of ``name`` at the end; above 0 it is ahead."""
        pairs = zip(self.ways[0].curves, self.way(name).curves, strict=True)
        return _estimate([exact[-1].loss - own[-1].loss for exact, own in pairs])

    def change(self, name: str) -> Estimate | None:
        """The time to a loss that both reach, over exact's; ``None`` if none fell.

        The loss is the higher of the two best ones, times by straight lines through the lowest
        losses so far; repeat by repeat.
        """
        pairs = zip(self.ways[0].curves, self.way(name).curves, strict=True)
        ratios = [_time_ratio(exact, own) for exact, own in pairs]
        known = [ratio for ratio in ratios if ratio is not None]
        return _estimate(known) if len(known) == len(ratios) else None

    def certain(self, name: str) -> bool:
        """Whether ``name`` and exact differ at the end by more than two standard errors."""
        gain = self.gain(name)
        return math.isfinite(gain.error) and abs(gain.value) > CERTAIN * gain.error

    def as_dict(self) -> dict[str, Any]:
        compared = {
            way.name: {"gain": self.gain(way.name), "change": self.change(way.name)}
            for way in self.ways[1:]
        }
        facts = {"different": self.different, "held": self.held, "seconds": self.seconds}
        answer = {"ahead": self.ahead, "compared": compared, "ways": self.ways, **facts}
        data: dict[str, Any] = plain_data(answer)
        return data

    def headline(self) -> str:
        return "\n".join(map(self._said, self.ways[1:]))

    def _said(self, way: Way) -> str:
        gain, change = self.gain(way.name), self.change(way.name)
        seconds = fmean(curve[-1].seconds for curve in way.curves)
        if not math.isfinite(gain.value):
            return f"Tried: {way.name} lost its way: its loss is not finite."
        place = "ahead of" if gain.value > 0 else "behind"
        doubt = "" if self.certain(way.name) else ", within its error"
        error = f"{gain.error:.2g}" if math.isfinite(gain.error) else "?"
        text = (
            f"Tried: {way.name} is {place} exact{doubt}: after {seconds:.0f} s of training its "
            f"loss is {abs(gain.value):.3g} ± {error} {'lower' if gain.value > 0 else 'higher'}"
        )
        if change is None:
            return f"{text}. No loss fell far enough to compare times."
        return (
            f"{text}; to the same loss it takes {change_in_words(change.value, 'time')} "
            f"({with_error(change.value, change.error)})."
        )

    def tables(self) -> list[Table]:
        columns = (
            *(words("way"), Column("steps", ".0f"), Column("loss", ".4g"), Column("±", ".2g")),
            *(Column("time to its loss", ".3f"), Column("± ", ".2g")),
        )
        rows = []
        for way in self.ways:
            change = self.change(way.name)
            rows.append(
                (
                    *(way.name, way.steps, way.loss.value, _finite(way.loss.error)),
                    *(change and change.value, change and _finite(change.error)),
                )
            )
        note = (
            f"All began with the same weights and trained in turns, equally long, {self.repeats} "
            f"times; losses on {self.held} batches kept apart; {self.different} batches trained "
            f"on; {self.seconds:.0f} s in all."
        )
        return [Table("The trial", columns, rows, note)]

    def __str__(self) -> str:
        return as_text(self)


def _time_ratio(exact: Sequence[Moment], own: Sequence[Moment]) -> float | None:
    losses = [[moment.loss for moment in curve] for curve in (exact, own)]
    if not all(math.isfinite(loss) for curve in losses for loss in curve):
        return None
    goal = max(map(min, losses))
    if goal >= min(curve[0] for curve in losses):
        return None
    before, after = _reached(exact, goal), _reached(own, goal)
    return after / before if before > 0 else None


def _reached(curve: Sequence[Moment], goal: float) -> float:
    """Seconds until the lowest loss so far was ``goal``."""
    lowest = curve[0].loss
    for a, b in pairwise(curve):
        if b.loss <= goal:
            part = (lowest - goal) / (lowest - b.loss) if lowest > b.loss else 1.0
            return a.seconds + part * (b.seconds - a.seconds)
        lowest = min(lowest, b.loss)
    return curve[-1].seconds


def _estimate(values: Sequence[float]) -> Estimate:
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Estimate(fmean(values), error)


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
