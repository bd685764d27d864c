"""Files of data sets: found where the user says, cached, or downloaded; always checked.

Looked for in the folder named by the variable ``SKETCHPROP_DATA``, then in the user's cache
folder, then downloaded into the cache.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ..core.cache import cache_folder

VARIABLE = "SKETCHPROP_DATA"
"""The environment variable that names a folder with data sets, for example with ``mnist/``."""

_TIMEOUT_SECONDS = 30


class Labelled(NamedTuple):
    """A data set in memory: ``images[N, ...]`` as bytes, ``labels[N]``."""

    images: Tensor
    labels: Tensor


class DataError(RuntimeError):
    """A data set is missing or damaged; the message says what to do."""


def candidates(*folders: str) -> Iterator[Path]:
    """Where the files of a data set may lie, best first; ``folders`` are its own, nested."""
    given = os.environ.get(VARIABLE)
    roots = [Path(given).expanduser()] if given else []
    for root in [*roots, cache_folder()]:
        for start in range(len(folders) + 1):
            yield root.joinpath(*folders[start:])
        for end in range(len(folders) - 1, 0, -1):
            yield root.joinpath(*folders[:end])


def unpacked(content: bytes, source: str) -> bytes:
    """What is inside of a gzipped file; any other content as it is."""
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{source} cannot be unpacked ({error}); delete it and try again") from None


def checked(content: bytes, expected: str, source: str, algorithm: str = "SHA-256") -> bytes:
    """The content itself, if its sum is the expected one."""
    name = algorithm.replace("-", "").lower()
    found = hashlib.new(name, content, usedforsecurity=False).hexdigest()
    if found != expected:
        raise DataError(
            f"{source} has {algorithm} {found}, expected {expected}: it is damaged or another "
            "file; delete it and try again"
        )
    return content


def fetched(url: str) -> bytes:
    """What is at an address; a :class:`DataError` says why it cannot be had."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
            content: bytes = answer.read()
    except (urllib.error.URLError, OSError) as error:
        raise DataError(f"{url}: {error}") from None
    return content


def keep(content: bytes, path: Path) -> None:
    """Written under another name first: two processes, or an interrupted one, leave no half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_bytes(content)
    partial.replace(path)


def missing(dataset: str, what: str, why: str) -> DataError:
    return DataError(
        f"{dataset}: {what} was not found and not downloaded ({why}). Put it into a folder and "
        f"name that: {VARIABLE}=/path/to/folder (or its parent, with the files in {dataset}/), or "
        f"put it into {cache_folder() / dataset}"
    )
