"""Optimal inclusion probabilities for a budget: weights in, p* out.

Solves the convex program of the paper (eq. convex_program)

    min Σ wᵢ/pᵢ   subject to   Σ pᵢ = r,  0 < pᵢ ≤ 1

whose solution is water-filling: pᵢ = min(1, √wᵢ/√λ).

Draws in C: at small batches a draw's thirty operations cost more to call than to compute, so that
water-filling and systematic sampling are operations of torch too, with a kernel for the CPU. It is
plain C (``draw.c``), built with the wheel where there is a compiler; without it, on other devices
and in traces the torch code runs, which is also what tests compare it with.
Registered with torch, so that profilers and traces see the calls.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checks import check_rank


def solve_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which weights, probabilities and draws are computed: float32 or better."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def wide_dtype(x: Tensor) -> torch.dtype:
    """float64 where the device has it: for probabilities and their cumulative sums."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def optimal_probabilities(weights: Tensor, rank: float) -> Tensor:
    """p* = argmin Σ wᵢ/pᵢ over Σ pᵢ = rank, pᵢ ≤ 1, for weights ``[..., n]``.

    ``pᵢ = min(1, √wᵢ/√λ)``. A zero weight gets p = 0, unless fewer than ``rank`` weights are
    positive: then those have p = 1 and the others share what is left, so Σ p = rank always.
    Solved in float32 or better whatever the dtype of ``weights``; a NaN weight makes all
    probabilities NaN, an infinite one is kept (``rank`` of them or more: NaN).
    O(n log n), no loop over coordinates, no host synchronisation. ``rank`` may be fractional
    (the expected size of an independent draw). A negative weight is an error on the CPU; on
    other devices, where looking would mean waiting, it gives NaN.

    >>> optimal_probabilities(torch.tensor([16.0, 1.0, 1.0]), 2)
    tensor([1.0000, 0.5000, 0.5000])
    """
    check_rank(rank)
    on_host = weights.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_host and bool((weights < 0).any()):
        raise ValueError(
            f"weights must not be negative, and the smallest is {float(weights.min()):g}; "
            "give for example squared norms: G.square().sum(-2)"
        )
    root = weights.to(wide_dtype(weights)).sqrt()
    return water_fill(root, rank).to(solve_dtype(weights))


def water_fill(roots: Tensor, rank: float) -> Tensor:
    """p* from the roots √wᵢ of the weights, unchecked, in float64, as sampling wants it."""
    n = roots.shape[-1]
    if rank < n and in_c(roots):
        return fill_in_c(roots, rank)
    root = roots.to(wide_dtype(roots))
    if rank >= n:
        return torch.ones_like(root) + 0 * root  # 0·w: a non-finite weight stays visible
    # Zero roots become the smallest normal number: invisible beside any other, and where fewer
    # than ``rank`` are positive they share the rest of the budget equally, without 0/0.
    root = root.clamp(min=torch.finfo(root.dtype).tiny)
    # With the k largest clipped at 1 the level is √λ = S_k/(r - k), S_k the sum of the others.
    # It falls while the next root lies above it and rises ever after: √λ is the minimum over k.
    # The sums add from the smallest up: a difference of two totals would cancel.
    sums = root.sort(dim=-1).values.cumsum(-1)
    candidates = math.ceil(rank)
    first = 1 + rank - candidates  # r - k for the largest k; 1 unless the rank is fractional
    room = torch.arange(first, first + candidates, dtype=root.dtype, device=root.device)
    level = (sums[..., n - candidates :] / room[:candidates]).amin(-1, keepdim=True)
    return _filled(root, level)


def capped_fill(roots: Tensor, rank: int, capacity: int) -> Tensor:
    """p with Σ p = rank, at most ``capacity`` in the sum of a sample, for ``roots[N, T]``.

    Systematic sampling then keeps at most ``capacity`` rows of each sample. Where no sample asks
    for more this is the water-filling of the whole batch; else what they may not have goes to the
    others in proportion.
    """
    # Just below the capacity: rounding in the sums of p must not add one more.
    most = capacity - 1e-9
    if in_c(roots):
        return capped_fill_in_c(roots, rank, most)
    share = water_fill(roots.flatten(), rank).view_as(roots).sum(-1)
    share = most * water_fill(share, rank / most)
    T = roots.shape[-1]
    wide = roots.to(share.dtype).clamp_(min=torch.finfo(share.dtype).tiny)
    sums = wide.sort(dim=-1).values.cumsum(-1)
    # As in ``water_fill``: with the k largest at 1 the level is S_k/(r - k), the least one counts.
    # Where nothing is left, r - k ≤ 0, it is infinite; a share that is NaN stays visible.
    room = torch.arange(1 - T, 1, dtype=sums.dtype, device=sums.device) + share.unsqueeze(-1)
    level = (sums / room.clamp_(min=0)).amin(-1, keepdim=True)
    return _filled(wide, level)


def _filled(root: Tensor, level: Tensor) -> Tensor:
    """min(1, √w/√λ), the stand-ins of zeros back to zero; NaN stays."""
    tiny = torch.finfo(root.dtype).tiny
    return torch.threshold_((root / level).clamp_(max=1.0), tiny**0.75, 0.0)


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


def in_c(*tensors: Tensor) -> bool:
    """Whether the kernels can be called for these: numbers in the memory of the CPU, now or when a
    compiled graph runs."""
    if _C is None or any(t.device.type != "cpu" for t in tensors):
        return False
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    real = all(type(t) is Tensor for t in tensors)
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


def _empty_p(roots: Tensor, *sizes: float) -> Tensor:
    return roots.new_empty(roots.shape, dtype=torch.float64)


def _empty_draw(p: Tensor, u: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    shape = (*p.shape[:-1], rank)
    return p.new_empty(shape, dtype=torch.int64), p.new_empty(shape)


for _schema, _kernel, _shaped in (
    ("fill(Tensor roots, float rank) -> Tensor", _fill, _empty_p),
    ("capped_fill(Tensor roots, float rank, float most) -> Tensor", _capped_fill, _empty_p),
    ("systematic(Tensor p, Tensor u, int rank) -> (Tensor, Tensor)", _systematic, _empty_draw),
):
    _OPERATIONS.define(_schema)
    _OPERATIONS.impl(_schema.partition("(")[0], _kernel, "CPU")
    _OPERATIONS.impl(_schema.partition("(")[0], _shaped, "Meta")

fill_in_c: Callable[[Tensor, float], Tensor] = torch.ops.sketchprop.fill.default
capped_fill_in_c: Callable[[Tensor, float, float], Tensor] = (
    torch.ops.sketchprop.capped_fill.default
)
systematic_in_c: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
systematic_in_c = torch.ops.sketchprop.systematic.default
