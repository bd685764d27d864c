"""MNIST, as IDX files."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .files import DataError, Labelled, Source

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
SUMS = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
MNIST = Source(
    "mnist",
    SUMS,
    f"It is at {MIRRORS[0]}, gzipped",
    {name: tuple(f"{mirror}{name}.gz" for mirror in MIRRORS) for name in SUMS},
)


def mnist(train: bool = True, *, download: bool = True) -> Labelled:
    """The 60,000 training or 10,000 test digits: ``images: uint8 [N, 28, 28]``.

    ``images, labels = mnist(train=False)``; ``download=False`` only looks at this machine.
    """
    prefix = "train" if train else "t10k"
    names = (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte")
    images, labels = (parse_idx(MNIST.read(name, download)) for name in names)
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
