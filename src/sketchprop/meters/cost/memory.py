"""Bytes that autograd keeps between forward and backward, counted by unique storage.

A buffer that two operations save is one buffer. Parameters and buffers of the model are there
anyway and not counted. What a layer saves may be kept alive by others all the same (a ReLU keeps
the output that the next layer takes as its input; the batch is the user's): sketching that layer
cannot free it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.proof import has_numbers
from ...layers.select import units_of
from ..batches import tensors_in
from ..noise.gradients import Loss, scalar_loss
from ..restore import call_hooks, restored

_OTHERS = "(others)"
_BATCH = "(batch)"


@dataclass(frozen=True)
class LayerBytes:
    """What one layer saves for backward."""

    layer: str
    saved: int
    shared: int
    """The part of ``saved`` that other operations or the batch keep alive anyway."""
    holders: tuple[str, ...] = ()
    """Who else keeps it: layers by name, ``(others)`` for all that is no layer, ``(batch)``."""


@dataclass(frozen=True)
class MemoryReport:
    """What one forward pass saves for backward."""

    total: int
    """All unique storages, the batch itself not counted."""
    layers: tuple[LayerBytes, ...]


def saved_bytes(model: nn.Module, loss_fn: Loss, batch: Any) -> MemoryReport:
    """Runs one forward pass and counts what it keeps. Inside ``exact(model)``: the exact pass.

    Layers that are sketched, or could be, are listed with what they save.
    """
    layers = {module: name for name, module in units_of(model).items()}
    free = {_key(tensor) for tensor in (*model.parameters(), *model.buffers())} | {None}
    storages: dict[Any, Any] = {}
    savers: defaultdict[Any, set[str]] = defaultdict(set)
    current = [_OTHERS]

    def note(tensor: Tensor, saver: str) -> None:
        key = _key(tensor)
        if key not in free:
            # Held, so that no later storage gets the same address.
            storages[key] = tensor.untyped_storage()
            savers[key].add(saver)

    def pack(tensor: Tensor) -> Tensor:
        note(tensor, current[-1])
        return tensor.detach()  # the tensor itself would make a cycle with its own graph

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        current.append(layers[module])

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        current.pop()

    for tensor in tensors_in(batch):
        note(tensor, _BATCH)
    saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with restored(model), call_hooks(layers, enter, leave), saving:
        graph = scalar_loss(loss_fn, model, batch)
        sizes = {key: int(storage.nbytes()) for key, storage in storages.items()}
        del graph
    lines = []
    for name in layers.values():
        keys = [key for key in savers if name in savers[key]]
        shared = sum(sizes[key] for key in keys if len(savers[key]) > 1)
        holders = {saver for key in keys for saver in savers[key]} - {name}
        saved = sum(sizes[key] for key in keys)
        lines.append(LayerBytes(name, saved, shared, tuple(sorted(holders))))
    total = sum(size for key, size in sizes.items() if _BATCH not in savers[key])
    return MemoryReport(total, tuple(lines))


def _key(tensor: Tensor) -> Any:
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None  # a sparse tensor has no single storage
    place = storage.data_ptr() if has_numbers(tensor) else storage._cdata
    return (tensor.device, place) if storage.nbytes() else None
