"""What is typed on the command line, turned into sketches, models and data."""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .. import sketches as built_in_sketches
from ..meters.noise.passes import Loss
from ..sketches import AnySketch, Planner, Sketch, Split, Tokens
from ..zoo import Bert, ViT, mlp


class UsageError(ValueError):
    """What was typed cannot be understood; exit code 2."""


class Task:
    """A model, its loss, and batches as training draws them; they may be endless."""

    def __init__(
        self, model: nn.Module, loss_fn: Loss, batches: Iterable[Any], optimizer: Any = None
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        """What --steps and --trial train with; ``None`` until it is made."""
        self.batches = batches
        self.stream = self._epochs()
        """For training: begins anew where the batches end."""

    def to(self, device: torch.device) -> Task:
        """The same on another device; batches are moved when they are drawn."""
        self.model.to(device)
        self.batches = Moved(self.batches, device)
        return self

    @property
    def device(self) -> torch.device:
        first = next(self.model.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def take(self, count: int) -> list[Any]:
        """For measuring: at most ``count`` batches from a new pass, each only once."""
        taken = list(islice(iter(self.batches), count))
        # All are held, so that an id means one object.
        different = {tuple(map(id, tree_leaves(batch))): batch for batch in taken}
        if not different:
            raise UsageError("the factory's batches are empty, or used up by --steps; give more")
        return list(different.values())

    def _epochs(self) -> Iterator[Any]:
        while True:
            batch = None
            for batch in self.batches:
                yield batch
            if batch is None:
                raise UsageError("the factory's batches end before --steps do; give a list")


class Random:
    """Endless batches, each drawn when it is asked for."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._draw()


class Moved:
    """Batches that are moved to a device as they are drawn."""

    def __init__(self, batches: Iterable[Any], device: torch.device) -> None:
        self._batches, self._device = batches, device

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield tree_map(self._move, batch)

    def _move(self, leaf: Any) -> Any:
        return leaf.to(self._device) if isinstance(leaf, Tensor) else leaf


Kinds = tuple[type, ...]


def sketch_names() -> list[str]:
    """The built-in sketches that can be made by name."""
    return [
        name for name in built_in_sketches.__all__ if _concrete(getattr(built_in_sketches, name))
    ]


def parse_planner(text: str) -> Planner:
    """``"Every(50)"``, or a planner of the user's own."""
    planner: Planner = _parse(text, (Planner,), "a planner, for example Every(50)")
    return planner


def parse_sketch(text: str) -> AnySketch:
    """``"L1(0.1)"``, ``"L1(0.1, root=True)"``, or ``"module:Mine(0.1)"`` from the user's code.

    Nothing is evaluated: names of sketches are looked up and called with literals, or with
    further sketches; anything else is refused before it could run.
    """
    sketch: AnySketch = _parse(text, (Sketch, Split, Tokens), "a sketch, for example Rows(0.3)")
    return sketch


def _parse(text: str, kinds: Kinds, wanted: str) -> Any:
    named = re.fullmatch(r"([\w.]+):(.+)", text.strip())
    path, expression = named.groups() if named else ("", text.strip())
    try:
        node = ast.parse(expression, mode="eval").body
    except SyntaxError:
        raise UsageError(f"{text!r} is not {wanted}") from None
    scopes = [built_in_sketches] if not path else [load_module(path), built_in_sketches]
    if isinstance(node, ast.Name):
        known = _look_up(node.id, scopes, text, kinds, wanted)
        if isinstance(known, kinds):
            return known
        raise UsageError(f"{text!r} has no budget; type for example {known.__name__}(0.1)")
    if not isinstance(node, ast.Call):
        raise UsageError(f"{text!r} is not {wanted}")
    return _build(node, scopes, text, kinds, wanted)


def _build(node: ast.Call, scopes: Sequence[Any], text: str, kinds: Kinds, wanted: str) -> Any:
    def value(part: ast.expr) -> Any:
        if isinstance(part, ast.Call):
            return _build(part, scopes, text, kinds, wanted)
        return ast.literal_eval(part)

    if not isinstance(node.func, ast.Name):
        raise UsageError(f"{text!r} is not {wanted}")
    kind = _look_up(node.func.id, scopes, text, kinds, wanted)
    if isinstance(kind, kinds):
        raise UsageError(f"{text!r} calls a sketch that is made already; leave out the brackets")
    try:
        args = [value(part) for part in node.args]
        options = {str(keyword.arg): value(keyword.value) for keyword in node.keywords}
        made = kind(*args, **options)
    except UsageError:
        raise
    except (TypeError, ValueError) as error:
        raise UsageError(f"{text}: {error}") from error
    return made


def _look_up(name: str, scopes: Sequence[Any], text: str, kinds: Kinds, wanted: str) -> Any:
    """A class of sketches, or a sketch; nothing else that a module may hold."""
    known = next((getattr(s, name) for s in scopes if hasattr(s, name)), None)
    if known is None:
        names = ", ".join(sketch_names())
        raise UsageError(f"{name!r} is unknown in {text!r}; built-in sketches are {names}")
    if isinstance(known, kinds) or (isinstance(known, type) and issubclass(known, kinds)):
        return known
    raise UsageError(
        f"{name!r} in {text!r} is a {type(known).__name__}, not {wanted}, or a class derived from "
        f"sketchprop.{kinds[0].__name__}"
    )


def parse_sketches(texts: Sequence[str]) -> AnySketch | dict[str, AnySketch | None]:
    """One sketch, or ``PATTERN=SKETCH`` several times; ``PATTERN=exact`` leaves layers alone."""
    pairs = [_pattern(text) for text in texts]
    if len(pairs) == 1 and pairs[0][0] is None:
        return parse_sketch(texts[0])
    chosen: dict[str, AnySketch | None] = {}
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


def load_task(name: str, batch_size: int, seed: int) -> Task:
    """A built-in model with random batches, or ``module:factory`` that returns all three."""
    torch.manual_seed(seed)
    if ":" in name:
        return _user_task(name)
    if name not in MODELS:
        known = ", ".join(MODELS)
        raise UsageError(
            f"--model {name!r} is unknown; use one of {known}, or module:factory for a function "
            "of yours that returns (model, loss_fn, batches)"
        )
    make, random_batch = MODELS[name]
    return Task(make(), cross_entropy, Random(lambda: random_batch(batch_size)))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Classes in the last dimension, any number of positions before it."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def find_device(name: str) -> torch.device:
    """The device, if it is here and works."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"--device {name} is not here: {reason}") from error
    if device.type == "meta":
        raise UsageError("--device meta has no numbers: nothing can be measured there")
    return device


def make_optimizer(task: Task, name: str | None, learning_rate: float | None) -> Any:
    """The factory's own; or by name, over all parameters that train."""
    if task.optimizer is not None:
        if name is not None or learning_rate is not None:
            raise UsageError(
                "the factory returns an optimizer of its own; leave out --optimizer and "
                "--learning-rate"
            )
        return task.optimizer
    make, usual = OPTIMIZERS[name or "sgd"]
    trained = [p for p in task.model.parameters() if p.requires_grad]
    if not trained:
        raise UsageError("the model has no parameter that requires a gradient; unfreeze one")
    task.optimizer = make(trained, lr=usual if learning_rate is None else learning_rate)
    return task.optimizer


def train(task: Task, steps: int, report: Callable[[float], None] = lambda share: None) -> None:
    """Plain exact training: sketches are measured at a point of it, not only at its start."""
    if steps == 0:
        return
    task.model.train()
    for done, batch in enumerate(islice(task.stream, steps), 1):
        task.optimizer.zero_grad()
        torch.autograd.backward(task.loss_fn(task.model, batch))
        task.optimizer.step()
        report(done / steps)
    task.optimizer.zero_grad()


OPTIMIZERS: Mapping[str, tuple[Callable[..., Any], float]] = {
    "sgd": (torch.optim.SGD, 0.1),
    "adam": (torch.optim.Adam, 1e-3),
    "adamw": (torch.optim.AdamW, 1e-3),
}
"""By name: how it is made, and its usual rate."""


def _user_task(name: str) -> Task:
    path, _, attribute = name.partition(":")
    module = load_module(path)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        near = ", ".join(n for n in vars(module) if callable(getattr(module, n)) and n[0] != "_")
        raise UsageError(f"{path!r} has no function {attribute!r}; it has {near or 'none'}")
    made = factory()
    if not (isinstance(made, tuple) and len(made) in (3, 4) and isinstance(made[0], nn.Module)):
        raise UsageError(
            f"{name} returned {type(made).__name__}; return (model, loss_fn, batches) with "
            "loss_fn(model, batch) a scalar tensor and batches a list or a loader, and the "
            "optimizer as the fourth, if there is one"
        )
    if len(made) == 4 and not isinstance(made[3], torch.optim.Optimizer):
        raise UsageError(f"{name} returned {made[3]!r} as the fourth: give a torch optimizer")
    return Task(*made)


def _digits(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 784), torch.randint(10, (count,))


def _images(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 32, 32), torch.randint(10, (count,))


def _tokens(count: int) -> tuple[Tensor, Tensor]:
    return torch.randint(1000, (count, 64)), torch.randint(1000, (count, 64))


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "mlp": (mlp, _digits),
    "mlp4": (lambda: mlp(784, 64, 64, 64, 10), _digits),
    "vit": (ViT, _images),
    "bert": (Bert, _tokens),
}
"""Name: how it is made, and a random batch for it."""


def _concrete(value: Any) -> bool:
    if value in (Split, Tokens):
        return True
    return isinstance(value, type) and issubclass(value, Sketch) and not value.__abstractmethods__


def _pattern(text: str) -> tuple[str | None, str]:
    head, equals, tail = text.partition("=")
    return (head.strip(), tail.strip()) if equals and "(" not in head else (None, text)
