"""Importance weights wᵢ of the atoms of G, and the guard that keeps every sketch unbiased.

The law: **a weight is zero only where its atom of G is zero**, because p = 0 follows from w = 0
and the same Ĝ makes dX, dW and db. Three of the paper's formulas break it: they look at G·W, or
at the spread of a column, and miss what those cannot see. Here each of them gets a small share
(``FLOOR``) of what it cannot see: pretend that each output also matters by itself, that is
replace WWᵀ by WWᵀ + αI, and Var(gᵢ) by Var(gᵢ) + FLOOR·mean(gᵢ²).

``G: [..., B, n]``, ``W: [..., n, d]``; weights come out as ``[..., n]``, in float32 or better.
They are exact for entries of G between about 1e-18 and 1e18 in float32 (they are squares).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._checks import solve_dtype

FLOOR = 0.05
"""The share of the unseen in the guarded weights.

Bounds what the guard costs: the second moment of dX is at most (1 + FLOOR·mean‖W_i‖²/‖W_i‖²)
times that of the literal formula, atom by atom.
"""

_CHUNK_BYTES = 1 << 20
_CHUNKED_FROM_BYTES = 1 << 22


def uniform(G: Tensor) -> Tensor:
    """wᵢ = 1 for each column, NaN where the column is not finite: O(Bn)."""
    return 1 + 0 * column_sums(G)


def uniform_rows(G: Tensor) -> Tensor:
    """w_b = 1 for each row, NaN where the row is not finite: O(Bn)."""
    return 1 + 0 * G.sum(-1, dtype=solve_dtype(G))


def l1(G: Tensor) -> Tensor:
    """wᵢ = ‖gᵢ‖₁²: O(Bn)."""
    return _reduce_rows(G, torch.abs).square()


def l2(G: Tensor) -> Tensor:
    """wᵢ = ‖gᵢ‖₂²: O(Bn)."""
    return _reduce_rows(G, torch.square)


def variance(G: Tensor, floor: float = FLOOR) -> Tensor:
    """wᵢ = (Var(gᵢ) + floor·mean(gᵢ²))²: O(Bn). ``floor=0`` is the paper's, biased."""
    B = G.shape[-2]
    if not floor:
        return G.to(solve_dtype(G)).var(-2, correction=0).square()
    second = l2(G) / B
    mean = column_sums(G) / B
    return ((second - mean.square()).clamp(min=0) + floor * second).square()


def diagonal(G: Tensor, W: Tensor, floor: float = FLOOR) -> Tensor:
    """wᵢ = ‖gᵢ‖₂²(‖Wᵢ‖₂² + α): O(Bn + nd). ``floor=0`` is the paper's Lemma 3.4, biased."""
    norms = W.to(solve_dtype(W)).square().sum(-1)
    return l2(G) * (norms + unseen(norms, floor) if floor else norms)


def unseen(norms: Tensor, floor: float = FLOOR) -> Tensor:
    """α = floor · mean ‖Wᵢ‖², or 1 where W is zero: ``[..., n]`` to ``[..., 1]``."""
    alpha = floor * norms.mean(-1, keepdim=True)
    return torch.where(alpha == 0, 1.0, alpha)


def column_sums(G: Tensor) -> Tensor:
    """1ᵀG, accumulated in float32 or better: the bias gradient."""
    return G.sum(-2, dtype=solve_dtype(G))


def _reduce_rows(G: Tensor, f: Callable[..., Tensor]) -> Tensor:
    """Σ_b f(g_b) in float32 or better, without a temporary of the size of a large G.

    Fresh pages are slower than arithmetic: through one buffer that stays in the cache this runs
    at the speed of reading G, several times faster than ``f(G).sum(0)``.
    """
    dtype = solve_dtype(G)
    row_bytes = G.shape[-1] * dtype.itemsize
    rows = max(1, _CHUNK_BYTES // max(1, row_bytes))
    if torch.compiler.is_compiling() or G.dim() > 2 or G.shape[0] * row_bytes < _CHUNKED_FROM_BYTES:
        return f(G.to(dtype)).sum(-2)
    total = torch.zeros(G.shape[-1], dtype=dtype, device=G.device)
    buffer = torch.empty(rows, G.shape[-1], dtype=dtype, device=G.device)
    for chunk in torch.split(G, rows):
        part = buffer[: chunk.shape[0]]
        source = chunk if chunk.dtype == dtype else part.copy_(chunk)
        total += f(source, out=part).sum(0)
    return total
