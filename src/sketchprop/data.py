"""MNIST as plain tensors: found where the user says, cached, or downloaded; always checked.

Looked for in the folder named by the variable ``SKETCHPROP_DATA``, then in the user's cache
folder, then downloaded into the cache. Files may be gzipped or not. What is inside is compared
with known SHA-256 sums of the unpacked bytes, because mirrors pack the same bytes differently.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import struct
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .cache import cache_folder

VARIABLE = "SKETCHPROP_DATA"
"""The environment variable that names a folder with data sets, for example with ``mnist/``."""

MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
MNIST_SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""SHA-256 of the unpacked IDX files."""

_TIMEOUT_SECONDS = 30


class Labelled(NamedTuple):
    """A data set in memory: ``images[N, ...]`` as bytes, ``labels[N]``."""

    images: Tensor
    labels: Tensor


class DataError(RuntimeError):
    """A data set is missing or damaged; the message says what to do."""


def mnist(train: bool = True, *, download: bool = True) -> Labelled:
    """The 60,000 training or 10,000 test digits: ``images: uint8 [N, 28, 28]``.

    ``images, labels = mnist(train=False)``; ``download=False`` only looks at this machine.
    """
    prefix = "train" if train else "t10k"
    images, labels = (
        parse_idx(_find("mnist", name, MNIST_SHA256[name], MNIST_MIRRORS, download))
        for name in (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte")
    )
    return Labelled(images, labels.long())


def parse_idx(content: bytes) -> Tensor:
    """An IDX file of unsigned bytes: two zeros, the type 8, the number of sizes, sizes, data."""
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise DataError(f"not an IDX file of bytes: it begins with {content[:4]!r}")
    shape = struct.unpack_from(f">{content[3]}I", content, 4)
    start = 4 + 4 * content[3]
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"an IDX file of shape {shape} needs {math.prod(shape)} bytes of data and has "
            f"{len(content) - start}: it is cut or damaged"
        )
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).view(shape)


def normalised(images: Tensor) -> Tensor:
    """Bytes as float32 rows, zero mean and unit variance over the whole set: ``[N, pixels]``."""
    rows = images.flatten(1).float()
    return (rows - rows.mean()) / rows.std()


def _find(dataset: str, name: str, sha256: str, mirrors: tuple[str, ...], download: bool) -> bytes:
    """The unpacked content of a file, from the first place that has it."""
    for path in _candidates(dataset, name):
        if path.is_file():
            return _checked(_read(path), sha256, str(path))
    if not download:
        raise DataError(_missing(dataset, name, "downloading was not asked for"))
    return _download(dataset, name, sha256, mirrors)


def _candidates(dataset: str, name: str) -> Iterator[Path]:
    given = os.environ.get(VARIABLE)
    roots = [Path(given).expanduser()] if given else []
    for root in [*roots, cache_folder()]:
        for folder in (root / dataset, root):
            yield from (folder / name, folder / f"{name}.gz")


def _read(path: Path) -> bytes:
    return _unpack(path.read_bytes(), str(path))


def _unpack(content: bytes, source: str) -> bytes:
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{source} cannot be unpacked ({error}); delete it and try again") from None


def _checked(content: bytes, sha256: str, source: str) -> bytes:
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise DataError(
            f"{source} has SHA-256 {found} after unpacking, expected {sha256}: it is damaged or "
            "another file; delete it and try again"
        )
    return content


def _download(dataset: str, name: str, sha256: str, mirrors: tuple[str, ...]) -> bytes:
    reasons = []
    for mirror in mirrors:
        url = f"{mirror}{name}.gz"
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
                packed = answer.read()
            content = _checked(_unpack(packed, url), sha256, url)
        except (urllib.error.URLError, OSError, DataError) as error:
            reasons.append(f"{url}: {error}")
            continue
        target = cache_folder() / dataset / f"{name}.gz"
        target.parent.mkdir(parents=True, exist_ok=True)
        # Under another name first: two processes, or an interrupted one, leave no half file.
        partial = target.with_name(f"{target.name}.{os.getpid()}.part")
        partial.write_bytes(packed)
        partial.replace(target)
        return content
    raise DataError(_missing(dataset, name, "; ".join(reasons)))


def _missing(dataset: str, name: str, why: str) -> str:
    return (
        f"{dataset}/{name} was not found and not downloaded ({why}). Put {name}.gz into a folder "
        f"and name it: {VARIABLE}=/path/to/folder (or its parent, with the files in {dataset}/), "
        f"or put it into {cache_folder() / dataset}"
    )
