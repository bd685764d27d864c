"""The paper's larger study: BagNet-17 and a vision transformer on CIFAR-10."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..lab.checkpoints import Checkpoints
from ..lab.claims import Claim, all_layers, pairs
from ..lab.pictures import PictureCell
from ..lab.study import SweepStudy
from ..lab.sweep import Figure, Findings, Protocol, Run

PROTOCOL_VERSION = 1
"""Part of every run's identity: to be raised when the code changes what a run would find."""
OPTIMIZERS = ("adamw", "sgd")
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "bagnet17": {"width": (64,), "blocks": (3, 4, 6, 3)},
    "vit": {"patch": (4,), "dim": (192,), "depth": (9,), "heads": (12,), "hidden": (1024,)},
}
"""The paper's models; ``size`` in a TOML file makes them smaller, for example "dim=96 depth=3"."""


@dataclass(frozen=True, kw_only=True)
class CifarCell(PictureCell):
    ROWS = (50_000, 10_000)
    clip: float = 0.0
    model: str = "vit"
    size: str = ""
    dropout: float = 0.1
    optimizer: str = "adamw"
    base_rate: float = 3e-4
    weight_decay: float = 0.05
    momentum: float = 0.9
    warmup_epochs: float = 0.0
    final_rate: float = 0.0
    dataset: str = "cifar10"
    version: int = PROTOCOL_VERSION

    @property
    def network(self) -> str:
        return f"{self.model} {self.size}".strip()

    def learning_rate(self, index: int) -> float:
        """Quarters of a decade around the baseline's; a positive index is a smaller rate."""
        return float(self.base_rate * 10.0 ** (-0.25 * index))

    def train(self, runs: Sequence[Run], checkpoints: Checkpoints | None) -> list[Findings]:
        """One after the other."""
        from .model import train_run

        return [
            train_run(run, checkpoints.of(run.identity) if checkpoints else None) for run in runs
        ]

    def trial(self, runs: Sequence[Run]) -> Callable[[], None]:
        from .model import trial_step

        return trial_step(self)

    def problem(self) -> str:
        if self.model not in SIZES:
            return f"model = {self.model!r}; use {' or '.join(SIZES)}"
        if self.optimizer not in OPTIMIZERS:
            return f"optimizer = {self.optimizer!r}; use {' or '.join(OPTIMIZERS)}"
        return size_problem(self.model, self.size) or super().problem()


def size_problem(model: str, size: str) -> str:
    """What is wrong with a ``size``; empty if nothing is."""
    known, example = SIZES[model], "write names and numbers, for example 'dim=96 depth=3'"
    try:
        given = parse_size(size)
    except ValueError:
        return f"size = {size!r}; {example}"
    for name, value in given.items():
        if name not in known:
            return f"size = {size!r}: {model} has no {name}; use {', '.join(known)}"
        if len(value) != len(known[name]):
            return f"size = {size!r}: {name} takes {len(known[name])} numbers, as in 3-4-6-3"
    return ""


def parse_size(size: str) -> dict[str, tuple[int, ...]]:
    """
    >>> parse_size("width=16 blocks=1-1-2-1")
    {'width': (16,), 'blocks': (1, 1, 2, 1)}
    """
    parts = dict(part.split("=", 1) for part in size.split())
    return {name: tuple(int(v) for v in value.split("-")) for name, value in parts.items()}


@dataclass(frozen=True, kw_only=True)
class CifarStudy(SweepStudy):
    @property
    def preset_prefix(self) -> str:
        return self.name.removeprefix("cifar-") + "-"

    def describe(self, protocol: Protocol) -> str:
        cell: Any = protocol.base
        size = f" ({cell.size})" if cell.size else ""
        images = f"{cell.train_rows or 50000 - cell.validation_rows} images"
        return (
            f"CIFAR-10, {cell.model}{size}, {images}, epochs: {cell.epochs}, batch "
            f"{cell.batch_size}, seeds: {len(protocol.seeds)}"
        )


_SKETCHES = all_layers("ds", "l1", "gsv", "rcs")
CLAIMS = (
    Claim(
        "cifar",
        "Data-dependent sketches are above uniform masks.",
        pairs(_SKETCHES, all_layers("element", "sample")),
    ),
    Claim(
        "cifar",
        "DS is a particularly strong choice: none of the others is 1 point above it.",
        pairs(all_layers("ds"), _SKETCHES[1:], 1.0),
    ),
    Claim(
        "cifar",
        "RCS does not dominate: DS and ℓ1 are not below it.",
        pairs(all_layers("ds", "l1"), all_layers("rcs")),
    ),
    Claim(
        "cifar",
        "Data-dependent sketches are above uniform columns of the same, exact size.",
        pairs(_SKETCHES, all_layers("control-columns")),
        clause="control",
    ),
    Claim(
        "cifar",
        "Data-dependent sketches are above one uniform sample mask for all layers, which is a "
        "smaller minibatch.",
        pairs(_SKETCHES, all_layers("control-samples")),
        clause="control",
    ),
)

FINDINGS = {
    "diverged_epoch": int, "steps_per_epoch": int, "parameters": int, "clipped_fraction": float,
    "flops_step": float, "ranks": list, "loss_curve": list, "seconds_curve": list,
}  # fmt: skip


def _study(name: str, model: str, cell: CifarCell) -> CifarStudy:
    return CifarStudy(
        name=name,
        help="the paper's BagNet-17 and transformer on CIFAR-10",
        title=f"The paper's study of {model} on CIFAR-10",
        published={"cpu": f"{name}-cpu", "middle": f"{name}-middle"},
        protocol=Protocol(cell, learning_rates=(-4, -2, 0, 2, 4), widen=1),
        findings=FINDINGS,
        figures={"cifar": Figure("cifar", f"Sketches in {model}", 100, highest=None)},
        claims=CLAIMS,
        reference=90.17,
        decides=60.0,
        sort_by=("model", "size", "epochs"),
    )


BAGNET_CELL = CifarCell(
    model="bagnet17", optimizer="sgd", base_rate=10**-1.5, weight_decay=1e-3, final_rate=1e-5,
    dropout=0.0,
)  # fmt: skip
STUDIES = {
    "bagnet17": _study("cifar-bagnet17", "BagNet-17", BAGNET_CELL),
    "vit": _study("cifar-vit", "a vision transformer", CifarCell()),
}
