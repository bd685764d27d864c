"""Sketching a model in place, and taking it back."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

from torch import nn

from ..sketches import AnySketch, Planner, Tokens
from .blocks import SketchedBlock
from .choose import HOOKED, choose, known_class
from .depth import leave, share_out
from .select import Filter, Layers
from .share import kept_flops
from .sketched import SketchedModule, Sketching
from .validate import findings, refusal_of

Model = TypeVar("Model", bound=nn.Module)

_log = logging.getLogger("sketchprop")

LOGGED_ROWS = 4096
"""Samples × tokens for which the log counts FLOPs: a batch of middling size."""


def sketch_(
    model: Model,
    sketch: AnySketch | Mapping[str, AnySketch | None],
    filter_fn: Filter | None = None,
    *,
    planner: Planner | None = None,
    check: bool = True,
    compile: bool = False,
) -> Model:
    """Gives layers of ``model`` a sketched backward, in place, and returns the model.

    ``sketch``: one sketch, or a mapping from name patterns (``*``, ``?``, ``[...]``) to sketches.
    The first pattern that matches a layer's name decides; ``None`` leaves the layer exact.
    ``Tokens`` takes whole blocks of a transformer.
    ``filter_fn``: a function ``(module, name) -> bool`` that picks layers. By default
    ``Tokens`` picks the blocks, and other sketches pick all layers but the last linear one and the
    small factors of LoRA adapters; ``select.everything`` picks these, too. With a mapping, its
    patterns pick. A new sketch replaces the old one. ``summary`` says why a layer stayed exact.

    ``planner``: when to compute the atoms (columns or directions with their probabilities), and
    from which rows. By default each step computes them from all rows. ``Every(50)`` does so every
    50 steps, ``Every(1, rows=0.1)`` from a tenth of the rows. Each layer gets its own planner.
    ``check``: each block runs its first batch twice, exactly and on kept tokens. If results or
    the tensors that get a gradient differ, the block stays exact, with a warning.
    ``compile``: compiles the blocks that ``Tokens`` takes, in place, from the second training step
    on; each class and budget compiles once. A block that does not compile runs uncompiled, with a
    warning. Inside of ``torch.compile(model)`` this changes nothing.

    It knows linear layers, convolutions, ``nn.MultiheadAttention``, transformers' ``Conv1D`` and
    layers made ``sketchable``. Convolutions with larger kernels need a column sketch such as L1, or
    ``Rows``. Only classes change: parameters, ``state_dict`` keys, hooks and optimizers stay.

        sketch_(model, Tokens(0.3))               # the blocks of a transformer
        sketch_(model, {"encoder.*": Tokens(0.3), "head": Rows(0.5)})

    >>> from sketchprop import Rows
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    >>> sketch_(model, Rows(0.3))[0]
    SketchedLinear(in_features=64, out_features=256, bias=True, sketch=Rows(0.3))
    """
    choice = choose(model, sketch, filter_fn, planner)
    found = findings(model, choice)
    if error := refusal_of(found):
        raise ValueError(error)
    for finding in found:
        if finding.level == "harm":
            warnings.warn(str(finding), stacklevel=2)
    layers = choice.layers
    if compile and not any(isinstance(s, Tokens) for s in choice.taken.values()):
        raise ValueError(
            "compile=True compiles the blocks that Tokens takes, and none is taken here; compile "
            "the model after sketch_: torch.compile(model)"
        )
    for name, s in choice.taken.items():
        layer = layers[name]
        if s is None:
            _restore(layer)
            continue
        _restore_around(model, layer)
        own = None if planner is None else planner.anew()
        blocks = compile and isinstance(s, Tokens)
        _turn(layer, Sketching(s, own, proof=None if check else "", compiled=blocks))
    chosen = [name for name, s in choice.taken.items() if s is not None]
    share_out({name: vars(layers[name])["sketching"] for name in layers if name in chosen})
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s", _taken(model, layers, choice.taken))
    return model


def _restore_around(model: nn.Module, layer: nn.Module) -> None:
    """A block and the layers in it are not sketched at once: what was there before goes."""
    for module in layer.modules():
        if module is not layer:
            _restore(module)
    for block in model.modules():
        if isinstance(block, SketchedBlock) and block is not layer and layer in block.modules():
            _restore(block)


def _taken(model: nn.Module, layers: Layers, chosen: Mapping[str, AnySketch | None]) -> str:
    """For the log: what was taken, what was left, and what that is expected to save."""
    counts: Counter[str] = Counter()
    for name, s in chosen.items():
        if s is not None:
            layer: Any = layers[name]
            kind = type(layer).__name__.removeprefix("Sketched")
            counts[f"{kind} by {layer.sketching.sketch!r}"] += 1
    left = [name for name in layers if chosen.get(name) is None]
    text = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "nothing"
    exact = f"; exact: {', '.join(left[:6])}{', …' if len(left) > 6 else ''}" if left else ""
    share = kept_flops(model, LOGGED_ROWS)
    left_over = f"; backward of linear layers: {share:.2f} of the FLOPs at {LOGGED_ROWS} rows"
    return f"sketch_({type(model).__name__}) took {text}{exact}{left_over}"


def unsketch_(model: Model) -> Model:
    """Gives every sketched layer its own class back, in place, and returns the model."""
    for module in model.modules():
        _restore(module)
    return model


@contextmanager
def exact(model: nn.Module) -> Iterator[None]:
    """Exact gradients for every forward pass made inside; the sketches come back at the end.

    With activation checkpointing, whose backward runs forward again, call backward inside too.

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
        leave(module.sketching)
        state.exact = module.sketching.exact
    else:
        _change_class(module, known_class(type(module)))
    module.__dict__["sketching"] = state


def _change_class(module: nn.Module, kind: Any) -> None:
    module.__class__ = kind
    if HOOKED in vars(module):
        vars(module)[HOOKED] = MethodType(kind.forward, module)


def _restore(module: nn.Module) -> None:
    if not isinstance(module, SketchedModule):
        return
    if known_class(module.plain) is not type(module):
        raise TypeError(
            f"{type(module).__name__} was made from a sketched layer by another library (as "
            "fully_shard does) and cannot be given its class back; use `with sketchprop.exact"
            "(model):`, or unsketch_ the model before"
        )
    _change_class(module, module.plain)
    leave(module.__dict__.pop("sketching"))
