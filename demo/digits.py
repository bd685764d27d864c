"""Handwritten digits, exact against sketched: a table on the screen and a picture beside it.

Trains a small network on scikit-learn's 8×8 digits (they ship inside the package, nothing is
downloaded) with exact gradients and with several sketches and budgets, three seeds each.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import sketchprop as sp

WIDTHS = (64, 128, 128, 10)
BATCH = 64
METHODS: dict[str, type[sp.Sketch]] = {
    "uniform columns": sp.ColumnMask,
    "uniform samples": sp.SampleMask,
    "ℓ1": sp.L1,
    "diagonal (DS)": sp.Diagonal,
    "G-SV": sp.GradientSVD,
    "RCS": sp.RankConstrained,
}
COLORS = ("#78909c", "#00bcd4", "#e65100", "#1b5e20", "#3f51b5", "#e91e63")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs per line of the table")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 0.25, 0.5])
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("digits.png"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    data = digits()

    settings = [("exact", None, 1.0)]
    settings += [(n, s(b), b) for (n, s), b in itertools.product(METHODS.items(), args.budgets)]
    results: dict[tuple[str, float], list[float]] = {}
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with progress:
        task = progress.add_task("training", total=len(settings) * args.seeds)
        for name, sketch, budget in settings:
            for seed in range(args.seeds):
                progress.update(task, description=f"{name} {budget:g}")
                accuracy = train(data, sketch, args.epochs, seed)
                results.setdefault((name, budget), []).append(accuracy)
                progress.advance(task)
    probe = trained(data, None, epochs=1, seed=0)
    console.print(report(settings, results, data, probe, args))
    plot(results, args.budgets, args.output)
    console.print(f"picture: {args.output}")


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels: a fixed split, four to one."""
    source = load_digits()
    images = torch.tensor(source.data, dtype=torch.float32) / 16
    labels = torch.tensor(source.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, rest = order[:360], order[360:]
    return images[rest], labels[rest], images[test], labels[test]


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for d, n in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(d, n), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def batches(images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for index in torch.randperm(len(labels)).split(BATCH)[:-1]:
        yield images[index], labels[index]


def trained(
    data: tuple[Tensor, ...], sketch: sp.Sketch | None, epochs: int, seed: int
) -> nn.Module:
    model = network(seed)
    if sketch is not None:
        sp.sketch_(model, sketch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for x, y in batches(data[0], data[1]):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


def train(data: tuple[Tensor, ...], sketch: sp.Sketch | None, epochs: int, seed: int) -> float:
    """Test accuracy in percent."""
    model = trained(data, sketch, epochs, seed).eval()
    with torch.no_grad():
        return 100 * float((model(data[2]).argmax(1) == data[3]).float().mean())


def meters(model: nn.Module, sketch: sp.Sketch | None, data: tuple[Tensor, ...]) -> tuple[str, str]:
    """Backward FLOPs as a share of exact, and V/σ²: the variance added to the minibatches' own."""
    if sketch is None:
        return "1.00", "0.00"
    torch.manual_seed(0)
    some = list(batches(data[0], data[1]))
    options = {"draws": 4, "split": False, "nodes": False, "rounds": 0}
    measured = sp.measure(
        model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), some, sketch, **options
    )
    variance = measured.variance
    # Where a few rare draws carry the variance, those that were met give a lower bound.
    bound = "" if variance.reliable else "≥ "
    return f"{measured.flops.kept:.2f}", f"{bound}{variance.relative.value:.2f}"


def report(
    settings: list[tuple[str, sp.Sketch | None, float]],
    results: dict[tuple[str, float], list[float]],
    data: tuple[Tensor, ...],
    probe: nn.Module,
    args: argparse.Namespace,
) -> Table:
    widths = "-".join(map(str, WIDTHS))
    table = Table(
        title=f"Digits, {widths}, {args.epochs} epochs, every layer but the last sketched",
        caption="FLOPs: backward, scoring and SVDs included, against exact. "
        "Added variance: V/σ² after one epoch; below 1 the sketch is quieter than the minibatch.",
    )
    table.add_column("method", no_wrap=True)
    for column in ("kept", "accuracy %", "± spread", "backward FLOPs", "added variance"):
        table.add_column(column, justify="right")
    previous = None
    for name, sketch, budget in settings:
        if previous not in (None, name):
            table.add_section()
        accuracy = results[name, budget]
        spread = statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0
        flops, variance = meters(probe, sketch, data)
        table.add_row(
            name if name != previous else "",
            f"{budget:g}",
            f"{statistics.mean(accuracy):.1f}",
            f"{spread:.1f}",
            flops,
            variance,
        )
        previous = name
    return table


def plot(results: dict[tuple[str, float], list[float]], budgets: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.axhline(statistics.mean(results["exact", 1.0]), color="#212121", ls="--", label="exact")
    for name, color in zip(METHODS, COLORS, strict=True):
        runs = [results[name, budget] for budget in budgets]
        means = [statistics.mean(r) for r in runs]
        errors = [statistics.stdev(r) if len(r) > 1 else 0.0 for r in runs]
        axes.errorbar(budgets, means, errors, marker="o", ms=4, capsize=2, color=color, label=name)
    axes.set(xscale="log", xlabel="kept fraction", ylabel="test accuracy (%)")
    axes.set_xticks(budgets, [f"{b:g}" for b in budgets])
    axes.set_xticks([], minor=True)
    axes.set_title("Handwritten digits with a sketched backward pass")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
