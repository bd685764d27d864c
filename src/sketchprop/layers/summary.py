"""What was done to each layer of a model, and why a layer was left alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import UninitializedParameter

from ..core.cost import Size
from ..core.table import LAYER, Column, Report, Table, words
from ..sketches import AnySketch, Tokens
from .blocks import SketchedBlock
from .choose import refusal
from .gate import Gate
from .known import BUILT_IN, block_class, sketched_class
from .sketched import SketchedModule, Sketching


@dataclass(frozen=True)
class LayerSummary:
    """One layer with a weight."""

    name: str
    kind: str
    shape: tuple[int, ...]
    sketch: AnySketch | None = None
    kept: float = 1.0
    """The share of atoms that the draw keeps, 1.0 for an exact layer."""
    flops: float = 1.0
    """Backward FLOPs as a share of the exact ones, scoring and solving included; 1.0 at a gate,
    which has none."""
    note: str = ""
    saved: float = 1.0
    """The share of the input's rows that this layer saves for dW. Memory that another operation
    holds, too, is not freed: ``meters.saved_bytes`` counts each storage once."""


@dataclass(frozen=True)
class Summary(Report):
    """Printable; ``.layers`` for programs, ``.as_dict()`` for logs."""

    rows: int
    layers: tuple[LayerSummary, ...]

    def tables(self) -> list[Table]:
        shares = ("kept", f"FLOPs at {self.rows} rows", "saved")
        columns = (
            *(LAYER, words("kind"), words("shape"), words("sketch")),
            *(Column(title, ".3f") for title in shares),
            words("note"),
        )
        rows = [
            (la.name, la.kind, la.shape, la.sketch or "exact", la.kept, la.flops, la.saved, la.note)
            for la in self.layers
        ]
        return [Table("", columns, rows)]


def summary(model: nn.Module, rows: int = 128) -> Summary:
    """Lists each weight matrix and gate: its sketch and the share it keeps, or why it is exact.

    ``rows``: the number of rows (samples × tokens) for which FLOPs are counted.

    >>> from sketchprop import L1, sketch_
    >>> model = sketch_(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 10)), L1(0.125))
    >>> [(layer.kept, layer.note) for layer in summary(model).layers]
    [(0.125, ''), (1.0, 'not taken by sketch_')]
    """
    layers: list[LayerSummary] = []
    states = [m.sketching for m in model.modules() if isinstance(m, SketchedModule)]
    tokens = any(isinstance(m, SketchedBlock) for m in model.modules())
    parts: dict[nn.Module, LayerSummary] = {}
    notes: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        kind, shape = type(module).__name__, _shape(module)
        if isinstance(module, Gate):
            shape = (module.columns,)
        if isinstance(module, SketchedBlock):
            layers.append(_block(name, module, rows))
            parts.update(_parts_of(name, module, rows))
            continue
        if module in parts:
            layers.append(parts[module])
            continue
        if tokens and block_class(type(module)) is not None:
            note = refusal(module, Tokens(1.0)) or "a block that sketch_ did not take"
            layers.append(LayerSummary(name, kind, (), note=note))
        if isinstance(module, nn.MultiheadAttention):
            notes[module.out_proj] = f"never called itself: a part of {name!r}"
        if shape is None:
            continue
        if isinstance(module, SketchedModule):
            layers.append(_sketched(name, module, shape, rows))
            continue
        if sketched_class(type(module)) is not None:
            reasons = (refusal(module, state.sketch, state.planner) for state in states)
            notes.setdefault(module, next(filter(None, reasons), "not taken by sketch_"))
        note = notes.get(module) or _unknown(module)
        layers.append(LayerSummary(name, kind, shape, note=note))
    return Summary(rows, tuple(layers))


def _shares(
    state: Sketching, sizes: Sequence[Size], kept: Callable[[Size], float]
) -> tuple[float, float]:
    """What is kept of several products, by the exact FLOPs of each, and the FLOPs that are left."""
    exact = sum(size.exact_flops for size in sizes)
    if not exact:
        return kept(sizes[0]), 1.0
    flops = sum(state.cost(size).total for size in sizes)
    return sum(kept(size) * size.exact_flops for size in sizes) / exact, flops / exact


def _block(name: str, module: SketchedBlock, rows: int) -> LayerSummary:
    assert isinstance(module, nn.Module)
    state, tokens = module.sketching, module.sketching.sketch
    shown = f"rows {tokens.budget:g}, queries {tokens.query_budget:g}, keys {tokens.key_budget:g}"
    if state.shares is not None and not state.tuned:
        shown += f" ({state.shares.note})"
    note = "; ".join(filter(None, (shown, module.left, state.note, state.tuned)))
    shares = _shares(
        state,
        module.sizes(module, rows),
        lambda size: 1.0 if size.part in state.whole else tokens.kept(rows, 1, 1),
    )
    return LayerSummary(name, type(module).__name__, (), tokens, *shares, note)


def _parts_of(name: str, block: SketchedBlock, rows: int) -> dict[nn.Module, LayerSummary]:
    """A line for each layer of a block that has a weight matrix."""
    assert isinstance(block, nn.Module)
    lines, state = {}, block.sketching

    def kept(size: Size) -> float:
        share: float = state.sketch.of(size.part).kept(*size[:3])
        return 1.0 if size.part in ("exact", *state.whole) else share

    for inside, module, role in block.parts(block):
        sizes = block.sizes_of(module, role, rows)
        own, kind = f"{name}.{inside}" if name else inside, type(module).__name__
        sketch, note = None if role == "exact" else state.sketch, f"a part of {name!r}: {role}"
        shares = _shares(state, sizes, kept)
        lines[module] = LayerSummary(own, kind, sizes[0][1:3], sketch, *shares, note)
    return lines


def _sketched(name: str, module: SketchedModule, shape: tuple[int, ...], rows: int) -> LayerSummary:
    assert isinstance(module, nn.Module)
    kind, state, sketch = type(module).__name__, module.sketching, module.sketch
    sizes = [Size(rows, n, d) for n, d in module.matrices(module)]
    notes = [repr(state.planner) if state.planner is not None else "", state.tuned]
    if all(sketch.keeps_all(*size[:3]) for size in sizes):
        notes = [state.tuned or f"{sketch!r} keeps everything at {rows} rows: exact"]
    shares = _shares(state, sizes, lambda size: sketch.kept(*size[:3]))
    note, saved = "; ".join(filter(None, notes)), sketch.saved_share(rows)
    return LayerSummary(name, kind, shape, sketch, *shares, note, saved)


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
