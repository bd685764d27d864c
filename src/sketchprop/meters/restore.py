"""Measuring must leave no trace: what is changed on the way, and how it is put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..layers.transform import sketch_
from ..sketches import Sketch

_SKETCH_STATE = ("sketching",)


class Buffers:
    """The buffers of a model as they were: the same tensors with the same contents."""

    def __init__(self, model: nn.Module) -> None:
        self._saved = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for module, name, buffer, content in self._saved:
            module._buffers[name] = buffer
            if buffer is not None and content is not None:
                buffer.copy_(content)


@contextmanager
def restored(model: nn.Module) -> Iterator[Buffers]:
    """Puts back buffers, training flags, sketches and the random state, also after an error.

    Inside, the model trains (a model in eval mode draws nothing); parts of it that are in eval
    mode while the model trains, such as a frozen BatchNorm, stay so.
    """
    flags = [(module, module.training) for module in model.modules()]
    classes = [
        (module, type(module), {k: module.__dict__[k] for k in _SKETCH_STATE & vars(module).keys()})
        for module in model.modules()
    ]
    buffers = Buffers(model)
    with fork_random_state(model), torch.enable_grad():
        try:
            if not model.training:
                model.train()
            yield buffers
        finally:
            buffers.restore()
            for module, training in flags:
                module.training = training
            for module, kind, state in classes:
                if type(module) is not kind:
                    module.__class__ = kind
                for key in _SKETCH_STATE:
                    module.__dict__.pop(key, None)
                module.__dict__.update(state)


@contextmanager
def sketched(
    model: nn.Module, sketch: Sketch | Mapping[str, Sketch | None] | None
) -> Iterator[None]:
    """``sketch_(model, sketch)`` for a while, inside ``restored``; ``None`` changes nothing."""
    with restored(model):
        if sketch is not None:
            sketch_(model, sketch)
        yield


@contextmanager
def fork_random_state(model: nn.Module) -> Iterator[None]:
    """What is drawn inside leaves the generators of the CPU and of the model's devices alone."""
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta", "mps")}
    kinds = {device.type for device in devices}
    kind = kinds.pop() if kinds else "cuda"
    with torch.random.fork_rng(devices=sorted(d.index or 0 for d in devices), device_type=kind):
        yield


def tensors_in(value: object) -> list[Tensor]:
    """The tensors inside a batch: a tensor, or nested tuples, lists and dicts of them."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
