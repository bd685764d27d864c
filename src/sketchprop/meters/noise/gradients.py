"""Repeated gradients of one batch in which only the sketches' draws change.

The randomness of a forward pass (dropout) is the same in every pass over a batch and another one
for each batch, the buffers are put back before each, and a draw is a number: the same number draws
the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ...core.random import random_state, seed_generators, set_random_state
from ...layers import SketchedModule
from ...layers.depth import shares_in
from ..batches import handed
from ..restore import Buffers, call_hooks, check_model

Loss = Callable[[Any, Any], Tensor]
"""``loss_fn(model, batch)``, a scalar: what one step of training would call backward on."""


class Switch:
    """Decides for each use of a sketched layer whether it draws, and from which numbers.

    Uses are numbered in the order of forward; a layer that is called twice has two. Backward
    meets them in the opposite order, so sketching the uses ``first, first + 1, …`` sketches
    those that backward meets first, and from the same seed their draws are the same whatever
    ``first`` is.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.seed = seed
        self.layers: dict[Any, str] = {
            module: name
            for name, module in model.named_modules()
            if isinstance(module, SketchedModule) and module.training and not module.sketching.exact
        }
        self.first, self.draw = 0, 0
        self.uses: list[str] = []
        """The layer's name for each use of the probed pass, in the order of forward."""
        self._uses: defaultdict[nn.Module, list[int]] = defaultdict(list)
        self._own_randomness: dict[int, Tensor] = {}
        self._calls: Counter[nn.Module] = Counter()
        self._exact = False
        self.recording = False
        """Until forward is done: what is called then is a recomputation."""
        self._before: list[Tensor] = []
        self._held: dict[Any, bool] = {}
        """What was decided of each layer in this pass; what else is exact is so by the loss."""

    def installed(self) -> AbstractContextManager[None]:
        return call_hooks(self.layers, self._enter, self._leave)

    def start(self, first: int | None, draw: int) -> None:
        """Before a forward pass; ``first=None`` is exact and records which uses there are."""
        self._calls.clear()
        self._before.clear()
        self._held.clear()
        for module in self.layers:
            module.sketching.exact = False
        self._exact = self.recording = first is None
        self.first, self.draw = first or 0, draw
        if first is None:
            self.uses.clear()
            self._uses.clear()
            self._own_randomness.clear()

    def _index(self, module: nn.Module) -> int:
        call = self._calls[module]
        self._calls[module] += 1
        uses = self._uses[module]
        if self.recording and call == len(uses):
            uses.append(len(self.uses))
            self.uses.append(self.layers[module])
        if call < len(uses):
            return uses[call]
        if len(uses) == 1:
            return uses[0]  # activation checkpointing runs the layer again in backward
        raise RuntimeError(
            f"{self.layers[module]!r} was called {call + 1} times, and {len(uses)} times in the "
            "exact pass over the same batch. If it is used several times under activation "
            "checkpointing, measure without checkpointing: the gradients are the same"
        )

    def _enter(self, module: Any, args: Any, kwargs: Any) -> None:
        index = self._index(module)
        if not module.sketching.exact or self._held.get(module, False):
            self._held[module] = self._exact or index < self.first
            module.sketching.exact = self._held[module]
        self._before.append(random_state(_device(module)))
        if not module.sketching.exact and index not in self._own_randomness:
            seed_generators(_device(module), self.seed, self.draw, index)

    def _leave(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        before, after = self._before.pop(), random_state(_device(module))
        # ``_calls`` moved on in _enter: this use is the last one that was counted.
        uses = self._uses[module]
        index = uses[min(self._calls[module], len(uses)) - 1]
        if self._exact:
            if self.recording and not torch.equal(before, after):
                self._own_randomness[index] = after
        elif index in self._own_randomness:
            if not torch.equal(after, self._own_randomness[index]):
                raise RuntimeError(
                    f"{self.layers[module]!r} has dropout of its own and its sketch draws in "
                    "forward: the two cannot be told apart. Set its dropout to 0 to measure"
                )
        elif not module.sketching.exact:
            set_random_state(_device(module), before)


class Gradients:
    """Gradients of ``loss_fn(model, batch)`` for all trainable parameters."""

    def __init__(self, model: nn.Module, loss_fn: Loss, buffers: Buffers, seed: int = 0) -> None:
        self.model, self.loss_fn, self.buffers, self.seed = model, loss_fn, buffers, seed
        self.switch = Switch(model, seed)
        if not self.switch.layers:
            raise ValueError(_nothing_sketched(model))
        check_model(model)
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.device = self.parameters[0].device
        self._number = 0

    def exact(self, batch: Any, number: int = 0) -> list[Tensor]:
        """The exact gradient of a batch, told apart from others by its ``number``: noise that the
        loss draws would else be a gradient. Records the uses of sketched layers on the way."""
        self._number = number
        return self._run(batch, None, 0)

    def sketched(self, batch: Any, draw: int, first: int = 0) -> list[Tensor]:
        """A sketched gradient of the same batch, with the uses from ``first`` on drawing."""
        return self._run(batch, first, draw)

    def _run(self, batch: Any, first: int | None, draw: int) -> list[Tensor]:
        self.buffers.restore()
        self.switch.start(first, draw)
        seed_generators(self.device, self.seed, self._number)
        value = scalar_loss(self.loss_fn, self.model, batch)
        self.switch.recording = False
        seed_generators(self.device, self.seed, draw, -1)
        grads = torch.autograd.grad(value, self.parameters, materialize_grads=True)
        return [g.detach() for g in grads]


def _device(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def scalar_loss(loss_fn: Loss, model: nn.Module, batch: Any) -> Tensor:
    """The loss, checked to be something that backward can start from."""
    try:
        value = loss_fn(model, handed(batch))
    except (TypeError, AttributeError) as error:
        error.add_note("sketchprop calls loss_fn(model, batch): it runs the model itself")
        raise
    if not isinstance(value, Tensor) or value.dim() != 0:
        given = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            given = f"a tensor of shape {tuple(value.shape)}"
        raise ValueError(
            f"loss_fn returned {given}; return a scalar tensor, for example "
            "F.cross_entropy(model(x), y), or use .mean()"
        )
    if not value.requires_grad:
        raise ValueError(
            "loss_fn returned a loss without a graph; run the model inside loss_fn(model, batch), "
            "without no_grad or detach"
        )
    return value


def one_pass(
    loss_fn: Loss, model: nn.Module, batch: Any, parameters: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Forward and backward: the gradients, ``None`` where a parameter has no part in the loss."""
    loss = scalar_loss(loss_fn, model, batch)
    return torch.autograd.grad(loss, parameters, allow_unused=True)


def settle(model: nn.Module, loss_fn: Loss, batch: Any) -> None:
    """Blocks that share a budget out do so now, by one backward pass; inside ``restored``."""
    waiting = [shares for shares in shares_in(model) if shares.open]
    if waiting:
        one_pass(loss_fn, model, batch, [p for p in model.parameters() if p.requires_grad])
    for shares in waiting:
        shares.open = False


def squared_distance(a: list[Tensor], b: list[Tensor]) -> float:
    """‖a - b‖², accumulated in float64 where the device has it."""
    return sum(squared_norms(x - y for x, y in zip(a, b, strict=True)))


def squared_norms(tensors: Iterable[Tensor]) -> list[float]:
    """‖x‖² of each, accumulated in float64 where the device has it."""
    return numbers(wide(x).square().sum() for x in tensors)


def wide(x: Tensor) -> Tensor:
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def numbers(scalars: Iterable[Tensor]) -> list[float]:
    """What they hold: waits for the device once, not for each."""
    found = list(scalars)
    return torch.stack([t.to(found[0].device) for t in found]).cpu().tolist() if found else []


def _nothing_sketched(model: nn.Module) -> str:
    name = type(model).__name__
    sketched = [m for m in model.modules() if isinstance(m, SketchedModule)]
    if sketched and all(m.sketching.exact for m in sketched):
        return f"every sketch of {name} is off; leave `with sketchprop.exact(model):` to measure"
    if sketched:
        return f"every sketched layer of {name} is in eval mode; call model.train() to measure"
    return (
        f"{name} has no sketched layer; call sketch_(model, Tokens(0.3)) first, or say which "
        "sketch to try: measure(..., sketch=Tokens(0.3))"
    )
