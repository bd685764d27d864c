"""The importance wᵢ of the atoms of G, and the guard that keeps every sketch unbiased.

The law: **it is zero only where its atom of G is zero**, because p = 0 follows from w = 0
and the same Ĝ makes dX, dW and db. Three of the paper's formulas break it: they look at G·W, or
at the spread of a column, and miss what those cannot see. Here each of them gets a small share
(``FLOOR``) of what it cannot see: pretend that each output also matters by itself, that is
replace WWᵀ by WWᵀ + αI with α = FLOOR·mean‖Wᵢ‖², and Var(gᵢ) by Var(gᵢ) + FLOOR·mean(gᵢ²).
(W = 0 makes everything unimportant, and then all probabilities are equal: unbiased too.)

``G: [..., B, n]``, ``W: [..., n, d]``; importance comes out as ``[..., n]``, in float32 or better.
They are exact for entries of G between about 1e-18 and 1e18 in float32 (they are squares).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .probabilities import solve_dtype

FLOOR = 0.05
"""The share of the unseen in the guarded importance.

Bounds what the guard costs: the second moment of dX is at most (1 + FLOOR·mean‖W_i‖²/‖W_i‖²)
times that of the literal formula, atom by atom.
"""

_CHUNK_BYTES = 1 << 20
_LARGE_BYTES = 1 << 23


def uniform(G: Tensor) -> Tensor:
    """wᵢ = 1 for each column, NaN where the column is not finite: O(Bn)."""
    return 1 + 0 * column_sums(G)


def uniform_rows(G: Tensor) -> Tensor:
    """w_b = 1 for each row, NaN where the row is not finite: O(Bn)."""
    return 1 + 0 * G.sum(-1, dtype=solve_dtype(G))


def l1(G: Tensor) -> Tensor:
    """wᵢ = ‖gᵢ‖₁²: O(Bn)."""
    return l1_norms(G).square()


def l1_norms(G: Tensor) -> Tensor:
    """√wᵢ = ‖gᵢ‖₁: O(Bn)."""
    return _reduce_rows(G, torch.abs)


def l2(G: Tensor) -> Tensor:
    """wᵢ = ‖gᵢ‖₂²: O(Bn)."""
    return _reduce_rows(G, torch.square)


def variance(G: Tensor, floor: float = FLOOR) -> Tensor:
    """√wᵢ = Var(gᵢ) + floor·mean(gᵢ²): O(Bn). ``floor=0`` is the paper's, biased."""
    if not floor:
        return G.to(solve_dtype(G)).var(-2, correction=0)
    second = l2(G) / G.shape[-2]
    mean = column_sums(G) / G.shape[-2]
    return (second - mean.square()).clamp(min=0) + floor * second


def diagonal(G: Tensor, W: Tensor, floor: float = FLOOR) -> Tensor:
    """wᵢ = ‖gᵢ‖₂²(‖Wᵢ‖₂² + α): O(Bn + nd). ``floor=0`` is the paper's Lemma 3.4, biased."""
    seen = row_energies(W)
    return l2(G) * torch.add(seen, seen.mean(-1, keepdim=True), alpha=floor)


def row_energies(W: Tensor) -> Tensor:
    """‖Wᵢ‖² for each row, without a temporary of the size of W."""
    norms: Tensor = torch.linalg.vector_norm(W, dim=-1, dtype=solve_dtype(W))
    return norms.square()


def column_sums(G: Tensor) -> Tensor:
    """1ᵀG, accumulated in float32 or better: the bias gradient.

    On a G that is read from memory a product with ones is faster than ``sum``.
    """
    dtype = solve_dtype(G)
    if _is_large(G) and G.dtype == dtype:
        sums: Tensor = G.new_ones(G.shape[0]) @ G
        return sums
    return G.sum(-2, dtype=dtype)


def _reduce_rows(G: Tensor, f: Callable[..., Tensor]) -> Tensor:
    """Σ_b f(g_b) in float32 or better, without a temporary of the size of a large G.

    Fresh pages are slower than arithmetic: through one buffer that stays in the cache this runs
    at the speed of reading G, several times faster than ``f(G).sum(0)``.
    """
    dtype = solve_dtype(G)
    if not _is_large(G):
        return f(G if G.dtype == dtype else G.to(dtype)).sum(-2)
    rows = max(1, _CHUNK_BYTES // (G.shape[1] * dtype.itemsize))
    total = torch.zeros(G.shape[1], dtype=dtype, device=G.device)
    buffer = torch.empty(rows, G.shape[1], dtype=dtype, device=G.device)
    ones = torch.ones(rows, dtype=dtype, device=G.device)
    for chunk in torch.split(G, rows):
        part = buffer[: chunk.shape[0]]
        source = chunk if chunk.dtype == dtype else part.copy_(chunk)
        total.addmv_(f(source, out=part).mT, ones[: chunk.shape[0]])
    return total


def _is_large(G: Tensor) -> bool:
    """Whether G is one matrix that does not stay in the caches of a CPU."""
    if G.dim() != 2 or G.numel() * solve_dtype(G).itemsize < _LARGE_BYTES:
        return False
    return G.device.type == "cpu" and not torch.compiler.is_compiling()
