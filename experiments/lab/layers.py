"""What arrives at each layer in an exact backward pass."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .trainer import Batch, Loss


def captured(
    model: nn.Module, batch: Batch, layers: Iterable[str], loss: Loss = F.cross_entropy
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """G, W and X of each layer by name, rows flattened; the model stays as it is."""
    twin = copy.deepcopy(model).train()
    modules = {name: twin.get_submodule(name) for name in layers}
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def note(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[name], outputs[name] = args[0].detach(), output

        return note

    for name, module in modules.items():
        module.register_forward_hook(watch(name))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        total = loss(twin(batch[0]), batch[1])
    grads = torch.autograd.grad(total, list(outputs.values()))
    found = {}
    for name, grad in zip(outputs, grads, strict=True):
        weight = modules[name].weight
        assert isinstance(weight, Tensor)
        found[name] = (grad.flatten(0, -2), weight.detach(), inputs[name].flatten(0, -2))
    return found
