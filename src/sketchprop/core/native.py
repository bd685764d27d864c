"""Draws in C where that was built: three operations of torch with a kernel for the CPU.

At small batches a draw's thirty operations cost more to call than to compute. The library is
plain C (``draw.c``), built with the wheel where there is a compiler; without it, on other devices,
in traces and in compiled graphs the same is written in torch beside each caller, which is also
what tests compare it with. Registered with torch, so that profilers and traces see the calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_OPERATIONS: Any = torch.library.Library("sketchprop", "DEF")  # type: ignore[no-untyped-call]


def _load() -> ctypes.CDLL | None:
    path = Path(__file__).with_name("_draw.so")
    try:
        library = ctypes.CDLL(str(path)) if path.exists() else None
    except OSError:  # built for another machine
        return None
    address, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    for name, types in (
        ("fill", [address, size, size, number]),
        ("capped_fill", [address, address, size, size, number, number]),
        ("systematic", [address, address, size, size, size, address, address]),
    ):
        if library is not None:
            function = getattr(library, f"sketchprop_{name}")
            function.argtypes, function.restype = types, None
    return library


_C: Any = _load()
"""What was built of ``draw.c``, or ``None``."""


def applies(*tensors: Tensor) -> bool:
    """Whether the kernels can be called for these: numbers in the memory of the CPU."""
    if _C is None or torch.compiler.is_compiling():
        return False
    real = all(type(t) is Tensor and t.device.type == "cpu" for t in tensors)
    return real and not torch._C._are_functorch_transforms_active()


def _fill(roots: Tensor, rank: float) -> Tensor:
    p, n = _wide_copy(roots), roots.shape[-1]
    _C.sketchprop_fill(p.data_ptr(), p.numel() // n, n, rank)
    return p


def _capped_fill(roots: Tensor, rank: float, most: float) -> Tensor:
    p, (N, T) = _wide_copy(roots), roots.shape
    room = p.new_empty(N * (T + 1))
    _C.sketchprop_capped_fill(p.data_ptr(), room.data_ptr(), N, T, rank, most)
    return p


def _systematic(p: Tensor, u: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    p, u, n = p.contiguous(), u.contiguous(), p.shape[-1]
    index = torch.empty(*p.shape[:-1], rank, dtype=torch.int64)
    scale = torch.empty(index.shape, dtype=torch.float64)
    sizes = (p.numel() // n, n, rank)
    _C.sketchprop_systematic(p.data_ptr(), u.data_ptr(), *sizes, index.data_ptr(), scale.data_ptr())
    return index, scale


def _wide_copy(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float64).copy_(x)


for _schema, _kernel in (
    ("fill(Tensor roots, float rank) -> Tensor", _fill),
    ("capped_fill(Tensor roots, float rank, float most) -> Tensor", _capped_fill),
    ("systematic(Tensor p, Tensor u, int rank) -> (Tensor, Tensor)", _systematic),
):
    _OPERATIONS.define(_schema)
    _OPERATIONS.impl(_schema.partition("(")[0], _kernel, "CPU")

fill: Callable[[Tensor, float], Tensor] = torch.ops.sketchprop.fill.default
capped_fill: Callable[[Tensor, float, float], Tensor] = torch.ops.sketchprop.capped_fill.default
systematic: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
systematic = torch.ops.sketchprop.systematic.default
