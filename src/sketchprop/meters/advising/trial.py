"""The answer of ``trial``: losses against seconds, and who is ahead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from ...core.table import Column, Table, as_text, words
from ..measure import plain_data
from ..noise.estimate import Estimate
from ..words import change_in_words, with_error
from .curves import time_ratio

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
    busy: str = ""
    """What is to be said of a machine that others use at the same time."""

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

        Of the mean curves of all repeats, in the mean over most of the time; its error from
        leaving out one repeat after the other.
        """
        exact, own = (way.curves for way in (self.ways[0], self.way(name)))
        value = time_ratio(_mean_curve(exact), _mean_curve(own))
        if value is None:
            return None
        count = self.repeats
        others = [
            time_ratio(_mean_curve(_without(exact, i)), _mean_curve(_without(own, i)))
            for i in range(count)
            if count > 1
        ]
        known = [ratio for ratio in others if ratio is not None]
        if count == 1 or len(known) < count:
            return Estimate(value, math.inf)
        middle = fmean(known)
        spread = (count - 1) / count * math.fsum((ratio - middle) ** 2 for ratio in known)
        return Estimate(value, math.sqrt(spread))

    def certain(self, name: str) -> bool:
        """Whether ``name`` and exact differ at the end by more than two standard errors."""
        gain = self.gain(name)
        return math.isfinite(gain.error) and abs(gain.value) > CERTAIN * gain.error

    def as_dict(self) -> dict[str, Any]:
        compared = {
            way.name: {"gain": self.gain(way.name), "change": self.change(way.name)}
            for way in self.ways[1:]
        }
        facts = {"different": self.different, "held": self.held, "seconds": self.seconds,
                 "busy": self.busy}  # fmt: skip
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
        if self.busy:
            note += f" Note: {self.busy}."
        return [Table("The trial", columns, rows, note)]

    def __str__(self) -> str:
        return as_text(self)


Curves = Sequence[Sequence[Moment]]


def _mean_curve(curves: Curves) -> list[tuple[float, float]]:
    """Their mean at each moment: all repeats have trained equally long then."""
    return [
        (fmean(m.seconds for m in moments), fmean(m.loss for m in moments))
        for moments in zip(*curves, strict=True)
    ]


def _without(curves: Curves, place: int) -> Curves:
    return [curve for i, curve in enumerate(curves) if i != place]


def _estimate(values: Sequence[float]) -> Estimate:
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Estimate(fmean(values), error)


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
