"""Files of data sets: found where the user says, cached, or downloaded; always checked.

Looked for in the folder named by the variable ``SKETCHPROP_DATA``, then in the user's cache
folder, then downloaded into the cache.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import os
import tempfile
import urllib.error
import urllib.request
import warnings
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
    try:
        roots = [Path(given).expanduser()] if given else []
    except RuntimeError as error:
        raise DataError(f"{VARIABLE}={given}: {error} Give the whole path") from None
    for root in [*roots, cache_folder()]:
        for start in range(len(folders) + 1):
            yield root.joinpath(*folders[start:])
        for end in range(len(folders) - 1, 0, -1):
            yield root.joinpath(*folders[:end])


def read(path: Path) -> bytes | None:
    """What is in a file; ``None`` if there is none, or no longer."""
    try:
        return path.read_bytes() if path.is_file() else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error}); give this user access to it, or name another "
            f"folder: {VARIABLE}=/path/to/folder"
        ) from None


def unpacked(content: bytes, source: str, most: int) -> bytes:
    """What is inside of a gzipped file, up to ``most`` bytes; any other content as it is."""
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            inside = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{source} cannot be unpacked ({error}); delete it and try again") from None
    return within(inside, source, most)


def within(content: bytes, source: str, most: int) -> bytes:
    """The content itself, if it is not longer than the data can be."""
    if len(content) > most:
        raise DataError(
            f"{source} holds more than {most} bytes: it is another file; delete it and try again"
        )
    return content


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


def fetched(url: str, most: int) -> bytes:
    """What is at an address, up to ``most`` bytes; a ``DataError`` says why it cannot be had."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
            content: bytes = answer.read(most + 1)
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise DataError(f"{url}: {error}") from None
    return within(content, url, most)


def keep(content: bytes, path: Path) -> None:
    """Written under another name first: two processes, or an interrupted one, leave no half.

    A cache is a convenience: where it cannot be written (a full disk, a folder without access)
    a warning says so, and nothing stays behind.
    """
    partial: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f"{path.name}.", suffix=".part", delete=False
        ) as file:
            partial = Path(file.name)
            file.write(content)
        partial.replace(path)
    except OSError as error:
        warnings.warn(
            f"{path} could not be kept for the next time ({error}); name another folder with "
            "SKETCHPROP_CACHE=/path/to/folder",
            stacklevel=2,
        )
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def missing(dataset: str, what: str, why: str) -> DataError:
    return DataError(
        f"{dataset}: {what} was not found and not downloaded ({why}). Put it into a folder and "
        f"name that: {VARIABLE}=/path/to/folder (or its parent, with the files in {dataset}/), or "
        f"put it into {cache_folder() / dataset}"
    )
