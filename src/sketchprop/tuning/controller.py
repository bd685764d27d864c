"""What probes have found so far, and the budgets that follow: numbers, no tensors."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from ..core.table import plain_data
from ..meters.noise.pace import HUGE
from .rule import LADDER, Problem, best, calmed, odds, undrowned

GAIN = 0.02
"""A move has to promise more than that."""
TIMED = 3
"""So many probes are timed; then the times are frozen."""
FURTHEST = 2
"""So many rungs down in one move: noise may grow faster than 1/p."""
STEEPEST = 3.0
"""The largest γ that is believed."""
PASSES_BESIDE = 4
"""Passes of a probe beside one for each unit: warming up, exact twice, all units."""
WANTED = 3
"""Probes that a training of known length should have, if need be with fewer units."""
LARGEST_SCALE = 4.0
"""All units together are timed better than each alone: so much their sum may be corrected by."""
LARGEST_WAIT = 6
"""While the answer stays 'exact' the wait between probes doubles, so many times."""


@dataclass(frozen=True)
class Probe:
    """What one look at training found, at the budgets of ``Controller.probe_rungs``."""

    exact: float
    """Seconds of an exact pass."""
    alone: tuple[float, ...]
    """Seconds of a pass with one unit sketched, for each unit."""
    together: float
    """Seconds of a pass with all of them."""
    elsewhere: float
    """Seconds of a step that are not in such a pass: optimizer and data."""
    cost: float
    """Seconds that the probe took."""
    total: float
    """‖g‖² of the batch, an estimate of ‖g‖² + σ²."""
    noise: tuple[float, ...]
    """V with one unit sketched, for each unit: ‖ĝ - g‖², or what costs SGD as many steps."""
    noise_together: float
    added: float = 0.0
    """‖ĝ - g‖² with all units sketched."""
    worst: float = 0.0
    """The largest ‖ĝ - g‖²/‖g‖² of the parameters of one layer or block, with all sketched."""
    sigma2: float = math.nan
    """σ² ≈ ½‖g - g'‖², g' of the batch before; NaN where there was none."""

    def ignored(self, timed: bool) -> str:
        """Why it says nothing; empty if it does. ``timed``: whether its seconds count."""
        numbers = (self.total, self.noise_together, self.together, *self.noise, *self.alone)
        if not (self.total > 0 and all(map(math.isfinite, numbers))):
            return "the probe is not finite: ignored"
        if timed and min(self.exact, self.together, *self.alone) <= 0:
            return "the clock stood still or went back: ignored"
        return ""


@dataclass
class Controller:
    """Budgets of some units, moved so that T·N is least.

    ``kinds``: units of one kind have the same shapes; their times are pooled. All fields are plain
    numbers and lists.
    """

    kinds: list[int]
    budgets: list[float]
    power: float = 1.0
    total: float = 0.0
    noise_rungs: list[float] = field(default_factory=list)
    """The budgets at which ``noise`` was seen."""
    noise: list[float] = field(default_factory=list)
    together: float = 0.0
    """V of all units at ``noise_rungs``, not averaged."""
    factor: float = 1.0
    """V of the whole network over the sum of the units'."""
    times: list[dict[str, Any]] = field(default_factory=list)
    """The probes that were timed, each with its ``rungs``."""
    stays: int = 0
    """How often in a row the answer was 'exact'."""

    @property
    def frozen_times(self) -> bool:
        return len(self.times) >= TIMED

    def probe_rungs(self) -> list[float]:
        """The budgets to probe at: those in force; where it is exact, two and four rungs down.

        In turns, from unit to unit and from probe to probe: at one budget alone a sketch that
        has a fixed cost, and pays only further down, would look as if it never paid.
        """
        starts = LADDER[FURTHEST], LADDER[2 * FURTHEST]
        turn = len(self.times)
        return [starts[(i + turn) % 2] if p == 1 else p for i, p in enumerate(self.budgets)]

    def learn(self, probe: Probe) -> dict[str, Any]:
        """Takes a probe in, moves the budgets, and says what was decided."""
        ignored = probe.ignored(timed=not self.frozen_times)
        if ignored:
            return {"moved": False, "why": ignored}
        rungs = self.probe_rungs()
        if not self.frozen_times:
            self.times.append({**plain_data(probe), "rungs": rungs})
        self._learn_noise(probe, rungs)
        problem, before = self.problem(), self.budgets
        self.budgets, why = self._target(problem)
        now, exact = self.budgets, [1.0] * len(before)
        self.stays = self.stays + 1 if before == now == exact else 0
        said = {"change": problem.change(now), "noise": problem.added(now), "worst": probe.worst}
        time = problem.time(now) / problem.time(exact)
        return {"moved": before != now, "why": why, **said, "time": time, "power": self.power}

    def watch(self, probe: Probe) -> dict[str, Any]:
        """What sketches that stay as they are do to a step; noise as in ``learn``."""
        ignored = probe.ignored(timed=True)
        if ignored:
            return {"moved": False, "why": ignored}
        self._learn_noise(probe, self.probe_rungs())
        noise = self.factor * math.fsum(self.noise) / self.total
        time = (probe.together + probe.elsewhere) / (probe.exact + probe.elsewhere)
        said = {"change": time * (1 + noise), "noise": noise, "worst": probe.worst, "time": time}
        said["added"] = probe.added
        sigma2 = {} if math.isnan(probe.sigma2) else {"sigma2": probe.sigma2}
        return {"moved": False, "why": "frozen", **said, **sigma2}

    def wait(self, share: float) -> int:
        """Steps until the next probe, so that probes take at most ``share`` of the time."""
        return max(1, math.ceil(self.probe_steps / share)) * self.patience

    @property
    def patience(self) -> int:
        """By how much a wait is longer than need be: while the answer stays 'exact' it doubles."""
        return 1 << min(self.stays, LARGEST_WAIT)

    @property
    def probe_steps(self) -> float:
        """How many steps take as long as a probe."""
        step = self.problem().time(self.budgets) if self.times else 0.0
        if step <= 0:
            return float(passes(len(self.budgets)))
        return float(median(timed["cost"] for timed in self.times) / step)

    def problem(self) -> Problem:
        """T and N as far as they are known."""
        slopes, fixed = self._lines()
        whole = median(t["exact"] + t["elsewhere"] for t in self.times)
        a = [
            self.factor * v / self.total / odds(p) ** self.power
            for v, p in zip(self.noise, self.noise_rungs, strict=True)
        ]
        # By chance a line may save more than there is.
        most = math.fsum(c for c in slopes if c > 0)
        if most > whole:
            slopes = [c * whole / most if c > 0 else c for c in slopes]
            fixed = [h * whole / most for h in fixed]
        rest = whole - math.fsum(slopes)
        return Problem(rest, tuple(slopes), tuple(a), self.power, tuple(fixed))

    def _lines(self) -> tuple[list[float], list[float]]:
        """cᵢ and hᵢ: a line for each kind of units, over all probes, corrected by the whole."""
        savings: dict[int, dict[float, list[float]]] = {kind: {} for kind in self.kinds}
        for timed in self.times:
            for kind, p, alone in zip(self.kinds, timed["rungs"], timed["alone"], strict=True):
                savings[kind].setdefault(1 - p, []).append(timed["exact"] - alone)
        lines = [_line({u: median(s) for u, s in savings[k].items()}) for k in self.kinds]
        together = [timed["exact"] - timed["together"] for timed in self.times]
        ratios = []
        for timed, saved in zip(self.times, together, strict=True):
            pairs = zip(lines, timed["rungs"], strict=True)
            expected = math.fsum(c * (1 - p) - h for (c, h), p in pairs)
            if expected > 0:
                ratios.append(saved / expected)
        scale = min(LARGEST_SCALE, max(0.0, median(ratios))) if ratios else 1.0
        # A unit alone is timed poorly: where all together are not faster, none is believed to be.
        if median(together) <= 0:
            scale = 0.0
        return [c * scale if c > 0 else c for c, _ in lines], [h * scale for _, h in lines]

    def _learn_noise(self, probe: Probe, rungs: list[float]) -> None:
        if not self.noise_rungs:
            self.total, self.noise = probe.total, list(probe.noise)
        else:
            self._learn_power(probe, rungs)
            # A batch with a huge gradient, now or before, counts as a few usual ones.
            old = min(1.0, HUGE * probe.total / self.total) / 2
            new = min(1.0, HUGE * self.total / probe.total) / 2
            self.total = old * self.total + new * probe.total
            moved = [
                v * (odds(q) / odds(p)) ** self.power
                for v, q, p in zip(self.noise, rungs, self.noise_rungs, strict=True)
            ]
            self.noise = [old * v + new * w for v, w in zip(moved, probe.noise, strict=True)]
        self.noise_rungs = rungs
        self.together = probe.noise_together
        alone = math.fsum(probe.noise)
        if alone > 0:
            self.factor = probe.noise_together / alone

    def _learn_power(self, probe: Probe, rungs: list[float]) -> None:
        """γ from V of the whole network at the budgets of this probe and of the one before."""
        alone = math.fsum(self.noise)
        if not (alone > 0 and self.together > 0 and probe.noise_together > 0):
            return
        expected = math.fsum(
            v / alone * odds(new) / odds(old)
            for v, new, old in zip(self.noise, rungs, self.noise_rungs, strict=True)
        )
        if abs(math.log(expected)) > 0.3:
            seen = math.log(probe.noise_together / self.together) / math.log(expected)
            self.power = (self.power + min(STEEPEST, max(1.0, seen))) / 2

    def _target(self, problem: Problem) -> tuple[list[float], str]:
        now = self.budgets
        safe = undrowned(problem, now)
        if safe != now:
            return safe, "the noise drowns the gradient: back to exact"
        wanted = calmed(problem, best(problem, LADDER, now), LADDER)
        calm = calmed(problem, now, LADDER) == now
        if calm and problem.score(wanted) > (1 - GAIN) * problem.score(now):
            return now, "no move gains enough"
        rungs = [self._no_further(p, q) for p, q in zip(now, wanted, strict=True)]
        return calmed(problem, rungs, LADDER), "time × noise is smaller"

    def _no_further(self, now: float, wanted: float) -> float:
        place = LADDER.index(now) if now in LADDER else 0
        return max(wanted, LADDER[min(place + FURTHEST, len(LADDER) - 1)])

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Controller:
        return cls(**state)


def passes(units: int) -> int:
    """Of a probe; one unit alone is all units."""
    return PASSES_BESIDE + (units if units > 1 else 0)


def affordable(most: int, steps: float) -> int:
    """So many units, at most ``most``, that three probes take ``steps`` steps; at least one.

    >>> affordable(8, 14.4), affordable(8, 21), affordable(8, 90)
    (1, 3, 8)
    """
    return max([n for n in range(1, most + 1) if WANTED * passes(n) <= steps], default=1)


def _line(saved: dict[float, float]) -> tuple[float, float]:
    """c and h of the line c·u - h through the seconds saved at u = 1 - p, with h ≥ 0."""
    us, seconds = list(saved), list(saved.values())
    if len(us) > 1:
        mean_u, mean_s = fmean(us), fmean(seconds)
        spread = math.fsum((u - mean_u) ** 2 for u in us)
        c = math.fsum((u - mean_u) * s for u, s in saved.items()) / spread
        if c > 0 and c * mean_u >= mean_s:
            return c, c * mean_u - mean_s
    # One point, or a fixed gain, which no sketch has: a line through the origin.
    square = math.fsum(u * u for u in us)
    return math.fsum(u * s for u, s in saved.items()) / square, 0.0
