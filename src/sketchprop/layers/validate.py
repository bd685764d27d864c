"""What will go wrong, or will not pay, in one model with one sketch: all of it, before training."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.nn.parameter import UninitializedParameter

from ..core.checks import TENSOR_PARALLEL
from ..sketches import AnySketch, Planner, Rows, RowSketch, Split
from .blocks import SketchedBlock
from .choose import Choice, choose, known_class
from .known import block_class
from .select import Filter, blocks_of
from .sketched import altered, of_library

TINY = 3e7
"""FLOPs of a layer's exact backward, below which a draw costs what it saves: L1(0.1) at
128 × 784 × 64, which has 2.6e7, gains little (docs/results/speed.md)."""

Level = Literal["error", "harm", "waste"]


@dataclass(frozen=True)
class Finding:
    """One problem of one module, and what to do about it.

    ``level``: ``"error"``: gradients would be wrong, or the request cannot be met; ``sketch_``
    raises. ``"harm"``: gradients are unbiased, but training may fail; ``sketch_`` warns.
    ``"waste"``: it saves too little.
    """

    level: Level
    name: str
    """The module's name; empty for the model itself."""
    text: str
    fix: str = ""

    def __str__(self) -> str:
        place = f"{self.name!r}: " if self.name and repr(self.name) not in self.text else ""
        return f"{place}{self.text}{'; ' if self.fix else ''}{self.fix}"


def validate(
    model: nn.Module,
    sketch: AnySketch | Mapping[str, AnySketch | None],
    filter_fn: Filter | None = None,
    *,
    planner: Planner | None = None,
    rows: int | None = None,
) -> tuple[Finding, ...]:
    """Lists the problems that ``sketch_`` would have with these arguments; changes nothing.

    ``sketch``, ``filter_fn`` and ``planner`` are those of ``sketch_``. Errors come first:
    ``sketch_`` raises them all in one message. With ``rows``, the samples × tokens of a batch, it
    also names layers that are too small to gain.

    >>> from sketchprop import Rows
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    >>> [(found.level, found.name) for found in validate(model, Rows(0.3), rows=128)]
    [('harm', '1'), ('waste', '0')]
    """
    return findings(model, choose(model, sketch, filter_fn, planner), rows)


def findings(model: nn.Module, choice: Choice, rows: int | None = None) -> tuple[Finding, ...]:
    """``validate`` for a choice that is made already."""
    found = [
        *(Finding("error", name, text) for name, text in choice.problems),
        *_of_model(model, choice),
        *_of_modules(model, choice),
        *_of_blocks(choice),
        *_of_layers(model, choice, rows),
    ]
    levels = ("error", "harm", "waste")
    return tuple(sorted(found, key=lambda finding: levels.index(finding.level)))


def refusal_of(found: tuple[Finding, ...]) -> str:
    """The errors as one message; empty if there are none."""
    errors = [str(finding) for finding in found if finding.level == "error"]
    if len(errors) < 2:
        return "".join(errors)
    return f"sketch_ has {len(errors)} problems:\n" + "\n".join(f"- {text}" for text in errors)


def mixing_samples(model: nn.Module) -> dict[str, nn.Module]:
    """BatchNorm in training mode: its backward fills rows of zeros, and rows of noise, anew."""
    kind = nn.modules.batchnorm._BatchNorm
    return {n: m for n, m in model.named_modules() if isinstance(m, kind) and m.training}


def drops_rows(sketch: AnySketch | None) -> bool:
    """Whether some rows of G are zero in what goes on below; not behind a block's residual."""
    if isinstance(sketch, Split):
        return drops_rows(sketch.input)
    exact = isinstance(sketch, Rows) and sketch.by == "nonzero"
    return isinstance(sketch, RowSketch) and "G" in sketch.sees and not exact


def _of_model(model: nn.Module, choice: Choice) -> Iterator[Finding]:
    """What mixes samples, what the sketch cannot take, and kept tokens that have few blocks."""
    dropping, mixing = next(filter(drops_rows, choice.taken.values()), None), mixing_samples(model)
    if dropping is not None and mixing:
        first = next(iter(mixing))
        more = f", and {len(mixing) - 1} more" if len(mixing) > 1 else ""
        yield Finding(
            "harm",
            first,
            f"{type(mixing[first]).__name__} in training mode{more}: it mixes samples, and "
            f"{dropping!r} drops some; the noise can ruin such a network",
            "put it into eval mode, use LayerNorm or GroupNorm, or stay exact",
        )
    named = {name for name, _ in choice.problems}
    for name, reason in choice.refused.items():
        if name not in named:
            what, _, fix = reason.partition("; ")
            yield Finding("waste", name, f"stays exact: {what}", fix)
    if len(choice.blocks) == 1 and choice.blocks <= set(blocks_of(model)):
        yield Finding(
            "waste",
            next(iter(choice.blocks)),
            "the only block that is sketched: if each token has its own label, dropping tokens "
            "here only drops their labels, and no other block gets cheaper",
            "ask advise(model, loss_fn, batches)",
        )
    if choice.stray is not None:
        yield Finding(
            "waste",
            "",
            f"{choice.stray!r} finds no transformer block that it knows: single layers get "
            f"{choice.stray.rest!r}, which saves less and adds more noise",
            "ask advise(model, loss_fn, batches), or describe your block with @sketchable",
        )


def _of_modules(model: nn.Module, choice: Choice) -> Iterator[Finding]:
    """Blocks to which ``fully_shard`` gave another class, and layers without a shape."""
    for name, module in model.named_modules():
        kind = type(module)
        parents = [p for p in kind.__mro__[1:] if issubclass(p, nn.Module) and block_class(p)]
        shards = any(parent.__name__ == "FSDPModule" for parent in kind.__mro__)
        wanted = choice.blocks or choice.stray is not None
        if wanted and parents and shards and not issubclass(kind, SketchedBlock):
            text = (
                f"a {parents[0].__name__} wrapped by fully_shard, which kept tokens do not "
                "recognise"
            )
            yield Finding("error", name, text, "call sketch_ first, then fully_shard")
        if any(isinstance(p, UninitializedParameter) for p in module._parameters.values()):
            text = f"{kind.__name__} has no shape yet and is not taken"
            yield Finding("waste", name, text, "run one batch before sketch_")


def _of_blocks(choice: Choice) -> Iterator[Finding]:
    """Parts of a block that are not those that are known."""
    for name in sorted(choice.blocks):
        block = choice.layers[name]
        known = of_library(type(block))
        for inner, module in block.named_modules(prefix=name):
            if module is not block and (
                altered(module) or (known and not of_library(type(module)))
            ):
                text = (
                    f"{type(module).__name__} has hooks, a replaced forward or an unknown class: "
                    "the branch that contains it stays exact"
                )
                yield Finding("waste", inner, text)


def _of_layers(model: nn.Module, choice: Choice, rows: int | None) -> Iterator[Finding]:
    """Of each that is taken: whether its weight is whole, its own, used and large enough."""
    taken = {name: (choice.layers[name], s) for name, s in choice.taken.items() if s is not None}
    inner = {m for layer, _ in taken.values() for m in layer.modules()}
    users = {
        p: name
        for name, module in model.named_modules()
        if module not in inner
        for p in module._parameters.values()
    }
    # Parameters of ``fully_shard`` are whole wherever a layer meets them.
    shards: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    whole = {p for m in model.modules() if isinstance(m, shards) for p in m.parameters()}
    for name, (layer, sketch) in taken.items():
        spread = [p for p in layer.parameters() if hasattr(p, "placements") and p not in whole]
        if spread and not sketch.keeps_all(sys.maxsize, sys.maxsize, sys.maxsize):
            placements = tuple(getattr(spread[0], "placements", ()))
            text = f"its weight is tensor-parallel, a DTensor with placements {placements}"
            yield Finding("error", name, text, TENSOR_PARALLEL)
        if model.training and not layer.training:
            text = "in eval mode while the model trains, where nothing is sketched"
            yield Finding("waste", name, text, f"{name}.train(), or leave it out")
        if shared := [users[p] for p in layer.parameters() if p in users]:
            yield Finding(
                "waste",
                name,
                f"it shares its weight with {shared[0]!r}, which stays exact: the sum of both "
                "gradients has the sketch's noise",
                f"leave it exact, {{{name!r}: None}}",
            )
        kind = known_class(type(layer))
        assert kind is not None
        flops = sum(size.exact_flops for size in kind.sizes(layer, rows or 0))
        if rows and flops < TINY:
            what = "block" if issubclass(kind, SketchedBlock) else "layer"
            text = f"a tiny {what}: {flops / 1e6:.2g} MFLOP backward at {rows} rows"
            yield Finding("waste", name, text, "leave it exact, or ask plan what it gains")
