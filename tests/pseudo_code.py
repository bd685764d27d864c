"""The paper's pseudo-code, literally: loops, full-size masks, and its own mistakes noted.

The library is tested against it. ``G: [B, n]``, ``X: [B, d]``, ``W: [n, d]``, float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def p_star_from_weights(w: Tensor, r: float) -> Tensor:
    """Algorithm 1. Needs at least r positive weights: with fewer it divides 0 by 0."""
    n = len(w)
    t = [math.sqrt(float(x)) for x in w]
    order = sorted(range(n), key=lambda i: -t[i])
    level = None
    for k in range(n):
        remainder = r - k
        if remainder <= 0:
            break
        root_lambda = sum(t[i] for i in order[k:]) / remainder
        last_is_clipped = k == 0 or t[order[k - 1]] >= root_lambda
        if last_is_clipped and t[order[k]] <= root_lambda:
            level = root_lambda
            break
    if level is None:  # r ≥ n: every coordinate is kept
        return torch.ones(n, dtype=torch.float64)
    return torch.tensor([min(1.0, x / level) for x in t], dtype=torch.float64)


def correlated_exact_r_sample(p: Tensor, r: int, u: float) -> list[int]:
    """Algorithm 2. The paper draws u from (0, 1] and takes the smallest j with P_j ≥ t.

    Here u is in [0, 1) and the smallest j with P_j > t is taken: the same law. The paper's
    ``P_n = r`` is left out: it may select a last index with p = 0.
    """
    chosen = []
    for step in range(r):
        t = u + step
        total = 0.0
        for j in range(len(p)):
            total += float(p[j])
            if total > t:
                chosen.append(j)
                break
    return chosen


def per_element_backward(
    G: Tensor, X: Tensor, W: Tensor, p: float, keep_weight: Tensor, keep_input: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 3: masks on W and on X; the bias gradient is exact."""
    dX = G @ (W * keep_weight) / p
    dW = G.T @ (X * keep_input) / p
    return dX, dW, G.sum(0)


def masked_backward(G_hat: Tensor, X: Tensor, W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The last lines of Algorithms 4, 5 and 6: dX, dW and db from a masked, full-size Ĝ."""
    return G_hat @ W, G_hat.T @ X, G_hat.sum(0)


def per_sample_mask(G: Tensor, p: float, kept: Tensor) -> Tensor:
    """Algorithm 4: Ĝ with a Bernoulli(p) gate for each row."""
    G_hat = torch.zeros_like(G)
    for b in range(G.shape[0]):
        if kept[b]:
            G_hat[b] = G[b] / p
    return G_hat


def per_column_mask(G: Tensor, p: float, kept: Tensor) -> Tensor:
    """Algorithm 5: Ĝ with a Bernoulli(p) gate for each column."""
    G_hat = torch.zeros_like(G)
    for j in range(G.shape[1]):
        if kept[j]:
            G_hat[:, j] = G[:, j] / p
    return G_hat


def coordinate_weights(G: Tensor, W: Tensor, proxy: str) -> Tensor:
    """The weights of Section 4.2, column by column: 'l1', 'l2', 'var' (squared) or 'diagonal'."""
    B, n = G.shape
    s = torch.zeros(n, dtype=torch.float64)
    for j in range(n):
        column = [float(g) for g in G[:, j]]
        if proxy == "l1":
            s[j] = sum(abs(g) for g in column) ** 2
        elif proxy == "l2":
            s[j] = sum(g * g for g in column)
        elif proxy == "var":
            mean = sum(column) / B
            s[j] = (sum((g - mean) ** 2 for g in column) / B) ** 2
        elif proxy == "diagonal":
            gamma = sum(g * g for g in column) / B  # Γ_jj
            s[j] = gamma * sum(float(x) ** 2 for x in W[j])  # (JᵀJ)_jj with J = Wᵀ
        else:
            raise ValueError(f"proxy={proxy!r}; use 'l1', 'l2', 'var' or 'diagonal'")
    return s


def coordinate_sketch(G: Tensor, s: Tensor, r: int, u: float) -> Tensor:
    """Algorithm 6 up to Ĝ: exactly r columns, each divided by its probability."""
    p = p_star_from_weights(s, r)
    G_hat = torch.zeros_like(G)
    for j in correlated_exact_r_sample(p, r, u):
        G_hat[:, j] = G[:, j] / p[j]
    return G_hat


def svd_sketch(M: Tensor, r: int, u: float, *, root: bool = False) -> Tensor:
    """Lemma 3.1: S = Σ σᵢ (Zᵢ/pᵢ) uᵢvᵢᵀ. With M = G this is G-SV (``root``: its √ form)."""
    left, sigma, right = torch.linalg.svd(M, full_matrices=False)
    p = p_star_from_weights(sigma if root else sigma**2, r)
    S = torch.zeros_like(M)
    for i in correlated_exact_r_sample(p, r, u):
        S += sigma[i] / p[i] * torch.outer(left[:, i], right[i])
    return S


def rank_constrained_sketch(G: Tensor, W: Tensor, r: int, u: float) -> Tensor:
    """Proposition 3.3: Ĝᵀ = R* Gᵀ with R* = Γ^{1/2} U B Uᵀ Γ^{-1/2}, Γ = GᵀG/B.

    Γ^{-1/2} is a pseudo-inverse here: Γ is singular at a softmax output, behind a dead ReLU and
    whenever B < n. Biased for dW where W has fewer independent rows than Γ has directions.
    """
    B = G.shape[0]
    values, V = torch.linalg.eigh(G.T @ G / B)
    cutoff = values.max() * len(values) * torch.finfo(G.dtype).eps
    roots = values.clamp(min=0).sqrt()
    inverse = torch.where(values > cutoff, 1 / roots, torch.zeros_like(roots))
    half = V @ torch.diag(roots) @ V.T
    half_inverse = V @ torch.diag(inverse) @ V.T
    sigma2, U = torch.linalg.eigh(half @ (W @ W.T) @ half)  # JᵀJ = WWᵀ for J = Wᵀ
    sigma2, U = sigma2.flip(0).clamp(min=0), U.flip(1)
    p = p_star_from_weights(sigma2, r)
    D = torch.zeros(len(p), dtype=G.dtype)
    for i in correlated_exact_r_sample(p, r, u):
        D[i] = 1 / p[i]
    R = half @ U @ torch.diag(D) @ U.T @ half_inverse
    G_hat: Tensor = G @ R.T
    return G_hat


def lower_bound(sigma: Tensor, r: int) -> float:
    """Equation lower_bound: the least E‖S‖² of any unbiased S of rank r, σ descending."""
    s = [float(x) for x in sigma]
    q = len(s)
    for i0 in range(r):
        mean = sum(s[i0:]) / (r - i0)
        if (i0 == 0 or s[i0 - 1] > mean) and (i0 == q or mean >= s[i0]):
            return sum(x * x for x in s[:i0]) + (r - i0) * mean**2
    raise ValueError(f"no level for r={r} and {q} singular values; r must be below their number")
