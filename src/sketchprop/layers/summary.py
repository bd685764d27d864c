"""What was done to each layer of a model, and why a layer was left alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from ..core.cost import Size
from ..core.table import LAYER, Column, Report, Table, words
from ..sketches import AnySketch, Tokens
from .blocks import SketchedBlock
from .choose import refusal
from .known import BUILT_IN, block_class, sketched_class
from .sketched import SketchedModule


@dataclass(frozen=True)
class LayerSummary:
    """One layer with a weight."""

    name: str
    kind: str
    shape: tuple[int, ...]
    sketch: AnySketch | None
    kept: float
    """The share of atoms that the draw keeps, 1.0 for an exact layer."""
    flops: float
    """Backward FLOPs as a share of the exact ones, scoring and solving included."""
    note: str
    saved: float = 1.0
    """Rows of the input that this layer keeps for dW, as a share. What another operation keeps
    alive is not freed: ``meters.saved_bytes`` counts by unique storage."""


@dataclass(frozen=True)
class Summary(Report):
    """Printable; ``.layers`` for programs, ``.as_dict()`` for logs."""

    rows: int
    layers: tuple[LayerSummary, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def tables(self) -> list[Table]:
        columns = (
            *(LAYER, words("kind"), words("shape"), words("sketch"), Column("kept", ".3f")),
            *(Column(f"FLOPs at {self.rows} rows", ".3f"), Column("saved", ".3f"), words("note")),
        )
        rows = [
            (
                *(layer.name, layer.kind, layer.shape, layer.sketch or "exact", layer.kept),
                *(layer.flops, layer.saved, layer.note),
            )
            for layer in self.layers
        ]
        return [Table("", columns, rows)]


def summary(model: nn.Module, rows: int = 128) -> Summary:
    """A line per layer that has a weight matrix: its sketch, what is kept, or why it is exact.

    ``rows``: the number of rows (samples × tokens) for which FLOPs are counted.

    >>> from sketchprop import L1, sketch_
    >>> model = sketch_(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 10)), L1(0.125))
    >>> [(layer.kept, layer.note) for layer in summary(model).layers]
    [(0.125, ''), (1.0, 'not taken by sketch_')]
    """
    layers: list[LayerSummary] = []
    states = [m.sketching for m in model.modules() if isinstance(m, SketchedModule)]
    parts: dict[nn.Module, str] = {}
    inner: dict[nn.Module, LayerSummary] = {}
    tokens = any(isinstance(m, SketchedBlock) for m in model.modules())
    for name, module in model.named_modules():
        if isinstance(module, SketchedBlock):
            layers.append(_block(name, module, rows))
            inner.update(_parts_of(name, module, rows))
            continue
        if module in inner:
            layers.append(inner[module])
            continue
        if tokens and block_class(type(module)) is not None:
            note = refusal(module, Tokens(1.0)) or "a block that sketch_ did not take"
            layers.append(LayerSummary(name, type(module).__name__, (), None, 1.0, 1.0, note))
        if isinstance(module, nn.MultiheadAttention):
            parts[module.out_proj] = name
        shape = _shape(module)
        if shape is None:
            continue
        kind = type(module).__name__
        if isinstance(module, SketchedModule):
            layers.append(_sketched(name, module, shape, rows))
            continue
        if module in parts:
            note = f"never called itself: a part of {parts[module]!r}"
        elif sketched_class(type(module)) is not None:
            reasons = [r for r in (refusal(module, s.sketch, s.planner) for s in states) if r]
            note = reasons[0] if reasons else "not taken by sketch_"
        else:
            note = _unknown(module)
        layers.append(LayerSummary(name, kind, shape, None, 1.0, 1.0, note))
    return Summary(rows, tuple(layers))


def _block(name: str, module: SketchedBlock, rows: int) -> LayerSummary:
    assert isinstance(module, nn.Module)
    state, tokens = module.sketching, module.sketching.sketch
    sizes = module.sizes(module, rows)
    exact = sum(size.exact_flops for size in sizes)
    share = sum(state.cost(size).total for size in sizes) / max(1.0, exact)
    shown = f"rows {tokens.budget:g}, queries {tokens.query_budget:g}, keys {tokens.key_budget:g}"
    notes = [note for note in (shown, module.left, state.note, state.tuned) if note]
    kept = tokens.kept(rows, 1, 1)
    kind = type(module).__name__
    return LayerSummary(name, kind, (), tokens, kept, share, "; ".join(notes))


def _parts_of(name: str, block: SketchedBlock, rows: int) -> dict[nn.Module, LayerSummary]:
    """A line for each layer of a block that has a weight matrix."""
    assert isinstance(block, nn.Module)
    lines = {}
    state = block.sketching
    for inside, module, role in block.parts(block):
        sizes = block.sizes_of(module, role, rows)
        exact = sum(size.exact_flops for size in sizes)
        share = sum(state.cost(size).total for size in sizes) / max(1.0, exact)
        rows_kept = [
            (1.0 if role == "exact" else state.sketch.of(size.part).kept(*size[:3]))
            * size.exact_flops
            for size in sizes
        ]
        own = f"{name}.{inside}" if name else inside
        shape = sizes[0][1:3]
        sketch = None if role == "exact" else state.sketch
        note = f"a part of {name!r}: {role}"
        kind = type(module).__name__
        lines[module] = LayerSummary(
            own, kind, shape, sketch, sum(rows_kept) / max(1.0, exact), share, note
        )
    return lines


def _sketched(name: str, module: SketchedModule, shape: tuple[int, ...], rows: int) -> LayerSummary:
    assert isinstance(module, nn.Module)
    kind, state = type(module).__name__, module.sketching
    sketch = state.sketch
    sizes = [Size(rows, n, d) for n, d in module.matrices(module)]
    if all(sketch.keeps_all(*size[:3]) for size in sizes):
        note = state.tuned or f"{sketch!r} keeps everything at {rows} rows: exact"
        return LayerSummary(name, kind, shape, sketch, 1.0, 1.0, note)
    exact = [size.exact_flops for size in sizes]
    kept = sum(sketch.kept(*s[:3]) * e for s, e in zip(sizes, exact, strict=True)) / sum(exact)
    share = sum(state.cost(size).total for size in sizes) / sum(exact)
    notes = [repr(state.planner)] if state.planner is not None else []
    if state.tuned:
        notes.append(state.tuned)
    saved = sketch.saved_share(rows)
    return LayerSummary(name, kind, shape, sketch, kept, share, "; ".join(notes), saved)


def _shape(module: nn.Module) -> tuple[int, ...] | None:
    """The shape of the first weight with a matrix in it; ``None`` if the module has none."""
    for name, parameter in module._parameters.items():
        if parameter is None or isinstance(parameter, UninitializedParameter):
            continue
        if parameter.dim() > 1 and not name.startswith("bias"):
            return tuple(parameter.shape)
    return None


def _unknown(module: nn.Module) -> str:
    kind = type(module).__name__
    parents = [plain.__name__ for plain in BUILT_IN if isinstance(module, plain)]
    if parents:
        return f"{kind} is a subclass of nn.{parents[0]} and may compute something else"
    stacks = [n for n, p in module._parameters.items() if p is not None and p.dim() == 3]
    if stacks and "weight" not in stacks:
        return f"{kind} is not a class that sketch_ knows: stacks of weights {', '.join(stacks)}"
    return f"{kind} is not a class that sketch_ knows"
