"""A convolution's gradient ``G: [B, n, L]``, folded over its positions for scoring.

The rows of a convolution are (batch, position) and its columns are channels, but in memory a
channel's positions lie together. A fold is a smaller matrix ``[B, n]`` whose columns have the
same weight as those of ``[B·L, n]``, so that no transposed copy of G is made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .probabilities import solve_dtype

_CHUNK_BYTES = 1 << 20


def absolute_sums(G: Tensor) -> Tensor:
    """Σ_l |G_bil| in float32 or better: keeps ‖gᵢ‖₁. O(BnL), through one small buffer."""
    dtype = solve_dtype(G)
    images = max(1, _CHUNK_BYTES // max(1, G[:1].numel() * dtype.itemsize))
    if torch.compiler.is_compiling() or G.shape[0] <= images:
        return G.abs().sum(-1, dtype=dtype)
    out = G.new_empty(G.shape[:2], dtype=dtype)
    buffer = torch.empty_like(G[:images], memory_format=torch.contiguous_format)
    for chunk, part in zip(torch.split(G, images), torch.split(out, images), strict=True):
        torch.sum(torch.abs(chunk, out=buffer[: chunk.shape[0]]), -1, dtype=dtype, out=part)
    return out


def norms(G: Tensor) -> Tensor:
    """(Σ_l G_bil²)^½ in float32 or better: keeps ‖gᵢ‖₂. O(BnL)."""
    norm: Tensor = torch.linalg.vector_norm(G, dim=-1, dtype=solve_dtype(G))
    return norm


def sums(G: Tensor) -> Tensor:
    """Σ_l G_bil in float32 or better: keeps the sum of a column. O(BnL)."""
    return G.sum(-1, dtype=solve_dtype(G))
