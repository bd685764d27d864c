"""Sketching a model in place, and taking it back."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from .modules import SKETCHED, SketchedModule
from .sketches import Sketch

Filter = Callable[[nn.Module, str], bool]
Model = TypeVar("Model", bound=nn.Module)

_PLAIN = {sketched: plain for plain, sketched in SKETCHED.items()}


def sketch_(
    model: Model,
    sketch: Sketch | Mapping[str, Sketch | None],
    filter_fn: Filter | None = None,
) -> Model:
    """Gives layers of ``model`` a sketched backward, in place, and returns the model.

    ``sketch``: one sketch, or a mapping from name patterns (``*``, ``?``, ``[...]``) to sketches;
    the first pattern that matches a layer's name decides, ``None`` leaves it exact.
    ``filter_fn(module, name)`` says which layers are taken; by default every linear layer but the
    last one (with a mapping: every layer that a pattern matches). A layer that is sketched
    already gets the new sketch; one that is not taken stays as it is.

    Only classes change: parameters, ``state_dict`` keys, hooks and optimizers built before stay.

    >>> sketch_(model, L1(0.1))
    >>> sketch_(vit, {"blocks.*.mlp.*": L1(0.1), "blocks.*.attn.*": L1(0.25)})
    """
    layers = {name: module for name, module in model.named_modules() if is_sketchable(module)}
    if isinstance(sketch, Mapping):
        chosen = _match(layers, sketch)
    elif isinstance(sketch, Sketch):
        chosen = dict.fromkeys(layers, sketch)
        if filter_fn is None and layers:
            chosen.pop(list(layers)[-1])
    else:
        raise TypeError(
            f"sketch={sketch!r} is a {type(sketch).__name__}; give a sketch, for example "
            "L1(0.1), or a mapping from name patterns to sketches"
        )
    if filter_fn is not None:
        chosen = {name: s for name, s in chosen.items() if filter_fn(layers[name], name)}
    if not chosen:
        raise ValueError(_nothing_taken(model, layers, sketch, filter_fn))
    for name, s in chosen.items():
        if s is None:
            _restore(layers[name])
        else:
            _turn(layers[name], s)
    return model


def unsketch_(model: Model) -> Model:
    """Gives every sketched layer its own class back, in place, and returns the model."""
    for module in model.modules():
        _restore(module)
    return model


@contextmanager
def exact(model: nn.Module) -> Iterator[None]:
    """Exact gradients for every forward pass made inside; the sketches come back at the end.

    >>> with exact(model):
    ...     loss(model(x)).backward()
    """
    sketched = [m for m in model.modules() if isinstance(m, SketchedModule)]
    before = [m.exact for m in sketched]
    for m in sketched:
        m.exact = True
    try:
        yield
    finally:
        for m, was in zip(sketched, before, strict=True):
            m.exact = was


def is_sketchable(module: nn.Module) -> bool:
    """Whether ``sketch_`` knows this very class; a subclass may compute something else."""
    return type(module) in SKETCHED or type(module) in _PLAIN


def _turn(module: nn.Module, sketch: Sketch) -> None:
    if type(module) in SKETCHED:
        module.__class__ = SKETCHED[type(module)]
        module.exact = False  # type: ignore[assignment]
    module.sketch = sketch  # type: ignore[assignment]


def _restore(module: nn.Module) -> None:
    if type(module) in _PLAIN:
        module.__class__ = _PLAIN[type(module)]
        del module.sketch, module.exact


def _match(
    layers: Mapping[str, nn.Module], patterns: Mapping[str, Sketch | None]
) -> dict[str, Sketch | None]:
    chosen: dict[str, Sketch | None] = {}
    unused = dict(patterns)
    for name in layers:
        hits = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        for pattern in hits:
            unused.pop(pattern, None)
        if hits:
            chosen[name] = patterns[hits[0]]
    if unused:
        pattern = next(iter(unused))
        raise ValueError(
            f"the pattern {pattern!r} matches no layer that can be sketched; "
            + _near(pattern, layers)
        )
    for pattern, s in patterns.items():
        if s is not None and not isinstance(s, Sketch):
            raise TypeError(
                f"{pattern!r}: {s!r} is not a sketch; give for example L1(0.1), or None"
            )
    return chosen


def _near(pattern: str, layers: Mapping[str, nn.Module]) -> str:
    if not layers:
        return "the model has none"
    near = difflib.get_close_matches(pattern, layers, n=4, cutoff=0.3) or list(layers)[:4]
    return "near names: " + ", ".join(repr(name) for name in near)


def _nothing_taken(
    model: nn.Module, layers: Mapping[str, nn.Module], sketch: object, filter_fn: Filter | None
) -> str:
    known = ", ".join(sorted(f"nn.{plain.__name__}" for plain in SKETCHED))
    if not layers:
        return (
            f"{type(model).__name__} has no layer that can be sketched; {known} (the class "
            "itself, not a subclass) can be"
        )
    names = ", ".join(repr(name) for name in list(layers)[:6])
    if filter_fn is not None:
        return f"filter_fn took none of the layers that can be sketched: {names}"
    return (
        f"{type(model).__name__} has one layer that can be sketched, {names}, and by default the "
        "last one stays exact; to take it, pass filter_fn=lambda module, name: True"
    )
