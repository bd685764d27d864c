"""A sweep: TOML in, runs out. A run's identity is the hash of all that decides its result."""

from __future__ import annotations

import hashlib
import json
import statistics
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .checkpoints import Checkpoints
from .methods import EXACT, METHODS, PLACES, ExperimentError, Method, find_method, make_sketch

PRESETS = Path(__file__).parent / "presets"
"""A folder of TOML files for each study."""


@dataclass(frozen=True, kw_only=True)
class Cell(ABC):
    """All that decides a result but learning rate and seed; each study has its own."""

    sketch: str
    layers: str
    epochs: int
    batch_size: int
    clip: float
    train_rows: int
    validation_rows: int
    test_rows: int

    @cached_property
    def identity(self) -> str:
        return _hash(asdict(self))

    @property
    @abstractmethod
    def network(self) -> str:
        """The model in a few words."""

    def learning_rate(self, index: int) -> float:
        """Rates are counted in quarters of a decade, downwards."""
        return float(10.0 ** (-0.25 * index))

    @abstractmethod
    def train(self, runs: Sequence[Run], checkpoints: Checkpoints | None) -> list[dict[str, Any]]:
        """Trains runs of this cell; what was found for each, in the same order."""

    @abstractmethod
    def cost(self, runs: int) -> float:
        """About how many seconds so many runs take together, on one core of a laptop."""


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
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Figure:
    """Which methods a picture compares, and the paper's axes."""

    name: str
    title: str
    lowest: float
    """Where the accuracy axis begins, at the latest."""
    methods_of: str = ""
    clip: float | None = None
    highest: float | None = 101
    """Where it ends; ``None``: a little above the results."""

    @property
    def methods(self) -> list[Method]:
        return [m for m in METHODS.values() if (self.methods_of or self.name) in m.figures]

    def places(self, method: Method) -> tuple[str, ...]:
        return method.places if self.name.startswith("location") else PLACES[:1]


@dataclass(frozen=True)
class Protocol(ABC):
    """How one part of a sweep trains; every key of the TOML's ``[protocol]``.

    Each study adds its own keys and says which cell they make.
    """

    epochs: int = 50
    batch_size: int = 128
    clip: float = 1.0
    train_rows: int = 0
    validation_rows: int = 5000
    test_rows: int = 0
    learning_rates: tuple[int, ...] = tuple(range(13))
    seeds: tuple[int, ...] = (0, 1, 2)
    budgets: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5)
    widen: int = 2
    tuning_seeds: int = 0
    """How many seeds try all learning rates and choose one for all; 0: each for itself."""
    stack: int = 1
    checkpoint_seconds: float = 60.0

    @abstractmethod
    def cell(self, method: Method, budget: float, place: str) -> Cell:
        """What is trained for a point of a series."""

    def groups(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Seeds that share a learning rate: those that choose it, those that follow."""
        first = self.tuning_seeds
        if not first:
            return [((seed,), ()) for seed in self.seeds]
        return [(self.seeds[:first], self.seeds[first:])]

    def problem(self) -> str:
        """What is wrong with the values; empty if nothing is."""
        for name in ("seeds", "learning_rates", "budgets"):
            if not getattr(self, name):
                return f"{name} is empty; give at least one"
        if min(self.epochs, self.batch_size, self.stack, self.validation_rows) < 1:
            return "epochs, batch_size, stack and validation_rows must be at least 1"
        if not 0 <= self.tuning_seeds <= len(self.seeds):
            return f"tuning_seeds = {self.tuning_seeds}; use 0 (each seed) to {len(self.seeds)}"
        return ""

    def shared(self, method: Method, budget: float, place: str) -> dict[str, Any]:
        """The part of a cell that all studies have."""
        return {
            "sketch": method.expression(budget),
            "layers": method.layers(place) if method.sketch else PLACES[0],
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "clip": float(self.clip),
            "train_rows": self.train_rows,
            "validation_rows": self.validation_rows,
            "test_rows": self.test_rows,
        }


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
    figures: Mapping[str, Figure]
    """The figures that this sweep can make."""
    extras: tuple[Point, ...]
    """Points that belong to no figure: deeper networks, longer training."""

    def points(self, figure: str) -> list[Point]:
        """All points of a figure, in the order of its series."""
        spec = self.figures[figure]
        own = self.protocol if spec.clip is None else replace(self.protocol, clip=spec.clip)
        return [
            point
            for method in spec.methods
            for place in spec.places(method)
            for point in _series(method, place, own)
        ]

    def select(self, names: Iterable[str], extras: bool) -> list[Point]:
        """The points of some figures (and the extras), each cell once."""
        every = [p for name in names for p in self.points(name)]
        every += self.extras if extras else ()
        return list({point.cell: point for point in reversed(every)}.values())[::-1]


def _series(method: Method, place: str, protocol: Protocol) -> Iterator[Point]:
    budgets = (1.0,) if method.name == EXACT else protocol.budgets
    return (Point(method.name, place, budget, protocol) for budget in budgets)


def load_sweep(preset: str, study: str, defaults: Protocol, figures: Mapping[str, Figure]) -> Sweep:
    """A preset of a study by name, or any TOML file by path."""
    folder = PRESETS / study
    path = Path(preset) if preset.endswith(".toml") else folder / f"{preset}.toml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.toml")))
        raise ExperimentError(f"no sweep {preset!r}; use one of {known}, or a path to a .toml file")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ExperimentError(f"{path} is not valid TOML: {error}") from None
    _only(content, ("protocol", "figures", "extra"), str(path))
    protocol = _protocol(defaults, content.get("protocol", {}), f"{path} [protocol]")
    names = tuple(content.get("figures", figures))
    for name in names:
        if name not in figures:
            raise ExperimentError(f"{path}: figure {name!r} is unknown; use {', '.join(figures)}")
    extras = [p for part in content.get("extra", ()) for p in _extra(protocol, part, str(path))]
    sweep = Sweep(path.stem, protocol, {name: figures[name] for name in names}, tuple(extras))
    for point in sweep.select(names, extras=True):
        make_sketch(point.cell.sketch)  # a wrong budget or expression shows before hours of work
    return sweep


def _extra(protocol: Protocol, part: Mapping[str, Any], path: str) -> Iterator[Point]:
    settings = dict(part)
    methods = settings.pop("methods", ())
    own = _protocol(protocol, settings, f"{path} [[extra]]")
    for name in methods:
        yield from _series(find_method(name), PLACES[0], own)


def _protocol(base: Protocol, settings: Mapping[str, Any], where: str) -> Protocol:
    known: dict[str, Any] = {field.name: type(getattr(base, field.name)) for field in fields(base)}
    _only(settings, known, where)
    values: dict[str, Any] = {}
    for name, value in settings.items():
        kind = known[name]
        right: Any = {tuple: list, float: (int, float), int: int, str: str}[kind]
        if not isinstance(value, right) or isinstance(value, bool):
            raise ExperimentError(f"{where}: {name} = {value!r} must be {_KINDS[kind]}")
        values[name] = kind(value)
    made = replace(base, **values)
    problem = made.problem()
    if problem:
        raise ExperimentError(f"{where}: {problem}")
    return made


_KINDS = {tuple: "a list", float: "a number", int: "a number", str: "a text"}


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


def _gap(ends: Sequence[int]) -> int:
    return ends[1] - ends[0] if len(ends) == 2 else 1
