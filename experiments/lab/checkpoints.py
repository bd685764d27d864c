"""The state of a run in progress: on disk whole or not at all, and gone when the run is stored."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .store import write_file

FOLDER = "checkpoints"
State = dict[str, Any]


@dataclass(frozen=True)
class Checkpoints:
    """Where runs keep their state, and how often they save it."""

    folder: Path
    every: float = 60.0
    """Seconds of work that a kill may cost."""

    def of(self, identity: str) -> Checkpoint:
        return Checkpoint(self.folder / f"{identity}.pt", self.every)

    def remove(self, identities: set[str]) -> None:
        """Of runs that are stored; and the folder with the last of them.

        Killed while it writes, a run also leaves a part of a file behind.
        """
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if path.name.lstrip(".").partition(".")[0] in identities:
                path.unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()


class Checkpoint:
    """The state of one run."""

    def __init__(self, path: Path, every: float) -> None:
        self.path, self.every = path, every
        self._last = time.monotonic()

    def load(self) -> State | None:
        """What was saved last; ``None`` if nothing was, or by another version of torch."""
        if not self.path.is_file():
            return None
        try:
            state: State = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception:  # other bytes fail in many ways
            return None  # not written by this code: the run begins anew
        return state if state.pop("torch", None) == torch.__version__ else None

    def offer(self, state: Callable[[], State]) -> None:
        """Saves the state if it is time."""
        if time.monotonic() - self._last < self.every:
            return
        content = io.BytesIO()
        torch.save({**state(), "torch": str(torch.__version__)}, content)
        write_file(self.path, content.getvalue())
        self._last = time.monotonic()
