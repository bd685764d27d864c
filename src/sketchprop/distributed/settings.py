"""What neighbours must agree on, compared through the store that the process group met in.

Not by messages: a neighbour that expects another message would take it for a gradient, or wait.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

PATIENCE = timedelta(seconds=30)
"""How long a stage waits for its neighbour's settings; it has sent activations already."""

VERSION = 1
"""Of the message's format."""


class Settings:
    """The settings of stage ``index`` of ``count``, announced once and compared once.

    The store also counts how often each stage was announced: the first pipeline's stage 0 is
    compared with the first pipeline's stage 1, whatever came later.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, index: int, count: int, settings: str
    ) -> None:
        """Tells the others; waits for nobody."""
        group = group or dist.group.WORLD
        if group is None:
            raise RuntimeError(
                "torch.distributed is not initialised; call dist.init_process_group first"
            )
        self._store = group.get_group_store()
        ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
        self._folder = f"sketchprop/{ranks}/stage-of-{count}"
        self._index, self._mine = index, f"{settings} (format {VERSION})"
        self._compared: set[int] = set()
        self._turn = self._store.add(f"{self._folder}/{index}/turns", 1)
        self._store.set(self._key(index), self._mine)

    def compare(self, other: int) -> None:
        """Raises where stage ``other`` has announced something else, or nothing in time."""
        if other in self._compared:
            return
        try:
            self._store.wait([self._key(other)], PATIENCE)
        except RuntimeError as problem:
            raise TimeoutError(
                f"stage {other} has not announced a sketch, and stage {self._index} sends "
                f"{self._mine}: call sketch_stage_ alike on every stage, or on none"
            ) from problem
        theirs = self._store.get(self._key(other)).decode()
        if theirs != self._mine:
            raise ValueError(
                f"stage {self._index} has {self._mine} and stage {other} has {theirs}: messages "
                "would not fit; give every stage the same sketch"
            )
        self._compared.add(other)

    def _key(self, index: int) -> str:
        return f"{self._folder}/{index}/{self._turn}"
