"""Where the library keeps files of its own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """``$SKETCHPROP_CACHE``, ``$XDG_CACHE_HOME/sketchprop`` or ``~/.cache/sketchprop``.

    For a user without a home, as in many containers, a folder below that of temporary files.
    """
    chosen = os.environ.get("SKETCHPROP_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "sketchprop"
    try:
        return Path.home() / ".cache" / "sketchprop"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"sketchprop-{os.getuid()}"
