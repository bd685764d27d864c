"""Which layers a sketch takes, which it cannot take, and why: one answer for all who ask."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from ..sketches import AnySketch, Planner, Split, Tokens
from ..tokens.rowwise import is_plain
from .blocks import SketchedBlock
from .known import BUILT_IN, block_class, sketched_class
from .select import Filter, Layers, blocks_of, everything, sketchable_layers, usual
from .sketched import SketchedModule

HOOKED = "_old_forward"
"""Where accelerate's hooks keep the forward that they found on a layer."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Choice:
    """What ``sketch_`` would do to a model with these arguments."""

    layers: Layers
    """What was asked about: layers, and for ``Tokens`` blocks."""
    taken: Mapping[str, AnySketch | None]
    """What each gets; ``None``: it becomes exact. The others stay as they are."""
    refused: Mapping[str, str]
    """Those that the filter picked and the sketch cannot take: why."""
    problems: tuple[tuple[str, str], ...]
    """What was asked for and cannot be done: a layer's name or pattern, and why."""
    blocks: frozenset[str] = frozenset()
    """Those taken that are blocks, on kept tokens; all others are layers."""
    stray: Tokens | None = None
    """Asked for, where there is no block for it: layers get rows instead."""


def choose(
    model: nn.Module,
    sketch: AnySketch | Mapping[str, AnySketch | None],
    filter_fn: Filter | None = None,
    planner: Planner | None = None,
) -> Choice:
    """The choice of ``sketch_(model, sketch, filter_fn, planner=planner)``; changes nothing."""
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(
            f"filter_fn={filter_fn!r}; give a function (module, name) -> bool, or a mapping from "
            "name patterns to sketches in place of the sketch"
        )
    layers, picks = units(model, sketch, filter_fn)
    refused: dict[str, str] = {}
    problems: list[tuple[str, str]] = []
    asked: dict[str, AnySketch | None] = {}
    if isinstance(sketch, Mapping):
        matched, refused, problems = _match(layers, sketch, planner)
        asked = {name: s for name, s in matched.items() if picks(layers[name], name)}
    elif isinstance(sketch, AnySketch):
        for name, layer in layers.items():
            if picks(layer, name):
                reason = refusal(layer, sketch, planner)
                if reason:
                    refused[name] = reason
                else:
                    asked[name] = sketch
    else:
        raise TypeError(
            f"sketch={sketch!r} is a {type(sketch).__name__}; give a sketch, for example "
            "Tokens(0.3), or a mapping from name patterns to sketches"
        )
    if not asked and not problems:
        problems.append(("", _nothing_taken(model, layers, sketch, filter_fn, refused)))
    return _dispatched(Choice(layers, asked, refused, tuple(problems)))


def _dispatched(choice: Choice) -> Choice:
    """``Tokens`` goes to blocks, whole; to a layer that is in none of them go its rows."""
    asked = {name: s for name, s in choice.taken.items() if isinstance(s, Tokens)}
    layers = choice.layers
    blocks = frozenset(name for name in asked if block_class(type(layers[name])) is not None)
    inner = {m for name in blocks for m in layers[name].modules()}
    taken = dict(choice.taken)
    for name, tokens in asked.items():
        if name not in blocks:
            taken[name] = tokens.rest
            if layers[name] in inner:
                del taken[name]
    stray = None if blocks else next(iter(asked.values()), None)
    return replace(choice, taken=taken, blocks=blocks, stray=stray)


def units(
    model: nn.Module, sketch: object, filter_fn: Filter | None = None
) -> tuple[Layers, Filter]:
    """What a filter is asked about, and the filter: layers, and for ``Tokens`` blocks.

    A block's layers are parts of it, unless patterns name them. Where a model has blocks, the
    layers outside of them stay exact by default.
    """
    layers = sketchable_layers(model)
    if isinstance(sketch, Mapping):
        given = any(s is None or isinstance(s, Tokens) for s in sketch.values())
        blocks = blocks_of(model) if given else {}
        return _in_order(model, {**blocks, **layers}), filter_fn or everything
    blocks = blocks_of(model) if isinstance(sketch, Tokens) else {}
    if not blocks:
        return layers, filter_fn or usual(layers)
    inner = {m for block in blocks.values() for m in block.modules()}
    outer = {name: layer for name, layer in layers.items() if layer not in inner}
    return _in_order(model, {**blocks, **outer}), filter_fn or (lambda _, name: name in blocks)


def _in_order(model: nn.Module, units: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if name in units}


def known_class(kind: type[nn.Module]) -> type[SketchedModule] | None:
    """What a layer's or a block's class becomes; ``None`` if it is not known."""
    return sketched_class(kind) or block_class(kind)


def refusal(layer: nn.Module, sketch: AnySketch, planner: Planner | None = None) -> str:
    """Why ``sketch`` cannot take this layer, which then stays exact; empty if it can."""
    sketched = known_class(type(layer))
    if sketched is None:
        return ""
    if "forward" in vars(layer) and HOOKED not in vars(layer):
        return (
            "its forward was replaced on the instance and would not see the sketch; call sketch_ "
            "before what replaces it"
        )
    for parameter in layer.parameters(recurse=False):
        reason = _other_numbers(parameter)
        if reason:
            return reason
    if issubclass(sketched, SketchedBlock):
        return _block_refusal(sketch, planner)
    own = sketch.rest if isinstance(sketch, Tokens) else sketch
    if planner is not None:
        sides = own.sides if isinstance(own, Split) else [own]
        reasons = [planner.refusal(side) for side in sides]
        if all(reasons):
            return reasons[0]
    return sketched.left_exact(layer, own)


def _block_refusal(sketch: AnySketch, planner: Planner | None) -> str:
    if not isinstance(sketch, Tokens):
        return f"{sketch!r} is for single layers, and this is a block; name its layers"
    again = f"{sketch!r} draws anew in each step; leave out planner={planner!r}"
    return "" if planner is None else again


def _other_numbers(parameter: Tensor) -> str:
    """Why products with this weight are not those of real numbers."""
    if parameter.is_complex():
        return "its weights are complex: only real gradients are sketched"
    if parameter.dtype not in _DTYPES:
        return f"its weights are {parameter.dtype}, quantised: only floating numbers are sketched"
    # A DTensor has a finding of its own; what else there is decides itself what a product is.
    plain = type(parameter) in (nn.Parameter, Tensor, nn.parameter.UninitializedParameter)
    if not plain and not hasattr(parameter, "placements"):
        data = type(parameter.data)
        if not is_plain(data):
            return f"its weights are of the class {data.__name__}: only plain tensors are sketched"
    return ""


def _match(
    layers: Layers, patterns: Mapping[str, AnySketch | None], planner: Planner | None
) -> tuple[dict[str, AnySketch | None], dict[str, str], list[tuple[str, str]]]:
    """A sketch for each layer; what a wildcard happens to catch and cannot take stays out."""
    for pattern, s in patterns.items():
        if s is not None and not isinstance(s, AnySketch):
            raise TypeError(
                f"{pattern!r}: {s!r} is not a sketch; give for example Rows(0.3), or None"
            )
    chosen: dict[str, AnySketch | None] = {}
    refused: dict[str, str] = {}
    by_pattern: dict[str, list[str]] = {pattern: [] for pattern in patterns}
    useful: set[str] = set()
    for name, layer in layers.items():
        hits = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        if not hits:
            continue
        s = patterns[hits[0]]
        reason = "" if s is None else refusal(layer, s, planner)
        if reason:
            refused[name] = reason
            by_pattern[hits[0]].append(name)
            hits = hits[1:]
        else:
            chosen[name] = s
        useful.update(hits)
    problems = []
    for pattern, names in by_pattern.items():
        if names and (pattern not in useful or pattern in layers):
            reason = f"{names[0]!r} cannot be sketched: {refused[names[0]]}"
            problems.append((names[0], f"the pattern {pattern!r}: {reason}"))
        elif pattern not in useful:
            near = _near(pattern, layers)
            text = f"the pattern {pattern!r} matches no layer that can be sketched; {near}"
            problems.append((pattern, text))
    return chosen, refused, problems


def _near(pattern: str, layers: Layers) -> str:
    if not layers:
        return "the model has none"
    near = difflib.get_close_matches(pattern, layers, n=4, cutoff=0.3) or list(layers)[:4]
    return "near names: " + ", ".join(repr(name) for name in near)


def _nothing_taken(
    model: nn.Module,
    layers: Layers,
    sketch: object,
    filter_fn: Filter | None,
    refused: Mapping[str, str],
) -> str:
    if not layers:
        known = ", ".join(sorted(f"nn.{plain.__name__}" for plain in BUILT_IN))
        return (
            f"{type(model).__name__} has no layer that can be sketched; {known} (the class "
            "itself, not a subclass) can be, and layers of your own with @sketchable"
        )
    if refused and not isinstance(sketch, Mapping):
        name, reason = next(iter(refused.items()))
        return f"no layer can take {sketch!r}; {name!r}: {reason}"
    names = ", ".join(repr(name) for name in list(layers)[:6])
    if filter_fn is not None:
        return f"filter_fn took none of the layers that can be sketched: {names}"
    if isinstance(sketch, Mapping):
        return (
            f"the mapping is empty; name some of the layers {names}, for example "
            f"{{{next(iter(layers))!r}: Rows(0.3)}}"
        )
    return (
        f"{type(model).__name__} has one layer that can be sketched, {names}, and by default the "
        "last one stays exact; to take it, pass filter_fn=sketchprop.select.everything"
    )
