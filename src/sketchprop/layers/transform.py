"""Sketching a model in place, and taking it back."""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any, Literal, TypeVar

from torch import nn

from ..sketches import AnySketch, Planner, Sketch, Split, Tokens
from .blocks import SketchedBlock
from .faster import Judge
from .known import BUILT_IN, block_class, sketched_class
from .select import (
    Layers,
    Predicate,
    Selector,
    as_selector,
    blocks_of,
    everything,
    last,
    sketchable_layers,
)
from .sketched import SketchedModule, Sketching

Filter = Selector | Predicate
Model = TypeVar("Model", bound=nn.Module)

_log = logging.getLogger("sketchprop")


def sketch_(
    model: Model,
    sketch: AnySketch | Mapping[str, AnySketch | None],
    filter_fn: Filter | None = None,
    *,
    where: Literal["always", "faster"] = "always",
    planner: Planner | None = None,
    accumulate: bool = False,
) -> Model:
    """Gives layers of ``model`` a sketched backward, in place, and returns the model.

    ``sketch``: one sketch, or a mapping from name patterns (``*``, ``?``, ``[...]``) to sketches;
    the first pattern that matches a layer's name decides, ``None`` leaves it exact. ``Tokens``
    takes the blocks of a transformer whole, see ``Tokens``; their layers are parts of them.
    ``filter_fn``: which layers are taken, a filter of ``sketchprop.select`` or a function
    ``(module, name) -> bool``; by default ``~select.last``, every layer but the last linear one
    (with a mapping: every layer that a pattern matches). A layer that is sketched already gets
    the new sketch; one that is not taken stays as it is, and ``summary`` says why.

    ``where="faster"``: each layer times exact against sketched on its real shapes in the first
    steps and keeps the faster; the decisions are remembered in a file (``faster.cache_file``) and
    shown by ``summary``. ``where="always"`` sketches every layer that was taken.
    ``planner``: who makes the atoms that are drawn from, and when: ``Every(50)`` makes new ones
    every 50 steps, ``Fresh(rows=0.1)`` looks at a tenth of the rows; each layer gets its own.
    Without one each step makes its own from all of the gradient.
    ``accumulate``: linear layers add the kept rows of dW to an existing ``.grad`` in place; for
    plain loops with ``zero_grad(set_to_none=False)``, see ``sketched_linear``.

    It takes linear layers, convolutions (with a kernel: by column sketches such as L1, or by
    ``Rows`` of whole samples), ``nn.MultiheadAttention``, transformers' ``Conv1D`` and layers made
    ``sketchable``.
    Only classes change: parameters, ``state_dict`` keys, hooks and optimizers built before stay.

    >>> from sketchprop import L1
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    >>> sketch_(model, L1(0.1))[0]
    SketchedLinear(in_features=64, out_features=256, bias=True, sketch=L1(0.1))
    >>> sketch_(model, {"0": L1(0.1), "2": L1(0.25)})[2]
    SketchedLinear(in_features=256, out_features=10, bias=True, sketch=L1(0.25))
    """
    if where not in ("always", "faster"):
        raise ValueError(f"where={where!r} is unknown; use where='always' or where='faster'")
    given = sketch.values() if isinstance(sketch, Mapping) else (sketch,)
    if where == "faster" and any(isinstance(s, Tokens) for s in given):
        raise ValueError(
            "where='faster' times single layers, and Tokens takes blocks; leave it out, and ask "
            "plan(model, loss_fn, batch, sketch=Tokens(0.3)) what a block gains"
        )
    layers, rule = units(model, sketch, filter_fn)
    chosen: dict[str, AnySketch | None]
    if isinstance(sketch, Mapping):
        chosen = _match(layers, sketch, planner)
    elif isinstance(sketch, Sketch | Split | Tokens):
        chosen = {
            name: sketch for name, layer in layers.items() if not refusal(layer, sketch, planner)
        }
    else:
        raise TypeError(
            f"sketch={sketch!r} is a {type(sketch).__name__}; give a sketch, for example "
            "L1(0.1), or a mapping from name patterns to sketches"
        )
    picks = rule.bind(layers)
    chosen = {name: s for name, s in chosen.items() if picks(layers[name], name)}
    if not chosen:
        picked = {name: layer for name, layer in layers.items() if picks(layer, name)}
        raise ValueError(_nothing_taken(model, layers, sketch, planner, filter_fn, picked))
    for name, s in _without_parts(layers, chosen).items():
        layer = layers[name]
        if s is None:
            _restore(layer)
            continue
        _restore_around(model, layer)
        judge = Judge() if where == "faster" else None
        own = None if planner is None else planner.anew()
        _turn(layer, Sketching(_of_layer(layer, s), own, judge=judge, accumulate=accumulate))
    _log.info("%s", _taken(model, layers, chosen))
    return model


def units(
    model: nn.Module, sketch: object, filter_fn: Filter | None = None
) -> tuple[dict[str, nn.Module], Selector]:
    """What a filter is asked about, and the filter: layers, and for ``Tokens`` blocks.

    A block's layers are parts of it, unless patterns name them. Where a model has blocks, the
    layers outside of them stay exact by default.
    """
    layers = sketchable_layers(model)
    if isinstance(sketch, Mapping):
        given = any(s is None or isinstance(s, Tokens) for s in sketch.values())
        blocks = blocks_of(model) if given else {}
        return _in_order(model, {**blocks, **layers}), as_selector(filter_fn or everything)
    blocks = blocks_of(model) if isinstance(sketch, Tokens) else {}
    if isinstance(sketch, Tokens):
        _refuse_sharded(model)
    if not blocks:
        return layers, as_selector(filter_fn or ~last)
    inner = {m for block in blocks.values() for m in block.modules()}
    outer = {name: layer for name, layer in layers.items() if layer not in inner}
    whole = as_selector(lambda module, name: name in blocks)
    return _in_order(model, {**blocks, **outer}), as_selector(filter_fn or whole)


def _refuse_sharded(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kind = type(module)
        parents = [p for p in kind.__mro__[1:] if issubclass(p, nn.Module) and block_class(p)]
        shards = any(parent.__name__ == "FSDPModule" for parent in kind.__mro__)
        if parents and shards and not issubclass(kind, SketchedBlock):
            raise ValueError(
                f"{name!r} is a {parents[0].__name__} that fully_shard has wrapped, and kept "
                "tokens do not know it any more; call sketch_ first, then fully_shard"
            )


def _in_order(model: nn.Module, units: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if name in units}


def _without_parts(
    layers: Layers, chosen: Mapping[str, AnySketch | None]
) -> dict[str, AnySketch | None]:
    """``chosen`` without layers of blocks that ``Tokens`` takes whole."""
    whole = [layers[name] for name, s in chosen.items() if isinstance(s, Tokens)]
    inner = {m for block in whole for m in block.modules() if m is not block}
    return {
        name: s
        for name, s in chosen.items()
        if not (isinstance(s, Tokens) and layers[name] in inner)
    }


def _of_layer(layer: nn.Module, sketch: AnySketch) -> AnySketch:
    """What a layer is sketched by: of ``Tokens`` a block takes all, a single layer the rows."""
    if isinstance(sketch, Tokens) and block_class(type(layer)) is None:
        return sketch.rest
    return sketch


def _restore_around(model: nn.Module, layer: nn.Module) -> None:
    """A block and the layers in it are not sketched at once: what was there before goes."""
    for module in layer.modules():
        if module is not layer:
            _restore(module)
    for block in model.modules():
        if isinstance(block, SketchedBlock) and block is not layer and layer in block.modules():
            _restore(block)


def _taken(model: nn.Module, layers: Layers, chosen: Mapping[str, AnySketch | None]) -> str:
    """For the log: what was taken and what was left."""
    counts: Counter[str] = Counter()
    for name, s in chosen.items():
        if s is not None:
            counts[f"{type(layers[name]).__name__.removeprefix('Sketched')} by {s!r}"] += 1
    left = [name for name in layers if chosen.get(name) is None]
    text = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "nothing"
    exact = f"; exact: {', '.join(left[:6])}{', …' if len(left) > 6 else ''}" if left else ""
    return f"sketch_({type(model).__name__}) took {text}{exact}"


def unsketch_(model: Model) -> Model:
    """Gives every sketched layer its own class back, in place, and returns the model."""
    for module in model.modules():
        _restore(module)
    return model


@contextmanager
def exact(model: nn.Module) -> Iterator[None]:
    """Exact gradients for every forward pass made inside; the sketches come back at the end.

    >>> import torch
    >>> from sketchprop import L1
    >>> model = sketch_(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 10)), L1(0.1))
    >>> with exact(model):
    ...     model(torch.randn(8, 64)).square().mean().backward()
    """
    states = [m.sketching for m in model.modules() if isinstance(m, SketchedModule)]
    before = [state.exact for state in states]
    for state in states:
        state.exact = True
    try:
        yield
    finally:
        for state, was in zip(states, before, strict=True):
            state.exact = was


def _turn(module: nn.Module, state: Sketching) -> None:
    if isinstance(module, SketchedModule):
        state.exact = module.sketching.exact
    else:
        _change_class(module, _known(type(module)))
    module.__dict__["sketching"] = state


_HOOKED = "_old_forward"
"""Where accelerate's hooks keep the forward that they found on a layer."""


def _change_class(module: nn.Module, kind: Any) -> None:
    module.__class__ = kind
    if _HOOKED in vars(module):
        vars(module)[_HOOKED] = MethodType(kind.forward, module)


def _restore(module: nn.Module) -> None:
    if not isinstance(module, SketchedModule):
        return
    if _known(module.plain) is not type(module):
        raise TypeError(
            f"{type(module).__name__} was made from a sketched layer by another library (as "
            "fully_shard does) and cannot be given its class back; use `with sketchprop.exact"
            "(model):`, or unsketch_ the model before"
        )
    _change_class(module, module.plain)
    del module.__dict__["sketching"]


def _known(kind: type[nn.Module]) -> type[SketchedModule] | None:
    return sketched_class(kind) or block_class(kind)


def refusal(layer: nn.Module, sketch: AnySketch, planner: Planner | None = None) -> str:
    """Why ``sketch`` cannot take this layer; empty if it can."""
    sketched = _known(type(layer))
    if sketched is None:
        return ""
    if "forward" in vars(layer) and _HOOKED not in vars(layer):
        return (
            "its forward was replaced on the instance and would not see the sketch; call sketch_ "
            "before what replaces it"
        )
    if any(p.is_complex() for p in layer.parameters(recurse=False)):
        return "its weights are complex: only real gradients are sketched"
    if planner is not None:
        if isinstance(sketch, Tokens):
            return f"{sketch!r} draws anew in each step; leave out planner={planner!r}"
        sides = sketch.sides if isinstance(sketch, Split) else [sketch]
        reasons = [planner.refusal(side) for side in sides]
        if all(reasons):
            return reasons[0]
    return sketched.left_exact(layer, _of_layer(layer, sketch))


def _match(
    layers: Layers, patterns: Mapping[str, AnySketch | None], planner: Planner | None
) -> dict[str, AnySketch | None]:
    """A sketch for each layer; what a wildcard happens to catch and cannot take stays out."""
    for pattern, s in patterns.items():
        if s is not None and not isinstance(s, Sketch | Split | Tokens):
            raise TypeError(
                f"{pattern!r}: {s!r} is not a sketch; give for example L1(0.1), or None"
            )
    chosen: dict[str, AnySketch | None] = {}
    refused: dict[str, list[str]] = {pattern: [] for pattern in patterns}
    useful: set[str] = set()
    for name, layer in layers.items():
        hits = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        if not hits:
            continue
        s = patterns[hits[0]]
        reason = "" if s is None else refusal(layer, s, planner)
        if reason:
            refused[hits[0]].append(f"{name!r} cannot be sketched: {reason}")
            hits = hits[1:]
        else:
            chosen[name] = s
        useful.update(hits)
    for pattern in patterns:
        if refused[pattern] and (pattern not in useful or pattern in layers):
            raise ValueError(f"the pattern {pattern!r}: {refused[pattern][0]}")
        if pattern not in useful:
            raise ValueError(
                f"the pattern {pattern!r} matches no layer that can be sketched; "
                + _near(pattern, layers)
            )
    return chosen


def _near(pattern: str, layers: Layers) -> str:
    if not layers:
        return "the model has none"
    near = difflib.get_close_matches(pattern, layers, n=4, cutoff=0.3) or list(layers)[:4]
    return "near names: " + ", ".join(repr(name) for name in near)


def _nothing_taken(
    model: nn.Module,
    layers: Layers,
    sketch: object,
    planner: Planner | None,
    filter_fn: Filter | None,
    picked: Layers,
) -> str:
    if not layers:
        known = ", ".join(sorted(f"nn.{plain.__name__}" for plain in BUILT_IN))
        return (
            f"{type(model).__name__} has no layer that can be sketched; {known} (the class "
            "itself, not a subclass) can be, and layers of your own with @sketchable"
        )
    if isinstance(sketch, Sketch | Split | Tokens):
        reasons = [(name, refusal(layer, sketch, planner)) for name, layer in picked.items()]
        refused = [f"{name!r}: {reason}" for name, reason in reasons if reason]
        if refused:
            return f"no layer can take {sketch!r}; {refused[0]}"
    names = ", ".join(repr(name) for name in list(layers)[:6])
    if filter_fn is not None:
        return f"filter_fn took none of the layers that can be sketched: {names}"
    if isinstance(sketch, Mapping):
        return (
            f"the mapping is empty; name some of the layers {names}, for example "
            f"{{{next(iter(layers))!r}: L1(0.1)}}"
        )
    return (
        f"{type(model).__name__} has one layer that can be sketched, {names}, and by default the "
        "last one stays exact; to take it, pass filter_fn=sketchprop.select.everything"
    )
