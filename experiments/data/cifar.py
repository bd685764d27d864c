"""CIFAR-10. Its batches are pickles, and a pickle can run code: each file is first compared with
its SHA-256 sum, and then read by an unpickler that knows no name but the three of numpy that the
format needs - and those are stand-ins which only collect a shape, a type and bytes.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import tarfile
import zlib
from typing import Any

import torch
from torch import Tensor

from .files import MOST_BYTES, DataError, Labelled, Source, fetched

ARCHIVE = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
INNER = "cifar-10-batches-py"
"""The folder inside of the published archive."""
CIFAR10 = Source(
    f"cifar10/{INNER}",
    {
        "data_batch_1": "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd",
        "data_batch_2": "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8",
        "data_batch_3": "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9",
        "data_batch_4": "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b",
        "data_batch_5": "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154",
        "test_batch": "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831",
    },
    f"It is in {ARCHIVE}",
)
_PIXELS = 3 * 32 * 32


def cifar10(train: bool = True, *, download: bool = True) -> Labelled:
    """The 50,000 training or 10,000 test pictures: ``images: uint8 [N, 3, 32, 32]``.

    ``images, labels = cifar10(train=False)``; ``download=False`` only looks at this machine.
    """
    names = [name for name in CIFAR10.sums if name.startswith("data_") == train]
    batches = [parse_batch(content) for content in _find(names, download)]
    images, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    return Labelled(images, labels)


def parse_batch(content: bytes) -> Labelled:
    """A batch of the Python version; builds nothing but plain values, whatever is in it."""
    try:
        _refuse_wide_memos(content)
        return _batch(_Unpickler(io.BytesIO(content), encoding="bytes").load())
    except DataError:
        raise
    except Exception as error:  # a cut or odd pickle fails in many ways
        raise DataError(f"not a batch of CIFAR-10: {type(error).__name__}: {error}") from None


def _refuse_wide_memos(content: bytes) -> None:
    """Five bytes can ask the unpickler for a table of 2³² places, and it would make it."""
    for count, (code, argument, _) in enumerate(pickletools.genops(content)):
        if isinstance(argument, int) and code.name.endswith("PUT") and argument > count:
            raise DataError(
                f"not a batch of CIFAR-10: its value {count} is stored at place {argument}"
            )


def _batch(found: Any) -> Labelled:
    data = found.get(b"data") if isinstance(found, dict) else None
    labels = found.get(b"labels") if isinstance(found, dict) else None
    if not isinstance(data, _Array) or not isinstance(labels, list):
        raise DataError("not a batch of CIFAR-10: it lacks b'data' as an array or b'labels'")
    if not all(type(label) is int and 0 <= label < 10 for label in labels):
        raise DataError("not a batch of CIFAR-10: a label is not a number from 0 to 9")
    return Labelled(data.pictures(len(labels)), torch.tensor(labels, dtype=torch.int64))


class _Unpickler(pickle.Unpickler):
    """Reads plain values and numpy arrays of bytes; every other name is refused, not imported."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise DataError(
                f"not a batch of CIFAR-10: it asks for {module}.{name}, which was not run. A "
                "pickle like this may be an attack: delete the file"
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        raise DataError(f"not a batch of CIFAR-10: it refers to an outside object {pid!r}")


class _Array:
    """What a numpy array is made of, without numpy."""

    __slots__ = ("content", "fortran", "kind", "shape")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, self.shape, self.kind, self.fortran, self.content = state

    def pictures(self, count: int) -> Tensor:
        if not isinstance(self.kind, _Type) or self.kind.code != b"u1" or self.fortran:
            raise DataError("not a batch of CIFAR-10: its pictures are not rows of bytes")
        wrong_size = type(self.content) is not bytes or len(self.content) != count * _PIXELS
        if self.shape != (count, _PIXELS) or wrong_size:
            raise DataError(
                f"not a batch of CIFAR-10: {count} labels need pictures of shape "
                f"({count}, {_PIXELS}), found {self.shape}"
            )
        return torch.frombuffer(bytearray(self.content), dtype=torch.uint8).view(count, 3, 32, 32)


class _Type:
    """A numpy type: its code, for example ``u1``."""

    __slots__ = ("code",)

    def __init__(self, code: bytes, _align: int = 0, _copy: int = 0) -> None:
        self.code = code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Byte order and padding, which bytes do not have."""


_NDARRAY = "numpy.ndarray"


class _Reconstruct:
    """numpy's function of that name. Not a function: a pickle may set attributes of those."""

    __slots__ = ()

    def __call__(self, kind: str, _shape: tuple[int, ...], _code: bytes) -> _Array:
        if kind != _NDARRAY:
            raise DataError("not a batch of CIFAR-10: it holds an array of another kind")
        return _Array()


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _Type,
}


def _find(names: list[str], download: bool) -> list[bytes]:
    """The files of these names; one download serves all that are not here."""
    found = {name: content for name in names if (content := CIFAR10.here(name)) is not None}
    absent = [name for name in names if name not in found]
    if absent and not download:
        raise CIFAR10.missing(absent[0], "downloading was not asked for")
    if absent:
        try:
            found |= _unpacked(fetched(ARCHIVE))
        except DataError as error:
            raise CIFAR10.missing(absent[0], str(error)) from None
    return [found[name] for name in names]


def _unpacked(packed: bytes) -> dict[str, bytes]:
    """The batches in the archive, each by its exact name, kept; nothing else is written."""
    batches = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
            for name in CIFAR10.sums:
                member = archive.extractfile(f"{INNER}/{name}")
                if member is None:
                    raise DataError(f"{ARCHIVE}: {INNER}/{name} is not a file")
                batches[name] = CIFAR10.checked(member.read(MOST_BYTES), name, ARCHIVE)
    except (tarfile.TarError, KeyError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{ARCHIVE} cannot be unpacked: {error}") from None
    for name, content in batches.items():
        CIFAR10.keep(content, name)
    return batches
