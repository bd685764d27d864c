"""Where the library keeps files of its own."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$SKETCHPROP_CACHE``, ``$XDG_CACHE_HOME/sketchprop`` or ``~/.cache/sketchprop``."""
    own = os.environ.get("SKETCHPROP_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sketchprop"
