"""The bias of dW in each layer, on real gradients while a model trains.

Exact-size draws keep atom i with probability pᵢ and scale it by 1/pᵢ, so E[Ĝ] is the sum of all
atoms with pᵢ > 0: for the paper's RCS that is P Pᵀ G, P the left singular vectors of G·W. The
mean is computed, not sampled.
"""

from __future__ import annotations

import copy
import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sketchprop.sketches.base import AtomSketch

from .methods import METHODS, ExperimentError, make_sketch
from .store import write_file

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


def expected(sketch: AtomSketch, G: Tensor, W: Tensor, least: float = 0.0) -> Tensor:
    """E[Ĝ] over the draw, counting only atoms with p > ``least``."""
    plan = sketch.plan(G, W)
    kept = (plan.probabilities > least).nonzero().flatten()
    if len(kept) == 0:
        return torch.zeros_like(G)
    return sketch.keep(G, plan, kept, plan.probabilities.new_ones(len(kept))).dense()


def layer_bias(
    sketch: AtomSketch, G: Tensor, W: Tensor, X: Tensor
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
    batch: tuple[Tensor, Tensor],
    layers: Sequence[str],
    methods: Sequence[tuple[str, float]],
    step: int,
) -> list[LayerBias]:
    """All methods on the exact gradients of ``batch``; the model stays as it is."""
    found: list[LayerBias] = []
    for name, (G, W, X) in gradients(model, batch, layers).items():
        for method, budget in methods:
            sketch = make_sketch(METHODS[method].expression(budget))
            if not isinstance(sketch, AtomSketch) or sketch.sampling != "exact":
                raise ExperimentError(f"{method}: the mean is known for exact-size draws only")
            n, d = W.shape
            values = layer_bias(sketch, G, W, X)
            found.append(LayerBias(step, name, len(G), n, d, method, budget, *values))
    return found


def gradients(
    model: nn.Module, batch: tuple[Tensor, Tensor], layers: Sequence[str]
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """G, W and X of each layer in an exact backward pass over a copy of the model."""
    twin = copy.deepcopy(model).train()
    modules = {name: twin.get_submodule(name) for name in layers}
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def watch(name: str, module: nn.Module) -> Any:
        def note(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[name], outputs[name] = args[0].detach(), output

        return module.register_forward_hook(note)

    for name, module in modules.items():
        watch(name, module)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        loss = F.cross_entropy(twin(batch[0]), batch[1])
    grads = torch.autograd.grad(loss, list(outputs.values()))
    found = {}
    for name, grad in zip(outputs, grads, strict=True):
        weight = modules[name].weight
        assert isinstance(weight, Tensor)
        found[name] = (grad.flatten(0, -2), weight.detach(), inputs[name].flatten(0, -2))
    return found


def write_bias(found: Sequence[LayerBias], folder: Path) -> Path:
    text = io.StringIO()
    names = [field.name for field in fields(LayerBias)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(entry) for entry in found)
    return write_file(folder / TABLE, text.getvalue().encode())


def read_bias(folder: Path) -> list[LayerBias]:
    path = folder / TABLE
    if not path.is_file():
        raise ExperimentError(f"{folder} has no {TABLE}; run the same command without --stored")
    kinds: Mapping[str, Any] = {"int": int, "str": str, "float": float}
    with path.open(newline="", encoding="utf-8") as file:
        return [
            LayerBias(**{f.name: kinds[str(f.type)](row[f.name]) for f in fields(LayerBias)})
            for row in csv.DictReader(file)
        ]
