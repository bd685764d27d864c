"""What is measured: a model, its loss and its batches, built in or from the user's factory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..meters.batches import different
from ..meters.noise.gradients import scalar_loss
from ..meters.restore import check_model
from ..zoo import Bert, ViT, mlp
from .expressions import UsageError, load_module

FACTORY = "(model, loss_fn, batches)"


@dataclass
class Task:
    """A model, its loss, and batches as training draws them; they may be endless."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batches: Iterable[Any]
    optimizer: Any = None
    """What --steps and --trial train with; ``None`` until it is made."""

    @property
    def device(self) -> torch.device:
        first = next(self.model.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def take(self, count: int) -> list[Any]:
        """For measuring: at most ``count`` batches from a new pass, each only once."""
        batches = different(islice(iter(self.batches), count))
        if not batches:
            raise UsageError("the factory's batches are empty, or used up by --steps; give more")
        return batches

    def make_optimizer(self, name: str | None, learning_rate: float | None) -> None:
        """The factory's; or by name, over all parameters that train."""
        if self.optimizer is not None:
            if name is not None or learning_rate is not None:
                raise UsageError(
                    "the factory returns an optimizer of its own; leave out --optimizer and "
                    "--learning-rate"
                )
            return
        make, usual = OPTIMIZERS[name or "sgd"]
        check_model(self.model)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make(parameters, lr=usual if learning_rate is None else learning_rate)

    def train(self, steps: int, report: Callable[[float], None]) -> None:
        """Plain exact training: sketches are measured at a point of it, not only at its start."""
        if steps == 0:
            return
        self.model.train()
        for number, batch in enumerate(islice(self._epochs(), steps), 1):
            self.optimizer.zero_grad()
            loss = scalar_loss(self.loss_fn, self.model, batch)
            if not torch.isfinite(loss):
                rate = self.optimizer.param_groups[0]["lr"]
                raise UsageError(
                    f"the loss is {float(loss.detach())} at step {number} of --steps {steps}: give "
                    f"a lower --learning-rate ({rate:g} was used), or --optimizer, the one that "
                    "you train with"
                )
            torch.autograd.backward(loss)
            self.optimizer.step()
            report(number / steps)
        self.optimizer.zero_grad()

    def _epochs(self) -> Iterator[Any]:
        """Begins anew where the batches end."""
        while True:
            batch = None
            for batch in self.batches:
                yield batch
            if batch is None:
                raise UsageError("the factory's batches end before --steps do; give a list")


def load_task(name: str | None, batch_size: int, seed: int) -> Task:
    """A built-in model on random data, or ``module:factory`` that returns both and the loss."""
    if name is None:
        raise UsageError(
            "there is no model to look at; give --model mine:factory, a function in mine.py that "
            f"returns {FACTORY}, or for a first look --model vit; --help shows such a function"
        )
    torch.manual_seed(seed)
    if ":" in name:
        return _user_task(name)
    if name not in MODELS:
        raise UsageError(
            f"--model {name!r} is unknown; use one of {', '.join(MODELS)}, or module:factory for a "
            f"function of yours that returns {FACTORY}"
        )
    make, random_batch = MODELS[name]
    endless = iter(lambda: random_batch(batch_size), None)
    return Task(make(), cross_entropy, endless)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Classes in the last dimension, any number of positions before it."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


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
    parts = factory()
    fits = isinstance(parts, tuple) and len(parts) in (3, 4)
    if not (fits and isinstance(parts[0], nn.Module) and callable(parts[1])):
        raise UsageError(
            f"{name} returned {type(parts).__name__}; return {FACTORY} with loss_fn(model, batch) "
            "a scalar tensor and batches a list or a loader, and the optimizer as the fourth, if "
            "there is one"
        )
    if len(parts) == 4 and not isinstance(parts[3], torch.optim.Optimizer):
        raise UsageError(f"{name} returned {parts[3]!r} as the fourth: give a torch optimizer")
    return Task(*parts)


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "mlp": (mlp, lambda size: (torch.randn(size, 784), torch.randint(10, (size,)))),
    "vit": (ViT, lambda size: (torch.randn(size, 3, 32, 32), torch.randint(10, (size,)))),
    "bert": (Bert, lambda size: (torch.randint(1000, (size, 64)), torch.randint(1000, (size, 64)))),
}
"""Name: how it is made, and a random batch for it."""
