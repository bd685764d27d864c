"""The paper's MLP study on MNIST: cells, figures and claims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..lab.checkpoints import Checkpoints
from ..lab.claims import Claim, Comparison, all_layers, pairs
from ..lab.pictures import PictureCell
from ..lab.study import SweepStudy
from ..lab.sweep import Figure, Findings, Protocol, Run

PIXELS = {"unit": (0.0, 1.0), "normalised": (0.1307, 0.3081)}
"""Mean and standard deviation that pixels in [0, 1] are shifted and scaled by."""
PROTOCOL_VERSION = 1
"""Part of every run's identity: to be raised when the code changes what a run would find."""


@dataclass(frozen=True, kw_only=True)
class MnistCell(PictureCell):
    ROWS = (60_000, 10_000)
    widths: tuple[int, ...] = (784, 64, 64, 10)
    pixels: str = "unit"
    halving: tuple[int, ...] = ()
    """(13, 1, 5, 5, 2): a seed starts 13 rates; after epoch 1 its best 5 go on, after epoch 5 its
    best 2, to the end. Best is the highest validation accuracy so far; of equals, the smallest
    rate. Rates that end there have been trained as long as they show."""
    dataset: str = "mnist"
    version: int = PROTOCOL_VERSION

    @property
    def network(self) -> str:
        return "-".join(map(str, self.widths))

    @property
    def together(self) -> int:
        return self.halving[0] if self.halving else 1

    @property
    def rungs(self) -> dict[int, int]:
        """After which epoch how many rates of a seed go on."""
        return dict(zip(self.halving[1::2], self.halving[2::2], strict=True))

    def train(self, runs: Sequence[Run], checkpoints: Checkpoints | None) -> list[Findings]:
        """Together, as one stack; minutes at most, so nothing is saved on the way."""
        from .stack import train_stack

        return train_stack(runs)

    def stretches(self, runs: int) -> list[tuple[float, int]]:
        ends, counts = [*self.rungs, self.epochs], [self.together, *self.rungs.values()]
        spans = zip((0, *ends), ends, counts, strict=False)
        return [((e - b) * self.epoch_steps, runs * n // self.together) for b, e, n in spans]

    def trial(self, runs: Sequence[Run]) -> Callable[[], None]:
        from .stack import trial_step

        return trial_step(runs)

    def problem(self) -> str:
        if self.pixels not in PIXELS:
            return f"pixels = {self.pixels!r}; use {' or '.join(PIXELS)}"
        counts, epochs = self.halving[::2], (0, *self.halving[1::2], self.epochs)
        falling = [*counts] == sorted(set(counts) - {0, 1}, reverse=True)
        rising = [*epochs] == sorted(set(epochs)) and len(epochs) == len(counts) + 1
        if self.halving and not (falling and rising):
            rule = "falling numbers of rates, at least 2, rising epochs between them"
            return f"halving = {list(self.halving)}; give {rule}, as [13, 1, 5, 5, 2]"
        return super().problem()


LOW_BUDGET = 0.1
CLOSE = 1.0
"""Percentage points within which curves count as close."""
ENVELOPE = 0.2
"""Percentage points by which another curve may pass above an upper envelope."""
_PROXIES = all_layers("l1", "l1-root", "l2", "l2-root", "var", "var-root")
_LOCATED = ("element", "sample", "ds", "l1", "rcs", "gsv")
_SKETCHES = all_layers("l1", "ds", "gsv", "rcs")

CLAIMS = (
    Claim(
        "1a",
        f"Exact (correlated) sampling is above independent sampling at low budgets "
        f"(p ≤ {LOW_BUDGET:g}).",
        tuple(
            Comparison((name, "all"), (f"{name}-independent", "all"), LOW_BUDGET)
            for name in ("l1", "ds", "gsv", "rcs")
        ),
    ),
    Claim(
        "1b",
        "Data-dependent sketches are above the three uniform masks.",
        pairs(all_layers("ds", "rcs"), all_layers("element", "sample", "column")),
    ),
    Claim(
        "2a",
        f"The proxies are close to each other (within {CLOSE:g} point).",
        pairs(_PROXIES, _PROXIES, CLOSE),
    ),
    Claim(
        "2a",
        f"ℓ1 lies on the upper envelope of the proxies (none is {ENVELOPE:g} points above it).",
        pairs(all_layers("l1"), _PROXIES[1:], ENVELOPE),
    ),
    Claim(
        "2b",
        "Spectral methods are above coordinate methods.",
        pairs(all_layers("gsv", "rcs"), all_layers("ds", "l1")),
    ),
    Claim("2b", "G-SV is above its square root.", pairs(all_layers("gsv"), all_layers("gsv-root"))),
    Claim(
        "location",
        "A sketch in the last layer alone hurts more than one in the first layer alone.",
        tuple(Comparison((name, "first"), (name, "last")) for name in _LOCATED),
    ),
    Claim(
        "1b",
        "Data-dependent sketches are above uniform columns of the same, exact size.",
        pairs(_SKETCHES, all_layers("control-columns")),
        clause="control",
    ),
    Claim(
        "2b",
        "Data-dependent sketches are above one uniform sample mask for all layers, which is a "
        "smaller minibatch.",
        pairs(_SKETCHES, all_layers("control-samples")),
        clause="control",
    ),
    Claim(
        "2b",
        "Rows drawn by importance are above one uniform sample mask for all layers.",
        pairs(all_layers("rows"), all_layers("control-samples")),
        clause="ours",
    ),
)


FIGURES = {
    figure.name: figure
    for figure in (
        Figure("1a", "Exact against independent sampling", 75),
        Figure("1b", "Uniform masks against data-dependent sketches", 28),
        Figure("2a", "Simple proxies", 70),
        Figure("2b", "Spectral against coordinate methods", 77),
        Figure("location-masks", "Location of the noise: masks", 30),
        Figure("location-coordinate", "Location of the noise: coordinate sketches", 77),
        Figure("location-spectral", "Location of the noise: spectral sketches", 90),
    )
}


@dataclass(frozen=True, kw_only=True)
class MnistStudy(SweepStudy):
    def describe(self, protocol: Protocol) -> str:
        cell: Any = protocol.base
        return (
            f"MNIST, MLP {cell.network}, epochs: {cell.epochs}, batch {cell.batch_size}, "
            f"seeds: {len(protocol.seeds)}"
        )


FINDINGS = {"diverged_epoch": int, "clipped_fraction": float, "ranks": list, "loss_curve": list}
MNIST = MnistStudy(
    name="mnist",
    help="the paper's MLP study on MNIST",
    title="The paper's MLP study on MNIST",
    published={"paper": "mnist"},
    protocol=Protocol(MnistCell(), stack=20),
    findings=FINDINGS,
    figures=FIGURES,
    claims=CLAIMS,
    reference=98.11,
    decides=97.8,
    sort_by=("widths", "epochs", "clip"),
)
