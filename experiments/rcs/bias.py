"""The bias of dW in each layer, on real gradients while a model trains.

Exact-size draws keep atom i with probability pᵢ and scale it by 1/pᵢ, so E[Ĝ] is the sum of all
atoms with pᵢ > 0: for the paper's RCS that is P Pᵀ G, P the left singular vectors of G·W. The
mean is computed, not sampled.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sketchprop.core.vjp import Vjp
from sketchprop.sketches import Sketch

from ..lab import ExperimentError
from ..lab.layers import captured
from ..lab.pages import missing, write_csv
from ..lab.trainer import Batch
from ..methods import METHODS, layer_sketch

TABLE = "bias.csv"
RARE = 1e-3
"""Atoms less likely than this are seldom met in a thousand steps."""


@dataclass(frozen=True)
class LayerBias:
    """‖E[dW] - dW‖/‖dW‖ of one layer, one method, at one step."""

    step: int
    layer: str
    rows: int
    n: int
    d: int
    method: str
    budget: float
    error: float
    row: float
    """The same for one row of dW, the median over rows: what an optimizer that scales every weight
    by its own gradients sees."""
    rare: float
    """``error`` when atoms with p < 1/1000 are left out of the mean."""
    unseen: float
    """The share of ‖G‖² that has no chance to be drawn."""

    @property
    def shape(self) -> str:
        return "expands" if self.n > self.d else "contracts" if self.n < self.d else "square"


def expected(sketch: Sketch, G: Tensor, W: Tensor, least: float = 0.0) -> Tensor:
    """E[Ĝ] over the draw, counting only atoms with p > ``least``."""
    vjp = Vjp(G, W)
    atoms = sketch.atoms(vjp)
    kept = (atoms.probabilities > least).nonzero().flatten()
    if len(kept) == 0:
        return torch.zeros_like(G)
    return atoms.keep(vjp, kept, atoms.probabilities.new_ones(len(kept))).dense()


def layer_bias(
    sketch: Sketch, G: Tensor, W: Tensor, X: Tensor
) -> tuple[float, float, float, float]:
    """``error``, ``row``, ``rare`` and ``unseen`` of :class:`LayerBias`."""
    truth = (G.mT @ X).double()

    def difference(mean: Tensor) -> Tensor:
        return (mean.mT @ X).double() - truth

    def relative(off: Tensor) -> float:
        return float(off.norm() / truth.norm().clamp(min=1e-300))

    mean = expected(sketch, G, W)
    off = difference(mean)
    rows = off.norm(dim=1) / truth.norm(dim=1).clamp(min=1e-300)
    unseen = (mean.double() - G.double()).square().sum() / G.double().square().sum()
    rare = relative(difference(expected(sketch, G, W, RARE)))
    return relative(off), float(rows.median()), rare, float(unseen)


def measure_bias(
    model: nn.Module,
    batch: Batch,
    layers: Sequence[str],
    methods: Sequence[tuple[str, float]],
    step: int,
) -> list[LayerBias]:
    """All methods on the exact gradients of ``batch``; the model stays as it is."""
    found: list[LayerBias] = []
    for name, (G, W, X) in captured(model, batch, layers).items():
        for method, budget in methods:
            sketch = layer_sketch(METHODS[method].expression(budget))
            if sketch is None or sketch.sampling == "independent":
                raise ExperimentError(f"{method}: the mean is known for exact-size draws only")
            n, d = W.shape
            values = layer_bias(sketch, G, W, X)
            found.append(LayerBias(step, name, len(G), n, d, method, budget, *values))
    return found


def write_bias(found: Sequence[LayerBias], folder: Path) -> Path:
    return write_csv(folder / TABLE, [asdict(entry) for entry in found], short=False)


def read_bias(folder: Path) -> list[LayerBias]:
    path = folder / TABLE
    if not path.is_file():
        raise missing(path)
    kinds: Mapping[str, Any] = {"int": int, "str": str, "float": float}
    with path.open(newline="", encoding="utf-8") as file:
        return [
            LayerBias(**{f.name: kinds[str(f.type)](row[f.name]) for f in fields(LayerBias)})
            for row in csv.DictReader(file)
        ]
