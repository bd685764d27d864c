"""The variance of dW at equal budget: rows by ‖g‖‖x‖ against the estimators of VCAS and WTA-CRS.

For fixed G and X, dW = Σ_b g_b x_bᵀ, and the variance of each estimator has a closed form in
K_ij = ⟨g_i, g_j⟩⟨x_i, x_j⟩: nothing here is drawn.

- systematic (ours): Σ_ij K_ij π_ij/(p_i p_j) - ‖dW‖². Row i is kept where u lies in an arc of
  length p_i that begins at the sum of the p before it, modulo 1; π_ij is the length that two arcs
  have in common.
- independent coins (VCAS): Σ_i K_ii (1/p_i - 1).
- with replacement (WTA-CRS): the c largest are sure, the mean of r - c draws from the others has
  ((1 - Q) Σ_{i>c} K_ii/q_i - ‖Σ_{i>c} g_i x_iᵀ‖²)/(r - c).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sketchprop.core.probabilities import water_fill
from sketchprop.core.vjp import Vjp
from sketchprop.sketches import Rows

from ..lab.figures import label_axes, picture
from ..lab.layers import captured
from ..lab.pages import made_on, number_text, read_json, write_csv, write_json
from ..lab.problem import trajectory
from ..lab.study import MeasuredStudy
from ..lab.trainer import generator
from ..methods import METHODS, make_sketch
from ..peers import wta_probabilities
from ..problems import linear_layers, masked_bytes, small_vit

CHUNK = 512
RATE = 5e-4
OURS = "systematic"
LABELS = {
    OURS: 'Rows("gradient_input")',
    "shuffled": "the same, rows shuffled",
    "vcas": "VCAS",
    "wta": "WTA-CRS",
    "uniform": "uniform, independent",
}
PEERS = ("vcas", "wta")
OTHERS = (*PEERS, "shuffled", "uniform")


def systematic_variance(G: Tensor, X: Tensor, p: Tensor) -> float:
    """E‖dŴ - dW‖² of one systematic draw with probabilities ``p``, in the order of the rows."""
    G, X, p = G.double(), X.double(), p.double()
    kept = p > 0
    G, X, p = G[kept], X[kept], p[kept]
    start = (p.cumsum(0) - p) % 1.0
    total = 0.0
    for low in range(0, len(p), CHUNK):
        part = slice(low, low + CHUNK)
        a, size = start[part, None], p[part, None]
        # The arcs lie on a circle: one of them is also looked at one turn before and after.
        ends, common = start + p, torch.zeros(())
        for turn in (-1.0, 0.0, 1.0):
            shared = torch.minimum(a + size, ends + turn) - torch.maximum(a, start + turn)
            common = common + shared.clamp(min=0)
        K = (G[part] @ G.T) * (X[part] @ X.T)
        total += float((K * common / (size * p)).sum())
    return total - float((G.T @ X).square().sum())


def independent_variance(G: Tensor, X: Tensor, p: Tensor) -> float:
    """The same of independent coins."""
    energy = _energies(G, X)
    return float((energy * (1 / p - 1))[energy > 0].sum())


def replacement_variance(G: Tensor, X: Tensor, r: int) -> float:
    """The same of WTA-CRS with r rows."""
    G, X = G.double(), X.double()
    q, order = wta_probabilities(G, X).sort(descending=True)
    sums = torch.cat([q.new_zeros(1), q.cumsum(0)])
    left = (1 - sums[:r]).clamp(min=0)
    c = int((left / (r - torch.arange(r))).argmin())
    rest = order[c:][q[c:] > 0]
    if len(rest) == 0:
        return 0.0
    energy = _energies(G[rest], X[rest])
    second = float(left[c]) * float((energy / q[c:][q[c:] > 0]).sum())
    return (second - float((G[rest].T @ X[rest]).square().sum())) / (r - c)


def _energies(G: Tensor, X: Tensor) -> Tensor:
    return G.double().square().sum(-1) * X.double().square().sum(-1)


def layer_variances(G: Tensor, X: Tensor, budget: float, shuffles: int) -> dict[str, float]:
    """The variance of dW by each estimator, all with the same number of rows."""
    rows = len(G)
    sketch = make_sketch(METHODS["tokens-input"].expression(budget))
    assert isinstance(sketch, Rows)
    r = int(sketch.rank(rows))
    p = sketch.atoms(Vjp(G, X=X)).probabilities
    orders = [
        torch.randperm(rows, generator=generator("order of rows", i)) for i in range(shuffles)
    ]
    shuffled = [systematic_variance(G[o], X[o], p[o]) for o in orders]
    flat = torch.full((rows,), r / rows, dtype=torch.float64)
    return {
        OURS: systematic_variance(G, X, p),
        "shuffled": sum(shuffled) / len(shuffled),
        "vcas": independent_variance(G, X, water_fill(_energies(G, X).sqrt(), r)),
        "wta": replacement_variance(G, X, r),
        "uniform": independent_variance(G, X, flat),
        "exact": float((G.double().T @ X.double()).square().sum()),
    }


@dataclass(frozen=True)
class Settings:
    size: str = "full"
    steps: tuple[int, ...] = (0, 150, 600, 2000)
    budgets: tuple[float, ...] = (0.3, 0.1)
    batch_size: int = 64
    shuffles: int = 1


class WeightVarianceStudy(MeasuredStudy):
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--trajectory", help="folder with the checkpoints of the ViT")

    def measure(self, settings: Settings, out: Path, options: argparse.Namespace) -> None:
        stored = out / "results.json"
        rows: list[dict[str, Any]] = read_json(stored)["rows"] if stored.is_file() else []
        done = {(row["model"], row["step"]) for row in rows}
        # The ViT's trajectory is the one on which V/σ² is measured.
        shared = Path(options.trajectory or options.out or "docs/results/rows-variance")
        for make, folder in ((masked_bytes, out), (small_vit, shared)):
            problem = make(settings.size == "small")
            for step, model in trajectory(problem, settings.steps, RATE, folder):
                if (problem.name, step) in done:
                    continue
                batch = problem.draw(generator("captured", 0), settings.batch_size)
                layers = captured(model, batch, linear_layers(model, problem), problem.loss)
                for layer, (G, _, X) in layers.items():
                    for p in settings.budgets:
                        key = {"model": problem.name, "step": step, "layer": layer, "budget": p}
                        rows.append({**key, **layer_variances(G, X, p, settings.shuffles)})
                write_json(stored, {"machine": made_on(), "rows": rows})

    def results(self, settings: Settings, out: Path) -> tuple[list[Path], dict[str, Any]]:
        found = read_json(out / "results.json")
        rows = found["rows"]
        models = [m for m in ("vit", "bytes") if any(row["model"] == m for row in rows)]
        written = [write_csv(out / "results.csv", rows)]
        draw = partial(_draw, models=models, rows=rows, settings=settings)
        written += picture(out, "weight-variance", len(models), draw)
        lines = [_line(*group) for group in _groups(rows, models, settings)]
        held = [line.pop() for line in lines]
        header = [f"{LABELS[kind]} / ours" for kind in OTHERS]
        return written, {**found, "lines": lines, "held": held, "others": header}


def _groups(
    rows: Sequence[dict[str, Any]], models: Sequence[str], settings: Settings
) -> Iterator[tuple[str, int, float, list[dict[str, Any]]]]:
    for model in models:
        for budget in settings.budgets:
            for step in settings.steps:
                key = (model, step, budget)
                chosen = [r for r in rows if (r["model"], r["step"], r["budget"]) == key]
                if chosen:
                    yield model, step, budget, chosen


def _line(model: str, step: int, budget: float, chosen: Sequence[dict[str, Any]]) -> list[Any]:
    """Cells of the table; the last: whether ours, summed over layers, is at most the peers'."""
    total = {k: sum(row[k] for row in chosen) for k in (*LABELS, "exact")}
    pairs = [(row[OURS], min(row[k] for k in PEERS)) for row in chosen]
    better = sum(ours <= peer for ours, peer in pairs)
    worst = max(ours / peer if peer > 0 else float(ours > 0) for ours, peer in pairs)
    cells = [model, f"{budget:g}", str(step), number_text(total[OURS] / total["exact"])]
    cells += [number_text(total[k] / total[OURS]) for k in OTHERS]
    held = all(total[OURS] <= total[k] for k in PEERS)
    return [*cells, f"{better} of {len(chosen)}", number_text(worst), held]


def _draw(
    axes: Sequence[Any], models: Sequence[str], rows: Sequence[dict[str, Any]], settings: Settings
) -> None:
    for panel, model in zip(axes, models, strict=True):
        for number, kind in enumerate(("vcas", "wta", "shuffled")):
            for budget, line in zip(settings.budgets, ("-", "--"), strict=False):
                groups = [g for g in _groups(rows, [model], settings) if g[2] == budget]
                values = [
                    sum(row[kind] for row in g[3]) / sum(row[OURS] for row in g[3]) for g in groups
                ]
                label = f"{LABELS[kind]}, {budget:g}"
                panel.plot(values, color=f"C{number}", ls=line, marker="o", ms=3, label=label)
        panel.axhline(1, color="k", lw=1)
        steps = settings.steps
        panel.set_xticks(range(len(steps)), [str(step) for step in steps])
        label_axes(panel, model, "steps of exact training", "variance of dW over that of ours")
    axes[-1].legend(fontsize=6)


WEIGHT_VARIANCE = WeightVarianceStudy(
    name="weight-variance",
    help="the variance of dW against VCAS and WTA-CRS",
    out="docs/results/rows-weight-variance",
    settings=Settings(),
)
