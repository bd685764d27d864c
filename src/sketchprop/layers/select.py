"""Which layers and blocks a model has, and which stay exact unless a filter says otherwise."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from .blocks import SketchedBlock
from .gate import Gate
from .known import block_class, sketched_class

Layers = dict[str, nn.Module]
Filter = Callable[[nn.Module, str], bool]
"""Asked about each layer that can be sketched, or block, with its name."""
NO_HEAD = (nn.Conv1d, nn.Conv2d, nn.MultiheadAttention, Gate)
"""What is never the head of a model."""
ADAPTED = {"lora_A", "lora_B", "original_module"}
"""What PEFT puts beside a model's layers: the factors of LoRA, of a few rows or columns and with
nothing to save, and the unused originals of layers that it trains as copies."""


def everything(module: nn.Module, name: str) -> bool:
    """A filter that takes all: ``sketch_(model, Rows(0.3), select.everything)``."""
    return True


def usual(layers: Layers) -> Filter:
    """All but adapters and the last linear layer: in most models the head, whose gradient all
    others build on."""
    spare = {name for name in layers if not ADAPTED.isdisjoint(name.split("."))}
    linear = [n for n, m in layers.items() if n not in spare and not isinstance(m, NO_HEAD)]
    spare.update(linear[-1:])
    return lambda module, name: name not in spare


def sketchable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers whose very class ``sketch_`` knows, by name, in the order of registration."""
    return {
        name: module
        for name, module in model.named_modules()
        if sketched_class(type(module)) is not None
    }


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks whose very class ``sketch_`` knows, by name; one inside another is part of it."""
    found: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module not in inside and block_class(type(module)) is not None:
            found[name] = module
            inside.update(module.modules())
    return found


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that can be sketched and the blocks that are, without the layers in these."""
    whole = {m for m in model.modules() if isinstance(m, SketchedBlock)}
    inner = {m for block in whole for m in block.modules()} - whole
    return {
        name: module
        for name, module in model.named_modules()
        if module in whole or (sketched_class(type(module)) is not None and module not in inner)
    }
