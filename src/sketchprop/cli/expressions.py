"""Sketches as they are typed: ``Tokens(0.3)``, read without evaluating code."""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from .. import sketches as built_in
from ..sketches import AnySketch, Sketch, Split, Tokens

KINDS = (Sketch, Split, Tokens)
WANTED = "a sketch, for example Rows(0.3)"


class UsageError(ValueError):
    """What was typed cannot be understood; exit code 2."""


def parse_sketch(text: str) -> AnySketch:
    """``"L1(0.1)"``, ``"L1(0.1, root=True)"``, or ``"module:Mine(0.1)"`` from the user's code.

    Nothing is evaluated: names of sketches are looked up and called with literals, or with
    further sketches; anything else is refused before it could run.
    """
    typed = text.strip()
    prefix = re.match(r"([\w.]+):", typed)
    scopes = [load_module(prefix[1]), built_in] if prefix else [built_in]

    def look_up(name: str) -> Any:
        """A class of these kinds, or an object of one; nothing else that a module may hold."""
        meant = next((getattr(scope, name) for scope in scopes if hasattr(scope, name)), None)
        if meant is None:
            names = ", ".join(sketch_names())
            raise UsageError(f"{name!r} is unknown in {text!r}; built-in sketches are {names}")
        is_class = isinstance(meant, type) and issubclass(meant, KINDS)
        if is_class or isinstance(meant, KINDS):
            return meant
        raise UsageError(
            f"{name!r} in {text!r} is a {type(meant).__name__}, not {WANTED}, or a class derived "
            "from sketchprop.Sketch"
        )

    def read(node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            meant = look_up(node.id)
            if isinstance(meant, KINDS):
                return meant
            raise UsageError(f"{text!r} has no budget; type for example {node.id}(0.1)")
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            raise UsageError(f"{text!r} is not {WANTED}")
        kind = look_up(node.func.id)
        if isinstance(kind, KINDS):
            raise UsageError(
                f"{text!r} calls a sketch that is made already; leave out the brackets"
            )
        try:
            values = [argument(part) for part in node.args]
            return kind(*values, **{str(k.arg): argument(k.value) for k in node.keywords})
        except UsageError:
            raise
        except (TypeError, ValueError) as error:
            raise UsageError(f"{text}: {error}") from error

    def argument(part: ast.expr) -> Any:
        return read(part) if isinstance(part, ast.Call) else ast.literal_eval(part)

    try:
        tree = ast.parse(typed[prefix.end() if prefix else 0 :], mode="eval")
    except SyntaxError:
        raise UsageError(f"{text!r} is not {WANTED}") from None
    sketch: AnySketch = read(tree.body)
    return sketch


def parse_sketches(texts: Sequence[str]) -> AnySketch | dict[str, AnySketch | None]:
    """One sketch, or ``PATTERN=SKETCH`` several times; ``PATTERN=exact`` leaves layers alone."""
    pairs = [re.fullmatch(r"([^(=]*)=(.*)", text) for text in texts]
    if pairs == [None]:
        return parse_sketch(texts[0])
    choice: dict[str, AnySketch | None] = {}
    for text, pair in zip(texts, pairs, strict=True):
        if pair is None:
            raise UsageError(f"{text!r}: with several --sketch each needs a pattern, 'fc*={text}'")
        pattern, sketch = map(str.strip, pair.groups())
        choice[pattern] = None if sketch == "exact" else parse_sketch(sketch)
    return choice


def sketch_names() -> list[str]:
    """The built-in sketches that can be made by name."""

    def concrete(value: Any) -> bool:
        is_sketch = isinstance(value, type) and issubclass(value, Sketch)
        return value in (Split, Tokens) or (is_sketch and not value.__abstractmethods__)

    return [name for name in built_in.__all__ if concrete(getattr(built_in, name))]


def load_module(path: str) -> Any:
    """A module by its dotted name; the current folder counts, as for ``python -m``."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        raise UsageError(f"no module {path!r} here or installed ({error})") from error
