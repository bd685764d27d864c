"""Which layers of a model: small filters that compose.

    sketch_(model, L1(0.1), filter_fn=select.linear & ~select.last & select.wide(64))

A filter is a set of layer names, given the layers that can be sketched in the order in which the
model holds them: ``&``, ``|`` and ``~`` are those of sets. Plain functions ``(module, name) ->
bool`` are filters too, alone or behind an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from .modules import sketched_class

Layers = Mapping[str, nn.Module]
Predicate = Callable[[nn.Module, str], bool]


@dataclass(frozen=True, repr=False)
class Selector:
    """A rule that picks names among the layers of a model, shown as ``text``."""

    text: str
    pick: Callable[[Layers], set[str]] = field(compare=False)

    def names(self, model: nn.Module) -> list[str]:
        """The layers of ``model`` that this picks, in the model's order.

        >>> select.wide(64).names(model)
        """
        layers = sketchable_layers(model)
        picked = self.pick(layers)
        return [name for name in layers if name in picked]

    def __and__(self, other: Selector | Predicate) -> Selector:
        right = as_selector(other)
        return Selector(
            f"({self} & {right})", lambda layers: self.pick(layers) & right.pick(layers)
        )

    def __or__(self, other: Selector | Predicate) -> Selector:
        right = as_selector(other)
        return Selector(
            f"({self} | {right})", lambda layers: self.pick(layers) | right.pick(layers)
        )

    def __rand__(self, other: Predicate) -> Selector:
        return as_selector(other) & self

    def __ror__(self, other: Predicate) -> Selector:
        return as_selector(other) | self

    def __invert__(self) -> Selector:
        return Selector(f"~{self}", lambda layers: set(layers) - self.pick(layers))

    def __repr__(self) -> str:
        return self.text


def sketchable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers whose very class ``sketch_`` knows, by name, in the order of registration."""
    return {
        name: module
        for name, module in model.named_modules()
        if sketched_class(type(module)) is not None
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
    return where(rule)


def where(predicate: Predicate) -> Selector:
    """The layers for which ``predicate(module, name)`` is true."""
    text = getattr(predicate, "__name__", repr(predicate))
    return Selector(text, lambda layers: {n for n, m in layers.items() if predicate(m, n)})


def named(*patterns: str) -> Selector:
    """Layers whose name matches one of the patterns (``*``, ``?``, ``[...]``)."""

    def matches(_: nn.Module, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    text = f"named({', '.join(map(repr, patterns))})"
    return Selector(text, where(matches).pick)


def of(*types: type[nn.Module]) -> Selector:
    """Layers of the given classes, sketched already or not."""
    text = f"of({', '.join(t.__name__ for t in types)})"
    return Selector(text, where(lambda module, _: isinstance(module, types)).pick)


def wide(size: int) -> Selector:
    """Layers with at least ``size`` outputs and inputs in each of their weight matrices.

    A convolution's inputs are channels × kernel: the size of a flattened filter.
    """

    def is_wide(module: nn.Module, _: str) -> bool:
        sketched = sketched_class(type(module))
        return sketched is not None and min(map(min, sketched.matrices(module))) >= size

    return Selector(f"wide({size})", where(is_wide).pick)


conv = Selector("conv", of(nn.Conv1d, nn.Conv2d).pick)
"""Convolutions."""

attention = Selector("attention", of(nn.MultiheadAttention).pick)
"""``nn.MultiheadAttention``, each taken whole."""

linear = Selector("linear", (~(conv | attention)).pick)
"""Linear layers: ``nn.Linear``, transformers' ``Conv1D``, and layers made ``sketchable``."""

first = Selector("first", lambda layers: set(list(layers)[:1]))
"""The first layer, which usually needs no input gradient."""


def _last(layers: Layers) -> set[str]:
    picked = linear.pick(layers)
    return set([name for name in layers if name in picked][-1:])


last = Selector("last", _last)
"""The last linear layer: in most models the head, whose gradient all others build on."""

everything = Selector("everything", set)
"""Every layer that can be sketched."""
