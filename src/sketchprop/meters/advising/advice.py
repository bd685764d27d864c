"""The answer of ``advise``: the options that were tried, and the one that pays, if any."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from torch import nn

from ...core.table import Column, Report, Table, words
from ..noise.estimate import Estimate
from ..noise.pace import DROWNED
from ..words import change_in_words, ratio, with_error
from .candidates import Candidate
from .trial import Trial

OUT_OF_TIME = "not tried: the time was used up"
MARGIN = 0.02
"""What a change has to gain at least, so that it is advised."""

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Option:
    """One candidate and what was measured; over an exact step with the whole batch."""

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
    """V/(‖g‖² + σ²) of the layer or block whose own parameters feel most of it."""

    @property
    def in_all(self) -> Estimate | None:
        """The change with its error."""
        return None if self.change is None else Estimate(self.change, self.error)

    @property
    def sound(self) -> bool:
        """Whether it was measured, and its noise does not drown the gradient."""
        return self.change is not None and self.noise is not None and self.noise <= DROWNED

    @property
    def numbers(self) -> str:
        """Time and noise in words."""
        return (
            f"a step with {self.name} takes {ratio(self.time or 1.0)} the time and "
            f"{ratio(1 + (self.noise or 0.0))} the steps are needed, together "
            f"{with_error(_change(self), self.error)}"
        )


@dataclass(frozen=True)
class Advice(Report):
    """The answer of ``advise``: printable, ``.pays``, ``.line``, ``.reason``, ``.apply_()``."""

    ANSWERS: ClassVar[tuple[str, ...]] = ("pays", "change", "line", "reason")

    options: tuple[Option, ...]
    control: Option | None
    """Half of the batch, exact; ``None`` if the batch is given or cannot be cut, not measured: no
    time."""
    signal: float
    """‖g‖²/σ²."""
    live: float
    """The share of rows of the gradient that are not zero: below 1 with padding."""
    batches: int
    seconds: float
    warnings: tuple[str, ...]
    candidates: Mapping[str, Candidate] = field(repr=False)
    """By the option's name: what to do."""
    trial: Trial | None = None
    """A short training that followed, if it was asked for."""

    @property
    def best(self) -> Option | None:
        """The sound option with the least change."""
        return min((o for o in self.options if o.sound), key=_change, default=None)

    @property
    def closest(self) -> Option:
        """``best``, or where each drowns the gradient the one with the least change."""
        return self.best or min(self.options, key=_change)

    @property
    def pays(self) -> bool:
        """Whether the best option is the best thing to do."""
        return self.gains and not self._half_is_better

    @property
    def gains(self) -> bool:
        """Whether the best option is ahead of exact steps on the same batch."""
        best = self.best
        return best is not None and _change(best) <= 1 - max(MARGIN, best.error)

    @property
    def _half_is_better(self) -> bool:
        """Whether half of the batch is ahead, by two standard errors, of exact steps on the whole
        and of an option that gains."""
        best, control = self.best, self.control
        if control is None or control.change is None:
            return False
        bar, error = (_change(best), best.error) if best and self.gains else (1.0, 0.0)
        return bar - control.change > max(MARGIN, 2 * math.hypot(error, control.error))

    @property
    def untried(self) -> list[Option]:
        """Those for which there was no time."""
        return [option for option in self.options if option.note == OUT_OF_TIME]

    @property
    def decided(self) -> bool:
        """Whether it pays, or most were tried and none does."""
        return self.pays or 2 * len(self.untried) < len(self.options)

    @property
    def change(self) -> float:
        """The predicted time to equal quality over that of exact steps; 1 for 'stay exact'."""
        return _change(self.closest) if self.pays else 1.0

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
                f"with {ratio(fastest.time or 1.0)} the time"
            )
        if best is None:
            calmest = min(tried, key=lambda option: option.noise or 0.0)
            return (
                f"the noise of each drowns the gradient; the calmest, {calmest.name}, needs "
                f"{ratio(1 + (calmest.noise or 0.0))} the steps"
            )
        if not self.gains:
            return f"what is saved is not worth the noise, or too close to call; {best.numbers}"
        if self._half_is_better:
            return f"half of the batch gains more: {self._half_text}; on the whole {best.numbers}"
        return best.numbers

    def apply_(self, model: Model) -> Model:
        """Sketches ``model`` as advised, in place; leaves it as it is for 'stay exact'."""
        return self.candidates[self.closest.name].apply_(model) if self.pays else model

    def headline(self) -> str:
        if self.pays:
            first = f"It pays: {change_in_words(self.change, 'time')} to the same quality."
            lines = [first, "", f"    {self.line}", "", f"Why: {self.reason}."]
        elif self.gains:
            best = self.closest
            first = f"Halve the batch: {self._half_text} to the same quality. Then ask again."
            second = f"With the batch as it is, {change_in_words(_change(best), 'time')}:"
            lines = [first, "", second, "", f"    {best.line}", "", f"Why: {best.numbers}."]
        elif self.decided:
            lines = ["Stay exact: no sketch pays here.", "", f"Why: {self.reason}."]
            if self._half_is_better:
                lines.append(f"Half of the batch: {self._half_text}.")
        else:
            count, missing = len(self.options), len(self.untried)
            more = math.ceil(self.seconds / 60 * count / (count - missing))
            first = (
                f"No answer yet: {missing} of {count} sketches were not tried in the time; "
                f"give {more} minutes, or smaller batches."
            )
            lines = [first, "", f"So far: {self.reason}."]
        notes = [f"Note: {text}." for text in self.warnings]
        tried = [] if self.trial is None else [self.trial.headline()]
        return "\n".join([*lines, *tried, *notes])

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
        hidden = "0: the batches' noise hides the gradient"
        note = (
            "All over exact steps. time: of a step; noise: the steps that it adds; worst: V "
            "over ‖g‖² + σ² in the layer or block that feels most, which a mean hides; in all: "
            "time × (1 + noise), the time to the same quality; memory: bytes kept for backward. "
            f"{self.batches} batches, {self.seconds:.0f} s. ‖g‖²/σ², the mean gradient over the "
            f"batches' noise: {f'{self.signal:.3g}' if self.signal else hidden}; noise costs less "
            "where it is large."
        )
        if self.live < 1:
            note += f" {self.live:.0%} of the gradient's rows are not zero, the others are padding."
        candidates = Table("Candidates", columns, rows, note)
        return [candidates, *([] if self.trial is None else self.trial.tables())]


def _change(option: Option) -> float:
    return math.inf if option.change is None else option.change
