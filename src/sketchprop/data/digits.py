"""MNIST. Files may be gzipped or not; what is inside is compared with known SHA-256 sums of the
unpacked bytes, because mirrors pack the same bytes differently.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.cache import cache_folder
from .files import DataError, Labelled, candidates, checked, fetched, keep, missing, read, unpacked

FOLDER = "mnist"
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
_MOST_BYTES = 1 << 26
"""No file of MNIST is longer: 47 MB of pictures."""


def mnist(train: bool = True, *, download: bool = True) -> Labelled:
    """The 60,000 training or 10,000 test digits: ``images: uint8 [N, 28, 28]``.

    ``images, labels = mnist(train=False)``; ``download=False`` only looks at this machine.
    """
    prefix = "train" if train else "t10k"
    images, labels = (
        parse_idx(_find(name, download))
        for name in (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte")
    )
    return Labelled(images, labels.long())


def parse_idx(content: bytes) -> Tensor:
    """An IDX file of unsigned bytes: two zeros, the type 8, the number of sizes, sizes, data."""
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise DataError(f"not an IDX file of bytes: it begins with {content[:4]!r}")
    start = 4 + 4 * content[3]
    sizes = memoryview(content)[4:start]
    shape = tuple(int.from_bytes(sizes[i : i + 4], "big") for i in range(0, start - 4, 4))
    if not 0 < len(shape) <= 4 or len(sizes) != start - 4 or 0 in shape:
        raise DataError(
            f"an IDX file of {content[3]} sizes, {shape}, has no pictures or labels in it: it is "
            "cut or damaged"
        )
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


def _find(name: str, download: bool) -> bytes:
    """The unpacked content of a file, from the first place that has it."""
    for folder in candidates(FOLDER):
        for path in (folder / name, folder / f"{name}.gz"):
            packed = read(path)
            if packed is not None:
                content = unpacked(packed, str(path), _MOST_BYTES)
                return checked(content, MNIST_SHA256[name], str(path))
    if not download:
        raise missing(FOLDER, f"{name}.gz", "downloading was not asked for")
    reasons = []
    for mirror in MNIST_MIRRORS:
        url = f"{mirror}{name}.gz"
        try:
            packed = fetched(url, _MOST_BYTES)
            content = checked(unpacked(packed, url, _MOST_BYTES), MNIST_SHA256[name], url)
        except DataError as error:
            reasons.append(str(error))
            continue
        keep(packed, cache_folder() / FOLDER / f"{name}.gz")
        return content
    raise missing(FOLDER, f"{name}.gz", "; ".join(reasons))
