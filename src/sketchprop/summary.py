"""What was done to each layer of a model, and why a layer was left alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from ._table import table
from .modules import SketchedModule
from .sketches import Sketch
from .transform import is_sketchable


@dataclass(frozen=True)
class LayerSummary:
    """One layer with a weight."""

    name: str
    kind: str
    shape: tuple[int, ...]
    sketch: Sketch | None
    kept: float
    """The share of atoms that the draw keeps, 1.0 for an exact layer."""
    flops: float
    """Backward FLOPs as a share of the exact ones, scoring and solving included."""
    note: str


@dataclass(frozen=True)
class Summary:
    """Printable; ``.layers`` for programs, ``.as_dict()`` for logs."""

    rows: int
    layers: tuple[LayerSummary, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        header = ("layer", "kind", "shape", "sketch", "kept", f"FLOPs at {self.rows} rows", "note")
        cells = [
            (
                layer.name or "(model)",
                layer.kind,
                " × ".join(map(str, layer.shape)),
                "exact" if layer.sketch is None else repr(layer.sketch),
                f"{layer.kept:.3f}",
                f"{layer.flops:.3f}",
                layer.note,
            )
            for layer in self.layers
        ]
        return table(header, cells, "<<<<>><")


def summary(model: nn.Module, rows: int = 128) -> Summary:
    """A line per layer that has a weight matrix: its sketch, what is kept, or why it is exact.

    ``rows``: the number of rows (samples × tokens) for which FLOPs are counted.

    >>> print(summary(model))
    """
    layers = []
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if is_sketchable(module):
            layers.append(_sketchable(name, module, rows))
        elif weight is not None and weight.dim() > 1:
            kind = type(module).__name__
            note = f"{kind} is not a class that sketch_ knows"
            layers.append(LayerSummary(name, kind, tuple(weight.shape), None, 1.0, 1.0, note))
    return Summary(rows, tuple(layers))


def _sketchable(name: str, module: nn.Module, rows: int) -> LayerSummary:
    weight = module.weight
    shape: tuple[int, ...] = tuple(weight.shape)  # type: ignore[arg-type]
    kind = type(module).__name__
    if not isinstance(module, SketchedModule):
        return LayerSummary(name, kind, shape, None, 1.0, 1.0, "not taken by sketch_")
    n, d = shape
    atoms = module.sketch.atom_count(rows, n, d)
    if module.sketch.keeps_all(rows, n, d):
        note = f"the budget keeps all {atoms} atoms: exact"
        return LayerSummary(name, kind, shape, module.sketch, 1.0, 1.0, note)
    kept = module.sketch.rank(atoms) / atoms
    flops = module.sketch.flops(rows, n, d) / (4 * rows * n * d)
    return LayerSummary(name, kind, shape, module.sketch, kept, flops, "")
