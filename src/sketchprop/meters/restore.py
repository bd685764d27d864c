"""Measuring must leave no trace: what is changed on the way, and how it is put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.random import random_state_kept
from ..layers.choose import HOOKED
from ..layers.isolation import SKETCHING
from ..layers.select import blocks_of, units_of
from ..layers.transform import sketch_
from ..sketches import AnySketch, Planner

ENTRIES = (SKETCHING, HOOKED)
"""What a sketch leaves in a module, or changes there."""


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
def restored(
    model: nn.Module,
    sketch: AnySketch | Mapping[str, AnySketch | None] | None = None,
    planner: Planner | None = None,
    *,
    compiled: bool = False,
) -> Iterator[Buffers]:
    """The one isolation of all meters; with ``sketch``, ``sketch_(model, sketch)`` inside.

    Put back at the end, also after an error or Ctrl-C: gradients, buffers, training flags,
    classes, sketches with all that they remember, and every random state. Inside, ``.grad`` is
    ``None``, so that nothing can be added to it; sketches remember in copies, and run compiled
    only with ``compiled``; the model trains (a model in eval mode draws nothing), but for parts of
    it that are in eval mode while the model trains, such as a frozen BatchNorm.
    """
    with ExitStack() as stack:
        stack.enter_context(random_state_kept())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        states = [
            (m, type(m), m.training, {n: vars(m)[n] for n in ENTRIES if n in vars(m)})
            for m in model.modules()
        ]
        stack.callback(_put_back, states, [(p, p.grad) for p in model.parameters()])
        buffers = Buffers(model)
        stack.callback(buffers.restore)
        for module in model.modules():
            if SKETCHING in vars(module):
                state = vars(module)[SKETCHING] = vars(module)[SKETCHING].copied()
                state.compiled = compiled and state.compiled
        for parameter in model.parameters():
            parameter.grad = None
        if not model.training:
            model.train()
        if sketch is not None:
            sketch_(model, sketch, planner=planner)
        yield buffers


def _put_back(
    states: list[tuple[nn.Module, type[nn.Module], bool, dict[str, Any]]],
    gradients: list[tuple[nn.Parameter, Tensor | None]],
) -> None:
    for module, kind, training, entries in states:
        if type(module) is not kind:
            module.__class__ = kind
        module.training = training
        vars(module).pop(SKETCHING, None)
        vars(module).update(entries)
    for parameter, grad in gradients:
        parameter.grad = grad


@contextmanager
def call_hooks(
    layers: Iterable[nn.Module],
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """``before(layer, args, kwargs)`` and ``after(layer, args, kwargs, output)`` at each call."""
    with ExitStack() as stack:
        for layer in layers:
            for register, hook in (
                (layer.register_forward_pre_hook, before),
                (layer.register_forward_hook, after),
            ):
                if hook is not None:
                    stack.callback(register(hook, with_kwargs=True).remove)
        yield


def check_model(model: nn.Module) -> None:
    """Refuses a model on which there is nothing to measure."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no parameter that requires a gradient; unfreeze one"
        )
    check_real(model)


def check_optimizer(optimizer: Any) -> None:
    """Refuses its name, its class or a list of some."""
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"optimizer={optimizer!r} is no optimizer; give the one that trains the model, for "
            "example torch.optim.AdamW(model.parameters(), lr=1e-3)"
        )


def check_real(model: nn.Module) -> None:
    """Refuses a model that has shapes and no numbers."""
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is on the meta device, where nothing can be measured; load "
            "its weights first, or model.to_empty(device='cpu')"
        )


def check_sketchable(model: nn.Module) -> None:
    """Refuses a model of which no sketch could take anything."""
    if not units_of(model) and not blocks_of(model):
        raise ValueError(
            f"{type(model).__name__} has no layer that can be sketched; see sketchprop.summary"
        )


def check_minutes(minutes: float, usual: float) -> None:
    if isinstance(minutes, bool) or not minutes > 0:
        raise ValueError(f"minutes={minutes!r} is no time; give for example minutes={usual:g}")
