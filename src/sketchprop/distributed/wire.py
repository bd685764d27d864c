"""Compact gradients as messages, and a counter of the bytes that went over the wire."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.sampling import Uniforms, draw_uniforms
from ..core.vjp import CompactGradient, Vjp
from ..sketches import Sketch, Split

_ALIGN = 8


def check_sendable(sketch: object) -> None:
    """Refuses a sketch whose compact gradient is no message of a fixed size."""
    if isinstance(sketch, Split):
        raise ValueError(
            f"{sketch!r} sketches dX and dW apart, and a message carries one gradient; use for "
            "example Rows"
        )
    if not isinstance(sketch, Sketch):
        raise TypeError(
            f"sketch={sketch!r} is a {type(sketch).__name__}; give a sketch, for example Rows(0.1)"
        )
    if sketch.sampling != "fixed":
        raise ValueError(
            f"{sketch!r} keeps a random number of atoms, and both ends of a message must know its "
            "size beforehand; use sampling='fixed'"
        )
    if "W" in sketch.sees or "X" in sketch.sees:
        raise ValueError(
            f"{sketch!r} looks at a layer's weight or input, and a message between stages belongs "
            "to no layer; use a sketch that looks at the gradient alone, for example Rows"
        )


class WireFormat:
    """One buffer of a fixed size for the sketch of a gradient with a given shape and dtype.

    Indices as int32, values in the gradient's dtype with 1/p in them, each aligned. Which parts
    there are follows from the sketch of a gradient of zeros, so both ends find the same.
    """

    def __init__(self, sketch: Sketch, shape: torch.Size, dtype: torch.dtype, device: torch.device):
        self._sketch = sketch
        self._samples = sketch.samples_of(tuple(shape[:-1]))
        zeros = torch.zeros(shape[:-1].numel(), shape[-1], dtype=dtype, device=device)
        # Only the shapes of this draw count: the generator stays as it is.
        self._template = self._compact(zeros, lambda p, shape: p.new_zeros(shape))
        self._places: list[tuple[int, int, torch.Size, torch.dtype]] = []
        self.nbytes = 0
        for part in _tensors(self._template).values():
            kind = dtype if part.is_floating_point() else torch.int32
            size = part.numel() * kind.itemsize
            self._places.append((self.nbytes, size, part.shape, kind))
            self.nbytes += -(-size // _ALIGN) * _ALIGN

    def _compact(self, G: Tensor, uniforms: Uniforms = draw_uniforms) -> CompactGradient:
        return self._sketch(Vjp(G, samples=self._samples), uniforms)

    def empty(self, device: torch.device) -> Tensor:
        """A buffer to receive into."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    def pack(self, grad: Tensor) -> Tensor:
        """A draw of the sketch of ``grad``, as bytes."""
        compact = self._compact(grad.reshape(-1, grad.shape[-1]))
        buffer = torch.zeros(self.nbytes, dtype=torch.uint8, device=grad.device)
        for part, place in zip(_tensors(compact).values(), self._parts(buffer), strict=True):
            place.copy_(part)
        return buffer

    def _parts(self, buffer: Tensor) -> Iterator[Tensor]:
        """The tensors of a message, as views of its bytes."""
        for start, size, shape, dtype in self._places:
            yield buffer[start : start + size].view(dtype).view(shape)

    def unpack(self, buffer: Tensor, out: Tensor) -> None:
        """Writes the dense Ĝ of a message into ``out``.

        Indices are clamped: bytes that are no message must not write out of range.
        """
        tensors: Any = dict(zip(_tensors(self._template), self._parts(buffer), strict=True))
        if "index" in tensors:
            (size,) = (v for v in vars(self._template).values() if isinstance(v, int))
            tensors["index"] = tensors["index"].long().clamp_(0, size - 1)
        compact: Any = replace(self._template, **tensors)  # type: ignore[type-var]
        out.copy_(compact.dense().view(out.shape))


def wire_format(sketch: Sketch, tensor: Tensor) -> WireFormat | None:
    """How gradients like ``tensor`` travel; ``None``: as they are, because nothing is saved."""
    if tensor.dim() == 0 or tensor.numel() == 0 or not tensor.is_floating_point():
        return None
    rows, n = tensor.shape[:-1].numel(), tensor.shape[-1]
    if sketch.keeps_all(rows, n, 0):
        return None
    made = WireFormat(sketch, tensor.shape, tensor.dtype, tensor.device)
    return made if made.nbytes < tensor.nbytes else None


def _tensors(compact: Any) -> dict[str, Tensor]:
    values = {each.name: getattr(compact, each.name) for each in fields(compact)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


class Traffic(NamedTuple):
    """Bytes of one kind: how many messages, what was sent, what exact training would send."""

    messages: int = 0
    sent: int = 0
    exact: int = 0

    @property
    def ratio(self) -> float:
        """Sent over exact."""
        return self.sent / self.exact if self.exact else float(self.sent > 0)


class WireCounter:
    """Bytes that this process sends, by kind; ``take()`` after each step says what the step sent.

    >>> counter = WireCounter()
    >>> counter.add("pipeline", sent=100, exact=1000)
    >>> print(counter.take())
    pipeline: 1 messages, 100 bytes sent, 1,000 exact, ratio 0.1000
    total: 1 messages, 100 bytes sent, 1,000 exact, ratio 0.1000
    >>> counter.take().total.sent
    0
    """

    def __init__(self, kinds: Mapping[str, Traffic] | None = None) -> None:
        self.kinds = dict(kinds or {})

    @property
    def total(self) -> Traffic:
        return Traffic(*map(sum, zip(Traffic(), *self.kinds.values(), strict=True)))

    def add(self, kind: str, *, sent: int, exact: int) -> None:
        was = self.kinds.get(kind, Traffic())
        self.kinds[kind] = Traffic(was.messages + 1, was.sent + sent, was.exact + exact)

    def take(self) -> WireCounter:
        """What went over the wire since the last ``take``."""
        taken, self.kinds = WireCounter(self.kinds), {}
        return taken

    def __str__(self) -> str:
        return "\n".join(
            f"{kind}: {t.messages} messages, {t.sent:,} bytes sent, {t.exact:,} exact, "
            f"ratio {t.ratio:.4f}"
            for kind, t in {**self.kinds, "total": self.total}.items()
        )
