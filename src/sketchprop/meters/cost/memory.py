"""Bytes that autograd keeps between forward and backward, counted by unique storage.

A buffer that two operations save is one buffer. Parameters and buffers of the model are there
anyway and not counted. What a layer saves may be kept alive by others all the same (a ReLU keeps
the output that the next layer takes as its input; the batch is the user's): sketching that layer
cannot free it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
    ledger = _Ledger(model, batch)
    with restored(model), ledger.watching(layers):
        graph = scalar_loss(loss_fn, model, batch)
        report = ledger.report(list(layers.values()))
        del graph
    return report


class _Ledger:
    """Who saved which storage."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        held = [*model.parameters(), *model.buffers()]
        self._free = {_key(t) for t in held if _key(t) is not None}
        self._storages: dict[Any, Any] = {}
        self._savers: defaultdict[Any, set[str]] = defaultdict(set)
        self._current = [_OTHERS]
        for tensor in tensors_in(batch):
            self._note(tensor, _BATCH)

    @contextmanager
    def watching(self, layers: dict[nn.Module, str]) -> Iterator[None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._current.append(layers[module])

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._current.pop()

        saving = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)
        with call_hooks(layers, enter, leave), saving:
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        self._note(tensor, self._current[-1])
        return tensor.detach()  # the tensor itself would make a cycle with its own graph

    def _note(self, tensor: Tensor, saver: str) -> None:
        key = _key(tensor)
        if key is None or key in self._free:
            return
        # Held, so that no later storage gets the same address.
        self._storages[key] = tensor.untyped_storage()
        self._savers[key].add(saver)

    def report(self, names: list[str]) -> MemoryReport:
        def size(key: Any) -> int:
            return int(self._storages[key].nbytes())

        total = sum(size(key) for key, savers in self._savers.items() if _BATCH not in savers)
        lines = []
        for name in names:
            keys = [key for key, savers in self._savers.items() if name in savers]
            shared = sum(size(key) for key in keys if len(self._savers[key]) > 1)
            holders = {saver for key in keys for saver in self._savers[key]} - {name}
            lines.append(LayerBytes(name, sum(map(size, keys)), shared, tuple(sorted(holders))))
        return MemoryReport(total, tuple(lines))


def _key(tensor: Tensor) -> Any:
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None  # a sparse tensor has no single storage
    return (tensor.device, storage.data_ptr()) if storage.nbytes() else None
