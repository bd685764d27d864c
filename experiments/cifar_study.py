"""The paper's larger study: BagNet-17 and a vision transformer on CIFAR-10."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .checkpoints import Checkpoints
from .claims import CONFIRMED, LEVEL, Claim, Comparison, all_layers, check, pairs
from .methods import METHODS, Method
from .selection import Summary
from .store import Row, Schema
from .study import Study, told_choice, told_widening
from .sweep import Cell, Figure, Protocol, Run

PROTOCOL_VERSION = 1
"""Part of every run's identity: to be raised when the code changes what a run would find."""
OPTIMIZERS = ("adamw", "sgd")
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "bagnet17": {"width": (64,), "blocks": (3, 4, 6, 3)},
    "vit": {"patch": (4,), "dim": (192,), "depth": (9,), "heads": (12,), "hidden": (1024,)},
}
"""The paper's models; ``size`` in a TOML file makes them smaller, for example "dim=96 depth=3"."""
SLOWER = {"": 1.0, "GradientSVD": 1.5, "RankConstrained": 1.8, "ElementMask": 1.4}
"""Time of a step with a sketch over that of an exact one; the others take ``ALIKE``."""
ALIKE = 1.1


@dataclass(frozen=True, kw_only=True)
class CifarCell(Cell):
    model: str
    size: str
    dropout: float
    optimizer: str
    base_rate: float
    weight_decay: float
    momentum: float
    warmup_epochs: float
    final_rate: float
    dataset: str = "cifar10"
    version: int = PROTOCOL_VERSION

    @property
    def network(self) -> str:
        return f"{self.model} {self.size}".strip()

    def learning_rate(self, index: int) -> float:
        """Quarters of a decade around the baseline's; a positive index is a smaller rate."""
        return float(self.base_rate * 10.0 ** (-0.25 * index))

    def train(self, runs: Sequence[Run], checkpoints: Checkpoints | None) -> list[dict[str, Any]]:
        """One after the other."""
        from .cifar import train_run

        return [
            train_run(run, checkpoints.of(run.identity) if checkpoints else None) for run in runs
        ]

    def cost(self, runs: int) -> float:
        from .cifar import run_seconds

        return runs * run_seconds(self, SLOWER.get(self.sketch.partition("(")[0], ALIKE))


@dataclass(frozen=True)
class CifarProtocol(Protocol):
    model: str = "vit"
    size: str = ""
    dropout: float = 0.1
    optimizer: str = "adamw"
    base_rate: float = 3e-4
    weight_decay: float = 0.05
    momentum: float = 0.9
    warmup_epochs: float = 0.0
    final_rate: float = 0.0
    clip: float = 0.0
    learning_rates: tuple[int, ...] = (-4, -2, 0, 2, 4)
    widen: int = 1

    def cell(self, method: Method, budget: float, place: str) -> CifarCell:
        own = ("model", "size", "dropout", "optimizer", "base_rate", "weight_decay", "momentum",
               "warmup_epochs", "final_rate")  # fmt: skip
        values = {name: getattr(self, name) for name in own}
        return CifarCell(**values, **self.shared(method, budget, place))

    def problem(self) -> str:
        if self.model not in SIZES:
            return f"model = {self.model!r}; use {' or '.join(SIZES)}"
        if self.optimizer not in OPTIMIZERS:
            return f"optimizer = {self.optimizer!r}; use {' or '.join(OPTIMIZERS)}"
        return size_problem(self.model, self.size) or super().problem()


def size_problem(model: str, size: str) -> str:
    """What is wrong with a ``size``; empty if nothing is."""
    try:
        given = parse_size(size)
    except ValueError:
        return f"size = {size!r}; write names and numbers, for example 'dim=96 depth=3'"
    known = SIZES[model]
    unknown = sorted(set(given) - set(known))
    if unknown:
        return f"size = {size!r}: {model} has no {', '.join(unknown)}; use {', '.join(known)}"
    for name, value in given.items():
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


def describe(protocol: Protocol) -> str:
    assert isinstance(protocol, CifarProtocol)
    size = f" ({protocol.size})" if protocol.size else ""
    images = f"{protocol.train_rows or 50000 - protocol.validation_rows} images"
    return (
        f"CIFAR-10, {protocol.model}{size}, {images}, epochs: {protocol.epochs}, batch "
        f"{protocol.batch_size}, seeds: {len(protocol.seeds)}"
    )


def told(protocol: Protocol) -> list[str]:
    assert isinstance(protocol, CifarProtocol)
    cell = protocol.cell(METHODS["exact"], 1.0, "all")
    rates = ", ".join(f"{cell.learning_rate(i):.3g}" for i in sorted(protocol.learning_rates)[::-1])
    way = "AdamW" if protocol.optimizer == "adamw" else f"SGD with momentum {protocol.momentum:g}"
    left = (
        "the classifier and the input projection" if cell.model == "bagnet17" else "the classifier"
    )
    return [
        f"{describe(protocol)}. {way}, weight decay {protocol.weight_decay:g}, warm-up over "
        f"{protocol.warmup_epochs:g} epochs, cosine to {protocol.final_rate:g}, dropout "
        f"{protocol.dropout:g}, random crops with a padding of 4 and flips, no clipping. Learning "
        f"rates {rates}, the baseline's is {cell.learning_rate(0):.3g}; {told_widening(protocol)}. "
        f"{protocol.validation_rows} training images are kept apart: "
        f"{told_choice(protocol, f'{protocol.test_rows or 10000} test images')}. The paper's 'best "
        "accuracy', the highest on the test set itself, is an extra column.",
        f"Every linear layer and 1×1 convolution is sketched except {left}. Formulas are the "
        "paper's, literally (`paper=True`, bias gradient from the sketch); the rows of a layer are "
        "its tokens or pixels, and the paper's per-sample mask is drawn over those. The control "
        "'one sample mask' keeps samples at the classifier, and so in the whole network: a smaller "
        "minibatch. The paper does not give its number of epochs, of seeds, or the spacing of its "
        "learning rates.",
    ]


def ranking(found: Mapping[str, Sequence[Summary]], rows: Sequence[Row]) -> list[str]:
    """The methods by their mean over the budgets, best first, and how far to trust it."""
    summaries = [s for group in found.values() for s in group]
    exact = next((s for s in summaries if not s.point.cell.sketch), None)
    points = {s.point.key: s for s in summaries if s is not exact}
    budgets = sorted({budget for _, _, budget in points})
    series = dict.fromkeys(key[:2] for key in points)
    whole = [own for own in series if all((*own, budget) in points for budget in budgets)]
    if exact is None or not whole:
        return []
    means = {own: [_mean(points[*own, budget]) for budget in budgets] for own in whole}
    order = sorted(whole, key=lambda own: -statistics.mean(means[own]))
    heads = [*(f"kept {b:g}" for b in budgets), "mean", "to exact", f"above (p ≤ {LEVEL:g})"]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for own in order:
        below = [
            METHODS[other[0]].label
            for other in order
            if (outcome := check(Comparison(own, other), points)) and outcome.verdict == CONFIRMED
        ]
        mean = statistics.mean(means[own])
        lines.append(
            f"| {METHODS[own[0]].label} | {' | '.join(f'{value:.1f}' for value in means[own])} | "
            f"{mean:.1f} | {mean - _mean(exact):+.1f} | {', '.join(below)} |"
        )
    seeds, share = len(exact.seeds), _mean(exact) / 100
    count = exact.point.cell.test_rows or 10000
    error = 100 * (share * (1 - share) / (count * seeds)) ** 0.5
    text = (
        f"Test accuracy, mean over seeds ({seeds}), best first; exact training reaches "
        f"{_mean(exact):.1f}. {count} test images alone give a value a standard error of "
        f"{error:.1f} points, the mean of a line {error / len(budgets) ** 0.5:.1f}; seeds and the "
        "choice of the rate come on top. The last column names the methods that a line is above by "
        "the paired test that decides the claims; two that do not name each other cannot be told "
        "apart."
    )
    return ["## What came out", text, "\n".join(lines)]


def _mean(summary: Summary) -> float:
    return statistics.mean(result.test for result in summary.seeds.values())


def cost_part(found: Mapping[str, Sequence[Summary]], rows: Sequence[Row]) -> list[str]:
    """FLOPs and time of a step for each point, over those of exact training."""
    summaries = [s for group in found.values() for s in group]
    by_cell: dict[str, list[Row]] = {}
    for row in rows:
        by_cell.setdefault(row["cell"], []).append(row)
    costs = {s.point.cell: _cost(by_cell[s.point.cell.identity]) for s in summaries}
    exact = next((costs[s.point.cell] for s in summaries if not s.point.cell.sketch), None)
    if exact is None:
        return []
    lines = [
        "| method | kept | GFLOPs of a step | over exact | seconds of a step | over exact |",
        "|---|---|---|---|---|---|",
    ]
    for s in summaries:
        flops, seconds = costs[s.point.cell]
        lines.append(
            f"| {METHODS[s.point.method].label} | {s.point.budget:g} | {flops / 1e9:.3f} | "
            f"{flops / exact[0]:.2f} | {seconds:.4f} | {seconds / exact[1]:.2f} |"
        )
    text = (
        "FLOPs are counted: forward, backward, scores and decompositions. Seconds are the median "
        "over runs of the training time alone, on one thread beside the other workers. A uniform "
        "sample mask at the classifier saves nothing here; as a smaller minibatch it would cost "
        "its share of an exact step."
    )
    return ["## What a step costs", text, "\n".join(lines)]


def _cost(rows: Sequence[Row]) -> tuple[float, float]:
    """FLOPs and seconds of one step; of runs that came to their end where there are any."""
    whole = [row for row in rows if not row["diverged_epoch"]] or list(rows)
    seconds = [
        sum(row["seconds_curve"]) / max(1, row["steps_per_epoch"] * row["epochs"]) for row in whole
    ]
    return statistics.median(row["flops_step"] for row in whole), statistics.median(seconds)


SCHEMA = Schema(
    text=("run", "cell", "sketch", "layers", "model", "size", "optimizer", "dataset",
          "package_version", "torch_version"),
    whole=("rate_index", "seed", "epochs", "batch_size", "train_rows", "validation_rows",
           "test_rows", "version", "best_epoch", "diverged_epoch", "steps_per_epoch",
           "parameters"),
    real=("learning_rate", "base_rate", "weight_decay", "momentum", "warmup_epochs", "final_rate",
          "dropout", "clip", "validation_accuracy", "test_accuracy", "best_test_accuracy",
          "clipped_fraction", "flops_step", "wall_seconds"),
    lists=("ranks", "validation_curve", "test_curve", "loss_curve", "seconds_curve"),
    order=("model", "size", "epochs", "sketch", "layers", "cell", "seed", "rate_index"),
    times=("wall_seconds", "seconds_curve"),
)  # fmt: skip

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

VIT = Study(
    name="cifar-vit",
    title="The paper's study of a vision transformer on CIFAR-10",
    defaults=CifarProtocol(),
    figures={"cifar": Figure("cifar", "Sketches in a vision transformer", 100, highest=None)},
    schema=SCHEMA,
    claims=CLAIMS,
    told=told,
    describe=describe,
    opening=ranking,
    more=cost_part,
)
BAGNET = replace(
    VIT,
    name="cifar-bagnet17",
    title="The paper's study of BagNet-17 on CIFAR-10",
    defaults=CifarProtocol(model="bagnet17", optimizer="sgd", base_rate=10**-1.5,
                           weight_decay=1e-3, final_rate=1e-5, dropout=0.0),
    figures={"cifar": Figure("cifar", "Sketches in BagNet-17", 100, highest=None)},
)  # fmt: skip
STUDIES = {"bagnet17": BAGNET, "vit": VIT}
