"""The answer of ``advise``: the options that were tried, and the one that pays, if any."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, TypeVar

from torch import nn

from ...core.table import Column, Report, Table, words
from ..noise.estimate import Estimate
from ..noise.pace import DROWNED
from ..words import change_in_words, with_error
from .candidates import Candidate
from .trial import Trial

OUT_OF_TIME = "not tried: the time was used up"
MARGIN = 0.02
"""What a change has to gain at least, so that it is advised."""
LONGER = 1.2
"""Whole trainings need up to so many times what is predicted: with it the intervals hold four of
five of those on record (``docs/results/pay``)."""
OTHER_BATCHES = 1.1
"""The same where there is no noise: as many steps are needed, and batches differ in their time."""
VISIBLE = 1.5
"""Standard errors of the gradient's agreement between batches, from which on it is seen."""
FEWEST_BATCHES = 4
"""Fewer cannot agree that clearly."""
FREE = 1e-3
"""Noise below it costs nothing, whatever the gradient is."""

LEAST_STEPS = 100
"""Of exact training, before it is worth asking again."""
_TRIAL = "sp.trial(...), or --trial 5 on the command line"

Model = TypeVar("Model", bound=nn.Module)


class Answer(StrEnum):
    PAYS = "it pays"
    HALVE = "halve the batch"
    UNKNOWN = "no answer yet"
    CLOSE = "too close to call"
    STAY = "stay exact"


@dataclass(frozen=True)
class Option:
    """One candidate with its measurements, relative to an exact step with the whole batch."""

    name: str
    line: str
    """What to paste; empty for the smaller batch."""
    time: float | None = None
    """ρ: the time of a step."""
    noise: float | None = None
    """How many more steps are needed: V/(‖g‖² + σ²) with SGD; ``noise/pace.py`` for Adam."""
    change: float | None = None
    """ρ(1 + noise): the predicted time to equal quality."""
    error: float = math.inf
    memory: float | None = None
    """Bytes kept for backward."""
    note: str = ""
    worst: float | None = None
    """The largest V/(‖g‖² + σ²) of the parameters of one layer or block."""

    @property
    def in_all(self) -> Estimate | None:
        """The change with its error."""
        return None if self.change is None else Estimate(self.change, self.error)

    @property
    def sound(self) -> bool:
        """Whether it was measured, and its noise does not drown the gradient."""
        return self.change is not None and self.noise is not None and self.noise <= DROWNED

    @property
    def noisy(self) -> bool:
        return (self.noise or 0.0) > FREE

    @property
    def interval(self) -> tuple[float, float]:
        """Four of five whole runs lie in it. Its lower end is ``time``, as if noise were free."""
        longer = LONGER if self.noisy else OTHER_BATCHES
        return self.time or 0.0, longer * _change(self) + 2 * self.error

    @property
    def numbers(self) -> str:
        """Time and noise in words."""
        return (
            f"a step with {self.name} takes {change_in_words(self.time or 1.0, 'time')}, training "
            f"takes {change_in_words(1 + (self.noise or 0.0), 'steps')}, together "
            f"{change_in_words(_change(self), 'time')}"
        )


@dataclass(frozen=True)
class Advice(Report):
    """The answer of ``advise``: printable, ``.pays``, ``.line``, ``.reason``, ``.apply_()``."""

    ANSWERS: ClassVar[tuple[str, ...]] = ("answer", "pays", "change", "interval", "line", "reason")

    options: tuple[Option, ...]
    control: Option | None
    """Half of the batch, exact; ``None`` with ``control=False`` or if a batch cannot be cut. If
    there was no time to measure it, its ``change`` is ``None``."""
    signal: float
    """‖g‖²/σ²."""
    visible: float
    """How far the agreement of the batches' gradients is above 0, in standard errors."""
    live: float
    """The share of rows of the gradient that are not zero: below 1 with padding."""
    per_label: float
    """Tokens that share one label: the more, the less noise it is to leave some out."""
    batches: int
    given: int
    """Different batches that were given; the time allowed ``batches`` of them."""
    steps: int | None
    """Steps that the optimizer has made; ``None`` if it does not count them."""
    seconds: float
    warnings: tuple[str, ...]
    candidates: Mapping[str, Candidate] = field(repr=False)
    """By the option's name: what to do."""
    trial: Trial | None = None
    """A short training that followed, if it was asked for."""

    @property
    def hidden(self) -> bool:
        """Whether the batches do not show the gradient; then the cost of noise is unknown."""
        return self.visible < VISIBLE

    @property
    def best(self) -> Option | None:
        """The sound option with the least change; if ``hidden``, first those without noise."""
        sound = [option for option in self.options if option.sound]
        free = [option for option in sound if _gains(option) and not option.noisy]
        return min(free if self.hidden and free else sound, key=_change, default=None)

    @property
    def closest(self) -> Option:
        """``best``; if the noise of each drowns the gradient, the one with the least change."""
        return self.best or min(self.options, key=_change)

    @property
    def answer(self) -> Answer:
        if self.gains:
            sure = self._half_is_better and self.control and self.control.interval[1] < 1
            return Answer.HALVE if sure else Answer.PAYS
        faster = any((option.time or 1.0) <= 1 - MARGIN for option in self.options if option.noisy)
        if 2 * len(self.untried) >= len(self.options) or (self.hidden and faster):
            return Answer.UNKNOWN
        return Answer.CLOSE if self.best and _change(self.best) <= 1 - MARGIN else Answer.STAY

    @property
    def pays(self) -> bool:
        """Whether the best option is the best thing to do."""
        return self.answer == Answer.PAYS

    @property
    def gains(self) -> bool:
        """Whether all of the best option's interval gains over exact steps on the same batch."""
        best = self.best
        return best is not None and _gains(best) and not (self.hidden and best.noisy)

    @property
    def _half_is_better(self) -> bool:
        """Whether half of the batch is ahead, by two standard errors, of exact steps on the whole
        and of an option that gains."""
        best, control = self.best, self.control
        if control is None or control.change is None or self.hidden:
            return False
        bar, error = (_change(best), best.error) if best and self.gains else (1.0, 0.0)
        return bar - control.change > max(MARGIN, 2 * math.hypot(error, control.error))

    @property
    def untried(self) -> list[Option]:
        """Those for which there was no time."""
        return [option for option in self.options if option.note == OUT_OF_TIME]

    @property
    def change(self) -> float:
        """The predicted time to equal quality over that of exact steps; 1 for 'stay exact'."""
        return _change(self.closest) if self.pays else 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """That of ``closest``: it holds four of five whole training runs; 1 for 'stay exact'."""
        return (1.0, 1.0) if self.answer == Answer.STAY else self.closest.interval

    @property
    def line(self) -> str:
        """What to paste; empty for 'stay exact'."""
        return self.closest.line if self.pays else ""

    @property
    def reason(self) -> str:
        best = self.best
        tried = [option for option in self.options if option.time is not None]
        if all((option.time or 1.0) > 1 - MARGIN for option in tried):
            fastest = min(tried, key=lambda option: option.time or 1.0)
            return (
                f"nothing that was tried makes a step faster here; {fastest.name} comes closest "
                f"with {change_in_words(fastest.time or 1.0, 'time')}"
            )
        if best is None:
            calmest = min(tried, key=lambda option: option.noise or 0.0)
            return (
                f"the noise of each drowns the gradient; the calmest, {calmest.name}, needs "
                f"{change_in_words(1 + (calmest.noise or 0.0), 'steps')}"
            )
        first = ""
        if self.answer == Answer.UNKNOWN:
            first = "what its noise costs is not known; " if self.hidden else ""
        elif self.answer == Answer.CLOSE:
            first = "whole trainings differ from such predictions by more than this; "
        elif not self.gains:
            first = "what is saved is not worth the noise; "
        elif self.answer == Answer.HALVE:
            first = f"half of the batch gains more: {self._half_text}; on the whole "
        return first + best.numbers

    def apply_(self, model: Model) -> Model:
        """Sketches ``model`` as advised, in place; leaves it as it is for 'stay exact'."""
        return self.candidates[self.closest.name].apply_(model) if self.pays else model

    def headline(self) -> str:
        best, why = self.closest, ["", f"Why: {self.reason}."]
        match self.answer:
            case Answer.PAYS:
                said = f"{change_in_words(self.change, 'time')} to the same quality"
                lines = [f"It pays: {said} ({between(best)}).", "", f"    {best.line}", *why]
            case Answer.HALVE:
                lines = [
                    f"Halve the batch: {self._half_text} to the same quality. Then ask again.",
                    *("", f"With the batch as it is, {change_in_words(_change(best), 'time')}:"),
                    *("", f"    {best.line}", "", f"Why: {best.numbers}."),
                ]
            case Answer.UNKNOWN:
                lines = [f"No answer yet: {self._missing}", "", f"So far: {self.reason}."]
            case Answer.CLOSE:
                said = f"{between(best)} time to the same quality with {best.name}"
                lines = [f"Too close to call: {said}.", f"A short training tells: {_TRIAL}.", *why]
            case _:
                lines = ["Stay exact: no sketch pays here.", *why]
        if self.answer in (Answer.PAYS, Answer.CLOSE, Answer.STAY) and self._half_is_better:
            lines.append(f"Half of the batch: {self._half_text}.")
        notes = [f"Note: {text}." for text in self.warnings]
        tried = [] if self.trial is None else [self.trial.headline()]
        return "\n".join([*lines, *tried, *notes])

    @property
    def _missing(self) -> str:
        """What an answer would need."""
        count, missing = len(self.options), len(self.untried)
        if 2 * missing >= count:
            more = math.ceil(self.seconds / 60 * count / (count - missing))
            return (
                f"{missing} of {count} sketches were not tried in the time; give {more} minutes, "
                "or smaller batches."
            )
        if self.batches < FEWEST_BATCHES:
            what = "more minutes" if self.given > self.batches else "at least 8, better 32"
            return f"{self.batches} batches cannot show the gradient; give {what}."
        steps = (
            "as many steps again" if self.steps is None else f"{max(LEAST_STEPS, self.steps)} steps"
        )
        return (
            "the noise of the batches hides the gradient, as on a plateau. Train exactly for "
            f"{steps} and ask again, give more batches, or run a short training: {_TRIAL}."
        )

    @property
    def _half_text(self) -> str:
        assert self.control is not None
        change, error = _change(self.control), self.control.error
        said = change_in_words(change, "time")
        return f"exact steps on half of it need {said} ({with_error(change, error)})"

    def tables(self) -> list[Table]:
        columns = (
            *(words("tried"), Column("time", ".3f"), Column("noise", ".3g")),
            *(Column("worst", ".2g"), Column("in all"), Column("memory", ".3f"), words("note")),
        )
        shown = [*sorted(self.options, key=_change), *([self.control] if self.control else [])]
        rows = [(o.name, o.time, o.noise, o.worst, o.in_all, o.memory, o.note) for o in shown]
        note = (
            "Relative to exact steps. time: per step; noise: the share of extra steps; worst: "
            "V/(‖g‖² + σ²) of the noisiest layer or block; in all: time × (1 + noise), the time to "
            "the same quality; memory: bytes saved for backward. "
            f"{self.batches} batches, {self.seconds:.0f} s. Mean gradient over minibatch noise: "
            f"‖g‖²/σ² = {self.signal:.3g}; the larger, the less noise costs. The gradient is "
            f"visible at {self.visible:.1f} standard errors ({VISIBLE} are needed)."
        )
        if self.live < 1:
            note += f" {self.live:.0%} of the gradient's rows are not zero; the others, such as "
            note += "padding, cost nothing to leave out."
        if any(candidate.of_blocks for candidate in self.candidates.values()):
            note += (
                f" {self.per_label:.0f} tokens share a label: the more do, the fewer are needed."
            )
        candidates = Table("Candidates", columns, rows, note)
        return [candidates, *([] if self.trial is None else self.trial.tables())]


def _gains(option: Option) -> bool:
    """Whether all of its interval is a gain."""
    return _change(option) <= 1 - MARGIN and option.interval[1] < 1


def between(option: Option) -> str:
    """Its interval in words.

    >>> between(Option("", "", time=0.6, noise=0.1, change=0.7, error=0.0))
    'between 40 % and 16 % less'
    >>> between(Option("", "", time=0.8, noise=0.1, change=0.9, error=0.02))
    'between 20 % less and 12 % more'
    """
    low, high = ((edge < 1, f"{100 * abs(edge - 1):.0f} %") for edge in option.interval)
    words = {True: "less", False: "more"}
    first = low[1] if low[0] == high[0] else f"{low[1]} {words[low[0]]}"
    return f"between {first} and {high[1]} {words[high[0]]}"


def _change(option: Option) -> float:
    return math.inf if option.change is None else option.change
