"""Batches: told apart by what they hold (a loader makes new objects in each pass), and cut."""

from __future__ import annotations

import ctypes
import math
import pickle
from collections.abc import Iterable, MutableMapping
from copy import copy
from io import BytesIO
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

MOST_BYTES = 2**30
"""Of batches that are held."""


class Contents(NamedTuple):
    """What a batch holds, as numbers that are equal for equal contents."""

    whole: int
    samples: tuple[int, ...]
    """Of each sample: its rows in all tensors that have one for each; none without a tensor."""
    nbytes: int
    """Of its tensors."""


def contents(batch: Any) -> Contents:
    """Looks into tuples, dicts and objects that can be pickled."""
    opened = _Opened()
    try:
        opened.dump(batch)
        rest: Any = opened.stream.getvalue()
    except Exception:  # what cannot be pickled is one batch if it is one object
        leaves = tree_leaves(batch)
        opened.tensors = tensors_in(batch)
        rest = tuple(id(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
    data = [(tuple(t.shape), str(t.dtype), _bytes_of(t)) for t in opened.tensors]
    count = next((shape[0] for shape, _, _ in data if shape), 0)
    columns = [
        [raw[i * len(raw) // count : (i + 1) * len(raw) // count] for i in range(count)]
        for shape, _, raw in data
        if shape[:1] == (count,) and isinstance(raw, bytes)
    ]
    samples = tuple(map(hash, zip(*columns, strict=True)))
    return Contents(hash((rest, *data)), samples, sum(t.nbytes for t in opened.tensors))


def different(batches: Iterable[Any], fewest: float = math.inf) -> list[Any]:
    """Each once, by what it holds; beyond ``MOST_BYTES`` no more than ``fewest``."""
    found: dict[int, Any] = {}
    room = MOST_BYTES
    for batch in batches:
        inside = contents(batch)
        if inside.whole not in found:
            found[inside.whole] = batch
            room -= inside.nbytes
        if room <= 0 and len(found) >= fewest:
            break
    return list(found.values())


class _Opened(pickle.Pickler):
    """Finds the tensors in whatever holds them, and writes all else to its stream."""

    def __init__(self) -> None:
        self.stream, self.tensors = BytesIO(), list[Tensor]()
        super().__init__(self.stream)
        self.fast = True  # no memo: equal texts are written alike, one object or two

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value)
        return len(self.tensors)


def _bytes_of(tensor: Tensor) -> bytes | int:
    try:
        dense = tensor.detach().cpu().contiguous()
        return ctypes.string_at(dense.data_ptr(), dense.nbytes)
    except (RuntimeError, NotImplementedError):  # sparse: then an object is its content
        return id(tensor)


def handed(batch: Any) -> Any:
    """The same tensors in containers of its own: a loss that pops its labels leaves the batch."""
    return tree_map(lambda leaf: copy(leaf) if isinstance(leaf, MutableMapping) else leaf, batch)


def usual_first(batches: list[Any]) -> list[Any]:
    """The batch of median size first: times that are taken on it are usual ones."""
    sizes = [contents(batch).nbytes for batch in batches]
    usual = sizes.index(sorted(sizes)[len(sizes) // 2]) if sizes else 0
    return [*batches[usual : usual + 1], *batches[:usual], *batches[usual + 1 :]]


def tensors_in(value: object) -> list[Tensor]:
    """The tensors inside a batch: a tensor, or nested tuples, lists and dicts of them."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def halved(batch: Any, second: bool = False) -> Any:
    """One half of the samples, by the first dimension of the first tensor; ``None``: it has none,
    or no other tensor has it.

    >>> import torch
    >>> halved((torch.arange(4), "a name")), halved(torch.arange(5), second=True)
    ((tensor([0, 1]), 'a name'), tensor([2, 3, 4]))
    """
    sizes = [t.shape[0] for t in tensors_in(batch) if t.dim()]
    if not sizes or sizes[0] < 2 or (len(sizes) > 1 and sizes[0] not in sizes[1:]):
        return None
    middle = sizes[0] // 2

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != (sizes[0],):
            return leaf
        return leaf[middle:] if second else leaf[:middle]

    return tree_map(cut, batch)
