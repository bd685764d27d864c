"""What is typed on the command line, turned into sketches, models and data."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import sketches as built_in_sketches
from ..data import mnist, normalised
from ..meters.noise.passes import Loss
from ..sketches import Sketch
from ..zoo import Bert, ViT, mlp


class UsageError(ValueError):
    """What was typed cannot be understood; exit code 2."""


@dataclass(frozen=True)
class Task:
    """A model, its loss and its batches."""

    model: nn.Module
    loss_fn: Loss
    draw: Callable[[], Any]
    """A new batch as training would draw it."""


def sketch_names() -> list[str]:
    """The built-in sketches that can be made by name."""
    return [
        name for name in built_in_sketches.__all__ if _concrete(getattr(built_in_sketches, name))
    ]


def parse_sketch(text: str) -> Sketch:
    """``"L1(0.1)"``, ``"L1(0.1, root=True)"``, or ``"module:Mine(0.1)"`` from the user's code."""
    path, _, expression = text.rpartition(":")
    scope = load_module(path) if path else built_in_sketches
    found = _resolve(expression.strip(), scope, text)
    if isinstance(found, type) and issubclass(found, Sketch):
        name = found.__name__
        raise UsageError(f"{text!r} has no budget; type for example {name}(0.1)")
    if not isinstance(found, Sketch):
        raise UsageError(f"{text!r} is a {type(found).__name__}, not a sketch; try L1(0.1)")
    return found


def parse_sketches(texts: Sequence[str]) -> Sketch | dict[str, Sketch | None]:
    """One sketch, or ``PATTERN=SKETCH`` several times; ``PATTERN=exact`` leaves layers alone."""
    pairs = [_pattern(text) for text in texts]
    if len(pairs) == 1 and pairs[0][0] is None:
        return parse_sketch(texts[0])
    chosen: dict[str, Sketch | None] = {}
    for pattern, text in pairs:
        if pattern is None:
            raise UsageError(f"{text!r}: with several --sketch each needs a pattern, 'fc*={text}'")
        chosen[pattern] = None if text == "exact" else parse_sketch(text)
    return chosen


def load_module(path: str) -> Any:
    """A module by its dotted name; the current folder counts, as for ``python -m``."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        raise UsageError(f"no module {path!r} here or installed ({error})") from error


def load_task(name: str, data: str, batch_size: int, seed: int) -> Task:
    """A built-in model with its data, or ``module:factory`` that returns all three."""
    torch.manual_seed(seed)
    if ":" in name:
        return _user_task(name)
    if name not in MODELS:
        known = ", ".join(MODELS)
        raise UsageError(
            f"--model {name!r} is unknown; use one of {known}, or module:factory for a function "
            "of yours that returns (model, loss_fn, batches)"
        )
    make, random_batch, takes_images = MODELS[name]
    model = make()
    if data == "random":
        return Task(model, cross_entropy, lambda: random_batch(batch_size))
    if not takes_images:
        raise UsageError(f"--data mnist fits the models mlp and mlp4, not {name}")
    images, labels = mnist()
    rows = normalised(images)

    def draw() -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(labels), (batch_size,))
        return rows[chosen], labels[chosen]

    return Task(model, cross_entropy, draw)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Classes in the last dimension, any number of positions before it."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def train(task: Task, steps: int, learning_rate: float) -> None:
    """Plain exact SGD: sketches are measured at a point of training, not only at its start."""
    optimizer = torch.optim.SGD(task.model.parameters(), learning_rate)
    task.model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(task.loss_fn(task.model, task.draw()))
        optimizer.step()
    optimizer.zero_grad()


def _user_task(name: str) -> Task:
    path, _, attribute = name.partition(":")
    module = load_module(path)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        near = ", ".join(n for n in vars(module) if callable(getattr(module, n)) and n[0] != "_")
        raise UsageError(f"{path!r} has no function {attribute!r}; it has {near or 'none'}")
    made = factory()
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module)):
        raise UsageError(
            f"{name} returned {type(made).__name__}; return (model, loss_fn, batches) with "
            "loss_fn(model, batch) a scalar tensor and batches a list"
        )
    model, loss_fn, batches = made
    stream: Iterator[Any] = cycle(list(batches))
    return Task(model, loss_fn, lambda: next(stream))


def _digits(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 784), torch.randint(10, (count,))


def _images(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 32, 32), torch.randint(10, (count,))


def _tokens(count: int) -> tuple[Tensor, Tensor]:
    return torch.randint(1000, (count, 64)), torch.randint(1000, (count, 64))


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], Any], bool]] = {
    "mlp": (mlp, _digits, True),
    "mlp4": (lambda: mlp(784, 64, 64, 64, 10), _digits, True),
    "vit": (ViT, _images, False),
    "bert": (Bert, _tokens, False),
}
"""Name: how it is made, a random batch for it, whether it takes MNIST."""


def _concrete(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Sketch) and not value.__abstractmethods__


def _pattern(text: str) -> tuple[str | None, str]:
    head, equals, tail = text.partition("=")
    return (head.strip(), tail.strip()) if equals and "(" not in head else (None, text)


def _resolve(expression: str, scope: Any, text: str) -> Any:
    """A name, or a call of one with literal arguments: nothing else is evaluated."""
    try:
        node = ast.parse(expression, mode="eval").body
        called = isinstance(node, ast.Call)
        name = node.func if isinstance(node, ast.Call) else node
        if not isinstance(name, ast.Name):
            raise SyntaxError
        args = [ast.literal_eval(a) for a in node.args] if isinstance(node, ast.Call) else []
        keywords = node.keywords if isinstance(node, ast.Call) else []
        options = {str(k.arg): ast.literal_eval(k.value) for k in keywords}
    except (SyntaxError, ValueError):
        raise UsageError(f"{text!r} is not a sketch; type for example 'L1(0.1)'") from None
    found = getattr(scope, name.id, None)
    if found is None:
        known = ", ".join(sketch_names())
        raise UsageError(f"{name.id!r} is unknown in {text!r}; built-in sketches are {known}")
    try:
        return found(*args, **options) if called else found
    except (TypeError, ValueError) as error:
        raise UsageError(f"{text}: {error}") from error
