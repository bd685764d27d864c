"""Which rates, batch sizes and lengths are run: decided stage by stage, and stored as a table.

1. Exact training and the leading way try rates at batch sizes.       (validation data, part of T)
2. The best size of each is known; other ways try rates at the sizes that they follow. With
   ``best_budget`` only the best of the kept tokens goes on.
3. With ``finals`` the best two rates of each way run for the whole time, and the better is taken.
4. Exact training runs to the end at its own rate and at those that others chose at that size.
   (test data; so the control is harder to beat)
5. The size at which it ends best is the control; lengths follow.

A stage looks only at those before it. Where runs are missing it says which they are, and the next
ones wait. Drawing reads the table and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from ..lab.checkpoints import Checkpoints
from ..lab.engine import Job
from ..lab.pages import read_csv, table, write_csv
from ..lab.store import Row
from ..lab.sweep import Run
from .contest import Contest
from .ways import EXACT, LEAD, PUBLISHED, Way, find_way

TABLE = "choices.csv"
CONTROL = "control"
FIRST = (1, 2, 3)
"""The places of the rates that are tried first; of the two beside them one may follow."""
BESIDE = {1: 0, 3: 4}
FINALISTS = 2
"""Rates that all seeds try which choose them; the first of these seeds tries more."""
TWO = (0.5, 1.0)
"""Lengths of time that say how soon exact training has what a way has."""


class Choice(NamedTuple):
    """A line of the table: a way at a batch size, its rate, and why."""

    task: str
    way: str
    batch: int
    role: str
    """``control``: exact training at its best."""
    rate: float | None
    """``None`` while it is not chosen."""
    lengths: tuple[float, ...]
    """Shares of the time at which it is run; none: it only tried rates."""
    why: str
    tried: str
    """Rates and their scores on validation data, by seed."""
    ended: str
    """The same in the whole time, in the mean over seeds; of exact training on test data."""


@dataclass
class Side:
    """A way at a batch size, while it is decided about."""

    way: Way
    batch: int
    why: str
    tried: list[Run] = field(default_factory=list)
    ranked: list[tuple[float, int]] = field(default_factory=list)
    """Scores and places of the rates that all choosing seeds tried, best first."""
    ended: dict[int, list[Run]] = field(default_factory=dict)
    """Runs in the whole time that decide between rates, by place."""
    place: int | None = None
    """Of the rate."""
    score: float = 0.0
    """Of exact training, in the whole time on test data."""
    certain: bool = False
    lengths: tuple[float, ...] = ()


class Decisions:
    """The stages for one contest, knowing what steps cost and the scores of runs that are done."""

    def __init__(self, contest: Contest, costs: Mapping[str, float], rows: Sequence[Row]) -> None:
        names = ("validation_accuracy", "test_accuracy")
        self.contest, self.costs = contest, costs
        self.scores: dict[str, float] = {row["run"]: row[names[row["tested"]]] for row in rows}
        self.sides: list[Side] = []
        self.control: int | None = None
        self.best: dict[str, list[int]] = {}
        """Batch sizes of a way, the one that did best on validation data first."""
        self.dropped: set[str] = set()
        """Kept tokens at budgets that others have beaten on validation data."""
        if contest.trained:
            ways = [find_way(name) for name in contest.ways]
            self._try_sizes(find_way(EXACT), contest.batches)
            if contest.lead in contest.ways:
                best = sorted(self.best.get(EXACT, [])[: contest.tried_sizes])
                self._try_sizes(
                    find_way(contest.lead), best if contest.tried_sizes else contest.batches
                )
            self._follow(way for way in ways if way.name not in (EXACT, contest.lead))
            if contest.best_budget:
                self._drop(ways)
            self.sides.sort(key=lambda side: contest.ways.index(side.way.name))
            for side in self.sides:
                if side.way.name != EXACT:
                    self._choose(side)
            self._choose_control()
            for side in self.sides:
                side.lengths = self._lengths(side)

    # -- stages ------------------------------------------------------------------------------------

    def _try_sizes(self, way: Way, sizes: Sequence[int]) -> None:
        # The unit of time first: other sizes may ask what was found there.
        order = sorted(sizes, key=lambda size: size != self.contest.middle)
        sides = [self._tried(way, size, "") for size in order]
        self.sides.sort(key=lambda side: sizes.index(side.batch) if side in sides else -1)
        if sides and all(side.ranked for side in sides):
            sides.sort(key=lambda side: -side.ranked[0][0])
            self.best[way.name] = [side.batch for side in sides]
            for rank, side in enumerate(sides, 1):
                side.why = f"size {rank} of {len(sides)} on validation data"

    def _drop(self, ways: Sequence[Way]) -> None:
        """All kept tokens but the best at its best size; all of them while that is not known."""
        kept = [way.name for way in ways if way.kept]  # in order: of equal ones the first goes on
        scores = {
            name: max((s.ranked[0][0] for s in self.sides if s.way.name == name and s.ranked),
                      default=None)
            for name in kept
        }  # fmt: skip
        known = {name: score for name, score in scores.items() if score is not None}
        best = max(known, key=lambda name: known[name]) if known and len(known) == len(kept) else ""
        self.dropped = set(kept) - {best}

    def _follow(self, ways: Iterable[Way]) -> None:
        for way in ways:
            for leader in way.follows:
                size, why = self.contest.published, "the published size"
                if leader != PUBLISHED:
                    name = self.contest.lead if leader == LEAD else leader
                    name = name if name in self.contest.ways else EXACT
                    size = next(iter(self.best.get(name, ())), 0)
                    why = f"the best size of {find_way(name).label}"
                if size and self.side(way.name, size) is None:
                    self._tried(way, size, why)

    def _tried(self, way: Way, batch: int, why: str) -> Side:
        """Three rates, one more where the best is at an edge, or those near to what is known; and
        the best two again with each further seed."""
        first, *others = self.contest.tuning_seeds
        cell = self.contest.cell(way, batch, self.contest.tuned_at, self.costs, tested=0)
        near = self._near(way, batch)
        runs = [Run(cell, place, first) for place in (FIRST if near is None else near)]
        if near is None and self.known(runs):
            best = max(runs, key=self._score).rate_index
            runs += [Run(cell, BESIDE[best], first)] if best in BESIDE else []
        if self.known(runs):
            finalists = sorted(runs, key=self._score, reverse=True)[:FINALISTS]
            runs += [Run(cell, run.rate_index, seed) for seed in others for run in finalists]
        side = Side(way, batch, why, runs)
        if self.known(runs):
            places = [run.rate_index for run in runs if run.seed == self.contest.tuning_seeds[-1]]
            means = [(self._mean(r for r in runs if r.rate_index == p), p) for p in places]
            side.ranked = sorted(means, key=lambda pair: -pair[0])
        self.sides.append(side)
        return side

    def _near(self, way: Way, batch: int) -> tuple[int, ...] | None:
        """With ``near`` exact training tries all rates at the unit of time; at another size the
        best of these and its neighbour, as the size wants it; the leading way the best of exact
        training at its size and the next smaller one; others that of the leading way. None of
        them while that is not known; ``None``: all."""
        if not self.contest.near or (way.name, batch) == (EXACT, self.contest.middle):
            return None
        step = 1 if way.name != EXACT or batch < self.contest.middle else -1
        leader = (EXACT, self.contest.middle if way.name == EXACT else batch)
        tries = way.name in (EXACT, self.contest.lead)
        known = self.side(*(leader if tries else (self.contest.lead, batch)))
        if known is None or not known.ranked:
            return ()
        best = known.ranked[0][1]
        beside = min(max(best + step, 0), len(self.contest.rates) - 1)
        return tuple(dict.fromkeys((best, beside) if tries else (best,)))

    def _choose(self, side: Side) -> None:
        """The best on validation data; with ``finals`` of two in the whole time."""
        if not side.ranked or not self._leads(side):
            side.place = side.ranked[0][1] if side.ranked else None
            return
        side.place, side.certain = side.ranked[0][1], not self.contest.finals
        why = f"best rate at {self.contest.tuned_at:g} T"
        if self.contest.finals:
            cell = self.contest.cell(side.way, side.batch, 1.0, self.costs, tested=0)
            for _, place in side.ranked[:FINALISTS]:
                side.ended[place] = [Run(cell, place, seed) for seed in self.contest.tuning_seeds]
            side.certain = all(map(self.known, side.ended.values()))
            if side.certain:
                side.place = max(side.ended, key=lambda p: self._mean(side.ended[p]))
                why = f"of its two best rates at {self.contest.tuned_at:g} T the better at T"
        side.why += f"; {why}"

    def _leads(self, side: Side) -> bool:
        """Whether it is reported, and at this size."""
        if side.way.name in self.dropped:
            return False
        tries = side.way.name in (EXACT, self.contest.lead)
        return not tries or self.best.get(side.way.name, [0])[0] == side.batch

    def _choose_control(self) -> None:
        """Exact training at its best sizes and at that of kept tokens: the size that ends best."""
        exact = [side for side in self.sides if side.way.name == EXACT and side.ranked]
        rivals = (
            {*self.best[EXACT][: self.contest.ended_sizes], *self._lead_size}
            if EXACT in self.best
            else set()
        )
        for side in exact:
            side.place = side.ranked[0][1]
            if side.batch in {*rivals, self.contest.published}:
                self._end(side)
        ends = {side.batch: side.score for side in exact if side.certain and side.batch in rivals}
        if rivals and set(ends) == rivals:
            self.control = max(ends, key=lambda size: ends[size])

    def _end(self, side: Side) -> None:
        """Exact training in the whole time: at its own rate, with ``finals`` at its best two, and
        at those which others chose at this size. The one that ends best on test data is taken."""
        count = FINALISTS if self.contest.finals else 1
        whose = {place: "own" for _, place in side.ranked[:count]}
        for other in self.sides:
            if other.batch == side.batch and other.certain and other.place is not None:
                whose.setdefault(other.place, other.way.label)
        side.ended = {place: self.reported(side, 1.0, place) for place in whose}
        scores = {p: self._mean(runs) for p, runs in side.ended.items() if self.known(runs)}
        side.certain = self.settled and len(scores) == len(whose)
        if not scores:
            return
        place = side.place = max(scores, key=lambda each: scores[each])
        side.score = scores[place]
        if side.certain:
            why = f"of {len(whose)} rates the one that ends best on test data ({whose[place]})"
            side.why += f"; {why if len(whose) > 1 else 'its own rate'}"

    def _lengths(self, side: Side) -> tuple[float, ...]:
        """All that a way has, at its size. Exact training: all where it is the control; two at its
        best size on validation data, at that of kept tokens and at the published one, which say
        what others gain there; else the whole time. With ``best_budget`` two, and the whole time:
        what others are held against is where it ends."""
        if side.way.name != EXACT:
            return (side.way.shares or self.contest.shares) if self._leads(side) else ()
        if self.contest.best_budget:
            return TWO if side.batch == self.control else (1.0,) if side.ended else ()
        if side.batch == self.control:
            return self.contest.shares
        leaders = [*self.best.get(EXACT, [])[:1], *self._lead_size]
        if side.batch in (*leaders, self.contest.published):
            return TWO
        return (1.0,) if side.ended else ()

    @property
    def _budgets(self) -> int:
        """How many of the ways keep tokens at a budget that stays."""
        return sum(find_way(name).kept for name in self.contest.ways)

    @property
    def _lead_size(self) -> list[int]:
        """The best size of the leading way, once it is known."""
        return self.best.get(self.contest.lead, [])[:1]

    # -- what is asked of them ---------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether all ways but exact training have their sizes and rates."""
        others = [n for n in self.contest.ways if n != EXACT and n not in self.dropped]
        certain = {side.way.name for side in self.sides if side.certain}
        leading = [s for s in self.sides if s.way.name != EXACT and self._leads(s)]
        if self.contest.best_budget and len(self.dropped) == self._budgets:
            return False  # the best of them is not known
        return set(others) <= certain and all(side.certain for side in leading)

    def runs(self) -> list[Run]:
        """All that can be told by now: those that choose, then the whole time, then the rest, seed
        by seed, so that what is known is balanced."""
        chosen = [run for side in self.sides for run in side.tried]
        chosen += [run for side in self.sides for runs in side.ended.values() for run in runs]
        reported = [
            run
            for side in self.sides
            if side.certain and side.place is not None
            for share in side.lengths
            for run in self.reported(side, share, side.place)
        ]
        reported.sort(key=lambda run: (-run.cell.time, run.seed))  # type: ignore[attr-defined]
        return list(dict.fromkeys([*chosen, *reported]))

    def missing(self) -> list[Run]:
        return [run for run in self.runs() if run.identity not in self.scores]

    def choices(self) -> list[Choice]:
        rates = self.contest.rates
        return [
            Choice(
                self.contest.task,
                side.way.name,
                side.batch,
                CONTROL if side.way.name == EXACT and side.batch == self.control else "",
                None if side.place is None else rates[side.place],
                side.lengths,
                side.why,
                self._tried_text(side),
                "; ".join(
                    f"{rates[place]:g}: {self._mean(done):.4g}"
                    for place, runs in side.ended.items()
                    if (done := [run for run in runs if run.identity in self.scores])
                ),
            )
            for side in self.sides
        ]

    def side(self, way: str, batch: int) -> Side | None:
        return next((s for s in self.sides if (s.way.name, s.batch) == (way, batch)), None)

    def reported(self, side: Side, share: float, place: int) -> list[Run]:
        return reported(self.contest, self.costs, side.way, side.batch, share, place)

    def known(self, runs: Iterable[Run]) -> bool:
        return all(run.identity in self.scores for run in runs)

    def _score(self, run: Run) -> float:
        return self.scores[run.identity]

    def _mean(self, runs: Iterable[Run]) -> float:
        return fmean(map(self._score, runs))

    def _tried_text(self, side: Side) -> str:
        scores: dict[float, list[str]] = {}
        for run in side.tried:
            score = self.scores.get(run.identity)
            text = "-" if score is None else f"{score:.4g}"
            scores.setdefault(run.learning_rate, []).append(text)
        return "; ".join(f"{rate:g}: {', '.join(texts)}" for rate, texts in scores.items())


def missing_jobs(
    contest: Contest, costs: Mapping[str, float], rows: Sequence[Row], checkpoints: Path
) -> list[Job]:
    saved = Checkpoints(checkpoints)
    return [Job((run,), saved) for run in Decisions(contest, costs, rows).missing()]


def reported(
    contest: Contest, costs: Mapping[str, float], way: Way, batch: int, share: float, place: int
) -> list[Run]:
    """One run for each seed, scored on test data."""
    cell = contest.cell(way, batch, share, costs, tested=1)
    return [Run(cell, place, seed) for seed in contest.seeds]


def choices_table(choices: Sequence[Choice]) -> str:
    """In Markdown, as a person reads it."""
    header = ("method", "batch", "rate", "runs", "why", "rate: score", "at T; exact: on test data")
    lines = [
        [
            find_way(choice.way).label + (f" ({choice.role})" if choice.role else ""),
            str(choice.batch),
            "" if choice.rate is None else f"{choice.rate:g}",
            ", ".join(f"{share:g} T" for share in choice.lengths),
            choice.why,
            choice.tried,
            choice.ended,
        ]
        for choice in choices
    ]
    return table(header, lines)


def write_choices(folder: Path, choices: Sequence[Choice]) -> Path:
    """The lines of their tasks are replaced, those of others stay."""
    tasks = {choice.task for choice in choices}
    stored = [choice for choice in read_choices(folder) if choice.task not in tasks]
    lines = [
        {**choice._asdict(), "lengths": " ".join(f"{share:g}" for share in choice.lengths)}
        for choice in (*stored, *choices)
    ]
    return write_csv(folder / TABLE, lines, short=False)


def read_choices(folder: Path) -> list[Choice]:
    """None where nothing was decided yet."""
    return [_choice(row) for row in read_csv(folder / TABLE)]


def _choice(row: dict[str, str]) -> Choice:
    rate = float(row.pop("rate") or "nan")
    batch, lengths = int(row.pop("batch")), tuple(map(float, row.pop("lengths").split()))
    return Choice(batch=batch, rate=None if isnan(rate) else rate, lengths=lengths, **row)
