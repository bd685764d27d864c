"""Which layers of a model: small filters that compose.

    sketch_(model, Rows(0.3), filter_fn=select.linear & ~select.last & select.wide(64))

A filter is asked about each layer that can be sketched, in the order of the model. Plain functions
``(module, name) -> bool`` are filters, too, alone or beside an operator. Like ``and`` and ``or``,
``&`` and ``|`` ask the right side only where the left one leaves it open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from .blocks import SketchedBlock
from .gate import Gate
from .known import block_class, sketched_class

Layers = dict[str, nn.Module]
Predicate = Callable[[nn.Module, str], bool]


@dataclass(frozen=True, repr=False)
class Selector:
    """A rule about the layers of a model, shown as ``text``.

    ``bind(layers)`` gives the plain function ``(module, name) -> bool`` for one model: rules such
    as ``last`` need to know all of its layers.
    """

    text: str
    bind: Callable[[Layers], Predicate] = field(compare=False)

    def names(self, model: nn.Module) -> list[str]:
        """The layers of ``model`` that this picks, in the model's order.

        >>> wide(64).names(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
        ['0']
        """
        layers = sketchable_layers(model)
        picks = self.bind(layers)
        return [name for name, module in layers.items() if picks(module, name)]

    def __and__(self, other: Selector | Predicate) -> Selector:
        return self._with(other, "&", lambda a, b: lambda *layer: a(*layer) and b(*layer))

    def __or__(self, other: Selector | Predicate) -> Selector:
        return self._with(other, "|", lambda a, b: lambda *layer: a(*layer) or b(*layer))

    def _with(
        self,
        other: Selector | Predicate,
        sign: str,
        both: Callable[[Predicate, Predicate], Predicate],
    ) -> Selector:
        right = as_selector(other)
        return Selector(
            f"({self} {sign} {right})", lambda layers: both(self.bind(layers), right.bind(layers))
        )

    def __rand__(self, other: Predicate) -> Selector:
        return as_selector(other) & self

    def __ror__(self, other: Predicate) -> Selector:
        return as_selector(other) | self

    def __invert__(self) -> Selector:
        def bind(layers: Layers) -> Predicate:
            picks = self.bind(layers)
            return lambda module, name: not picks(module, name)

        return Selector(f"~{self}", bind)

    def __repr__(self) -> str:
        return self.text


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


def as_selector(rule: Selector | Predicate) -> Selector:
    """A filter from a plain function ``(module, name) -> bool``."""
    if isinstance(rule, Selector):
        return rule
    if not callable(rule):
        raise TypeError(
            f"{rule!r} is not a filter; give a function (module, name) -> bool, or one of "
            "sketchprop.select, for example select.linear & select.named('blocks.*')"
        )
    return Selector(getattr(rule, "__name__", repr(rule)), lambda layers: rule)


def named(*patterns: str) -> Selector:
    """Layers whose name matches one of the patterns (``*``, ``?``, ``[...]``)."""

    def matches(_: nn.Module, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    text = f"named({', '.join(map(repr, patterns))})"
    return Selector(text, lambda layers: matches)


def of(*types: type[nn.Module]) -> Selector:
    """Layers of the given classes, sketched already or not."""
    text = f"of({', '.join(t.__name__ for t in types)})"
    return Selector(text, lambda layers: lambda module, name: isinstance(module, types))


def wide(size: int) -> Selector:
    """Layers with at least ``size`` outputs and inputs in each of their weight matrices.

    A convolution's inputs are channels × kernel: the size of a flattened filter.
    """

    def is_wide(module: nn.Module, _: str) -> bool:
        sketched = sketched_class(type(module)) or block_class(type(module))
        return sketched is not None and min(map(min, sketched.matrices(module))) >= size

    return Selector(f"wide({size})", lambda layers: is_wide)


conv = Selector("conv", of(nn.Conv1d, nn.Conv2d).bind)
"""Convolutions."""

attention = Selector("attention", of(nn.MultiheadAttention).bind)
"""``nn.MultiheadAttention``, each taken whole."""

gates = Selector("gates", of(Gate).bind)
"""Nodes of a graph, ``sketchprop.Gate``."""

linear = Selector("linear", (~(conv | attention | gates)).bind)
"""Linear layers: ``nn.Linear``, transformers' ``Conv1D``, and layers made ``sketchable``."""


def _of_adapter(module: nn.Module, name: str) -> bool:
    return not {"lora_A", "lora_B", "original_module"}.isdisjoint(name.split("."))


adapters = Selector("adapters", lambda layers: _of_adapter)
"""What PEFT puts beside a model's layers: the factors of LoRA, of a few rows or columns and with
nothing to save, and the unused originals of layers that it trains as copies."""


everything = Selector("everything", lambda layers: lambda module, name: True)
"""Every layer that can be sketched."""


def _is_last(layers: Layers) -> Predicate:
    picks = (linear & ~adapters).bind(layers)
    head = next((n for n, module in reversed(layers.items()) if picks(module, n)), None)
    return lambda module, name: name == head


last = Selector("last", _is_last)
"""The last linear layer, adapters aside: in most models the head, whose gradient all others build
on."""
