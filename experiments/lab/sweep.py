"""A sweep: TOML in, runs out. A run's identity is the hash of all that decides its result."""

from __future__ import annotations

import hashlib
import json
import statistics
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..methods import EXACT, METHODS, PLACES, Method, find_method, make_sketch
from . import ExperimentError
from .checkpoints import Checkpoints

FIXED = ("base", "sketch", "layers", "dataset", "version")
"""What a TOML file cannot set."""
Findings = dict[str, Any]
"""What was found for a run; ``validation_curve`` and ``test_curve`` are always there."""


@dataclass(frozen=True, kw_only=True)
class Cell(ABC):
    """All that decides a result but learning rate and seed; each study has its own."""

    sketch: str = ""
    layers: str = PLACES[0]

    @cached_property
    def identity(self) -> str:
        return _hash(asdict(self))

    @property
    def network(self) -> str:
        """The model in a few words."""
        return type(self).__name__

    @property
    def together(self) -> int:
        """How many runs of a seed must be in one stack: all of its rates where they are halved."""
        return 1

    def learning_rate(self, index: int) -> float:
        """Rates are counted in quarters of a decade, downwards."""
        return float(10.0 ** (-0.25 * index))

    @abstractmethod
    def train(self, runs: Sequence[Run], checkpoints: Checkpoints | None) -> list[Findings]:
        """Trains runs of this cell; what was found for each, in the same order."""

    def stretches(self, runs: int) -> list[tuple[float, int]]:
        """How many steps there are, and how many of the runs train together in each of them."""
        return [(1.0, runs)]

    def trial(self, runs: Sequence[Run]) -> Callable[[], None]:
        """A step of these runs on made-up data, to be timed."""
        return lambda: None

    def problem(self) -> str:
        """What is wrong with the values; empty if nothing is."""
        return ""


@dataclass(frozen=True)
class Run:
    """One replica: a cell at one learning rate, with one seed."""

    cell: Cell
    rate_index: int
    seed: int

    @property
    def learning_rate(self) -> float:
        return self.cell.learning_rate(self.rate_index)

    @cached_property
    def identity(self) -> str:
        return _hash({**asdict(self.cell), "rate_index": self.rate_index, "seed": self.seed})


def _hash(config: Mapping[str, Any]) -> str:
    given = {name: value for name, value in config.items() if value != ()}  # old runs lack these
    text = json.dumps(given, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Figure:
    """Which methods a picture compares, and the paper's axes."""

    name: str
    title: str
    lowest: float
    """Where the accuracy axis begins, at the latest."""
    highest: float | None = 101
    """Where it ends; ``None``: a little above the results."""

    @property
    def methods(self) -> list[Method]:
        return [m for m in METHODS.values() if self.name in m.figures]

    def places(self, method: Method) -> tuple[str, ...]:
        return method.places if self.name.startswith("location") else PLACES[:1]


Figures = Mapping[str, Figure]


@dataclass(frozen=True)
class Protocol:
    """How one part of a sweep trains: which runs there are, and what their cells share.

    The keys of the TOML's ``[protocol]`` are these and the fields of the cell.
    """

    base: Cell
    learning_rates: tuple[int, ...] = tuple(range(13))
    seeds: tuple[int, ...] = (0, 1, 2)
    budgets: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5)
    widen: int = 2
    tuning_seeds: int = 0
    """How many seeds try all learning rates and choose one for all; 0: each for itself."""
    stack: int = 1
    checkpoint_seconds: float = 60.0

    def cell(self, method: Method, budget: float, place: str = PLACES[0]) -> Cell:
        """What is trained for a point of a series."""
        layers = method.layers(place) if method.sketch else PLACES[0]
        return replace(self.base, sketch=method.expression(budget), layers=layers)

    def groups(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Seeds that share a learning rate: those that choose it, those that follow."""
        first = self.tuning_seeds
        if not first:
            return [((seed,), ()) for seed in self.seeds]
        return [(self.seeds[:first], self.seeds[first:])]

    def problem(self) -> str:
        for name in ("seeds", "learning_rates", "budgets"):
            if not getattr(self, name):
                return f"{name} is empty; give at least one"
        twice = sorted({seed for seed in self.seeds if self.seeds.count(seed) > 1})
        if twice:
            return f"seeds = {list(self.seeds)} has {twice[0]} more than once; give each seed once"
        if text := self.base.problem() or self._stack_problem():
            return text
        if not 0 <= self.tuning_seeds <= len(self.seeds):
            return f"tuning_seeds = {self.tuning_seeds}; use 0 (each seed) to {len(self.seeds)}"
        return ""

    def _stack_problem(self) -> str:
        rates = self.base.together
        if rates > 1 and (rates, 0, 0) != (len(self.learning_rates), self.widen, self.tuning_seeds):
            return f"halving takes {rates} learning_rates, widen = 0 and tuning_seeds = 0"
        return f"stack must be at least {rates}" if self.stack < rates else ""

    def changed(self, settings: Mapping[str, Any], where: str) -> Protocol:
        """With the values of a TOML table, each of which belongs here or to the cell."""
        cell, rest = checked((self.base, self), settings, where)
        made = replace(self, **rest, base=replace(self.base, **cell))
        if text := made.problem():
            raise ExperimentError(f"{where}: {text}")
        return made


@dataclass(frozen=True)
class Point:
    """A point of a series: where a cell is shown."""

    method: str
    place: str
    budget: float
    protocol: Protocol

    @property
    def key(self) -> tuple[str, str, float]:
        return self.method, self.place, self.budget

    @cached_property
    def cell(self) -> Cell:
        return self.protocol.cell(METHODS[self.method], self.budget, self.place)


@dataclass(frozen=True)
class Sweep:
    """A TOML file, read and checked."""

    name: str
    protocol: Protocol
    figures: Figures
    """The figures that this sweep can make."""
    extras: tuple[Point, ...]
    """Points that belong to no figure: deeper networks, longer training."""
    methods: tuple[str, ...] = ()
    """Those that are run; empty: all of a figure."""

    def points(self, figure: str) -> list[Point]:
        """All points of a figure, in the order of its series."""
        spec = self.figures[figure]
        return [
            point
            for method in spec.methods
            if method.name in (self.methods or METHODS)
            for place in spec.places(method)
            for point in _series(method, place, self.protocol)
        ]

    def select(self, names: Iterable[str], extras: bool) -> list[Point]:
        """The points of some figures (and the extras), each cell once where it comes first.

        Figures are in the order of the file, and exact training is before all of them.
        """
        asked = set(names)
        every = [p for name in self.figures if name in asked for p in self.points(name)]
        every += self.extras if extras else ()
        every.sort(key=lambda point: point.method != EXACT)
        first = {point.cell: point for point in reversed(every)}
        return [first[cell] for cell in dict.fromkeys(point.cell for point in every)]


def _series(method: Method, place: str, protocol: Protocol) -> Iterator[Point]:
    budgets = (1.0,) if method.name == EXACT else protocol.budgets
    return (Point(method.name, place, budget, protocol) for budget in budgets)


def read_preset(preset: str, folder: Path, prefix: str = "") -> tuple[str, dict[str, Any], str]:
    """Name, content and path of a preset in a folder, or of any TOML file given by its path."""
    path = Path(preset) if preset.endswith(".toml") else folder / f"{prefix}{preset}.toml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem.removeprefix(prefix) for p in folder.glob(f"{prefix}*")))
        raise ExperimentError(f"no sweep {preset!r}; use one of {known}, or a path to a .toml file")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ExperimentError(f"{path} is not valid TOML: {error}") from None
    _only(content, ("protocol", "figures", "methods", "extra"), str(path))
    return path.stem.removeprefix(prefix), content, str(path)


def make_sweep(
    name: str, content: Mapping[str, Any], path: str, protocol: Protocol, figures: Figures
) -> Sweep:
    protocol = protocol.changed(content.get("protocol", {}), f"{path} [protocol]")
    names = tuple(content.get("figures", figures))
    for figure in names:
        if figure not in figures:
            raise ExperimentError(f"{path}: figure {figure!r} is unknown; use {', '.join(figures)}")
    extras = [p for part in content.get("extra", ()) for p in _extra(protocol, part, path)]
    methods = tuple(find_method(method).name for method in content.get("methods", ()))
    made = {figure: figures[figure] for figure in names}
    sweep = Sweep(name, protocol, made, tuple(extras), methods)
    for point in sweep.select(names, extras=True):
        # A wrong budget, expression or rate shows before hours of work.
        make_sketch(point.cell.sketch)
        for index in point.protocol.learning_rates:
            point.cell.learning_rate(index)
    return sweep


def _extra(protocol: Protocol, part: Mapping[str, Any], path: str) -> Iterator[Point]:
    settings = dict(part)
    methods = settings.pop("methods", ())
    own = protocol.changed(settings, f"{path} [[extra]]")
    for name in methods:
        yield from _series(find_method(name), PLACES[0], own)


def checked(
    targets: Sequence[Any], settings: Mapping[str, Any], where: str
) -> list[dict[str, Any]]:
    """The values of a TOML table, for each of the dataclasses that they belong to."""
    known: dict[str, Any] = {
        f.name: type(getattr(target, f.name))
        for target in targets
        for f in fields(target)
        if f.name not in FIXED
    }
    _only(settings, known, where)
    values: dict[str, Any] = {}
    for name, value in settings.items():
        kind = known[name]
        allowed: Any = _KINDS[kind][0]
        if not isinstance(value, allowed) or isinstance(value, bool) != (kind is bool):
            raise ExperimentError(f"{where}: {name} = {value!r} must be {_KINDS[kind][1]}")
        values[name] = kind(value)
    own = [{f.name for f in fields(target)} for target in targets]
    return [{k: v for k, v in values.items() if k in names} for names in own]


_KINDS: dict[type, tuple[Any, str]] = {
    tuple: (list, "a list"),
    float: ((int, float), "a number"),
    int: (int, "a number"),
    str: (str, "a text"),
    bool: (bool, "true or false"),
}


def _only(given: Iterable[str], allowed: Iterable[str], where: str) -> None:
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise ExperimentError(
            f"{where}: {', '.join(unknown)} is unknown; use {', '.join(sorted(allowed))}"
        )


def planned_runs(point: Point, scores: Mapping[str, float]) -> list[Run]:
    """The runs that a point needs, knowing the validation accuracy of those already done.

    Where the best learning rate sits at an edge of the grid, the grid goes on beyond that edge for
    the seeds that chose it, at most ``widen`` rates on each side. Seeds that leave the choice to
    others follow when it is made.
    """
    protocol, cell = point.protocol, point.cell
    grid = sorted(set(protocol.learning_rates))
    runs: list[Run] = []
    for choosing, following in protocol.groups():
        own = list(grid)
        while True:
            planned = [Run(cell, index, seed) for seed in choosing for index in own]
            if any(run.identity not in scores for run in planned):
                break
            best = best_rate(planned, scores)
            up, down = own[0] - _gap(own[:2]), own[-1] + _gap(own[-2:])
            if best == own[0] and own[0] > grid[0] - protocol.widen * _gap(own[:2]):
                own.insert(0, up)
            elif best == own[-1] and own[-1] < grid[-1] + protocol.widen * _gap(own[-2:]):
                own.append(down)
            else:
                planned += [Run(cell, best, seed) for seed in following]
                break
        runs += planned
    return runs


def waiting_seeds(point: Point, scores: Mapping[str, float]) -> set[int]:
    """Those that follow a choice that is not made yet."""
    return set(point.protocol.seeds) - {run.seed for run in planned_runs(point, scores)}


def best_rate(runs: Sequence[Run], scores: Mapping[str, float]) -> int:
    """The index with the highest mean validation accuracy; of equals the smallest learning rate."""
    found: dict[int, list[float]] = {}
    for run in runs:
        found.setdefault(run.rate_index, []).append(scores[run.identity])
    return max(found, key=lambda index: (statistics.fmean(found[index]), index))


def climbing(runs: Sequence[Run], scores: Mapping[Run, float], count: int) -> list[Run]:
    """Halving: of each seed the ``count`` best, in the order of ``best_rate``: what is left behind
    is never the best in the end."""
    ranked = sorted(runs, key=lambda run: (scores[run], run.rate_index), reverse=True)
    own = {run.seed: [r for r in ranked if r.seed == run.seed] for run in runs}
    return [run for run in runs if run in own[run.seed][:count]]


def _gap(ends: Sequence[int]) -> int:
    return ends[1] - ends[0] if len(ends) == 2 else 1
