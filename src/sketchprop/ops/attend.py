"""Scaled dot-product attention with a backward for some of its queries.

With S = QKᵀ/√d + mask, P = softmax(S), O = PV the gradients of the queries in a set are

    dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O)),   dQ = dS K/√d,   dK = dSᵀ Q/√d,   dV = Pᵀ dO

and rows of dO that are zero are rows of zeros in all of them: only the kept rows of Q, O, dO, of
the log-sum-exp and of the mask are looked at, and all keys and values. Three ways to compute it:
torch's flash kernel for CPUs, whose backward takes such rows and needs no second forward pass;
elsewhere ``F.scaled_dot_product_attention`` once more for the kept queries; and the formulas above
where neither can be (dropout, whose mask must be the same; compiled for other devices).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten


class Attending(NamedTuple):
    """How to attend: what ``F.scaled_dot_product_attention`` takes beside its tensors."""

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None

    def engine(self, q: Tensor, v: Tensor) -> str:
        if self.dropout_p > 0:
            return "formulas"
        if q.device.type == "cpu":
            return "flash" if q.shape[-1] == v.shape[-1] and v.shape[-2] > 0 else "formulas"
        return "formulas" if torch.compiler.is_compiling() else "again"


class Attended(NamedTuple):
    """The result, and what backward wants of it: log-sum-exp (flash), mask of dropout."""

    out: Tensor
    logsumexp: Tensor | None = None
    dropped: Tensor | None = None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    how: Attending,
    dropped: Tensor | None = None,
) -> Attended:
    """Attention of ``q: [N, H, T, ·]`` to ``k, v: [N, H or fewer, S, ·]``.

    ``dropped``: the mask of an earlier dropout, to be used again.
    """
    engine = how.engine(q, v)
    k, v = _as_many_heads(q, k), _as_many_heads(q, v)
    mask = _with_four_axes(mask)
    if engine == "flash":
        q, k, v = _for_flash(q), _for_flash(k), _for_flash(v)
        out, logsumexp = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, how.is_causal, attn_mask=_mask_for_flash(mask, q), scale=how.scale
        )
        return Attended(out, logsumexp)
    if engine == "again":
        return Attended(
            F.scaled_dot_product_attention(q, k, v, mask, 0.0, how.is_causal, scale=how.scale)
        )
    P = _weights(q, k, added(causal(q, k) if how.is_causal else mask, q.dtype), how)
    if how.dropout_p == 0:
        return Attended(P @ v)
    if dropped is None:
        kept, dropped = torch.native_dropout(P, how.dropout_p, True)
    else:
        kept = P * dropped * _rescale(how)
    return Attended(kept @ v, None, dropped)


def attend_back(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attended: Attended,
    mask: Tensor | None,
    how: Attending,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV from the kept rows of g, q, of what was attended and of the mask.

    ``mask`` includes causality: rows that are picked out have no diagonal of their own.
    """
    heads = k.shape[1]
    wide_k, wide_v = _as_many_heads(q, k), _as_many_heads(q, v)
    engine = how.engine(q, v)
    if engine == "flash":
        dense = [_for_flash(t) for t in (g, q, wide_k, wide_v)]
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *dense, attended.out, attended.logsumexp, 0.0, False,
            attn_mask=_mask_for_flash(mask, q), scale=how.scale,
        )  # fmt: skip
    elif engine == "again":
        with torch.enable_grad():
            q, wide_k, wide_v = (t.detach().requires_grad_() for t in (q, wide_k, wide_v))
            out = F.scaled_dot_product_attention(q, wide_k, wide_v, mask, scale=how.scale)
            dq, dk, dv = torch.autograd.grad(out, (q, wide_k, wide_v), g)
    else:
        dq, dk, dv = _formulas(g, q, wide_k, wide_v, attended.dropped, mask, how)
    return dq, _as_few_heads(dk, heads), _as_few_heads(dv, heads)


def _for_flash(x: Tensor) -> Tensor:
    """The kernel reads numbers that lie side by side, and does not ask whether they do."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _mask_for_flash(mask: Tensor | None, q: Tensor) -> Tensor | None:
    mask = added(mask, q.dtype)
    return None if mask is None else _for_flash(mask)


def _formulas(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropped: Tensor | None,
    mask: Tensor | None,
    how: Attending,
) -> tuple[Tensor, Tensor, Tensor]:
    P = _weights(q, k, added(mask, q.dtype), how)
    dP = g @ v.mT
    kept = P
    if dropped is not None:
        factor = dropped.to(dP.dtype) * _rescale(how)
        kept, dP = P * factor, dP * factor
    dS = P * (dP - (dP * P).sum(-1, keepdim=True)) * _scale(q, how)
    return dS @ k, dS.mT @ q, kept.mT @ g


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, how: Attending) -> Tensor:
    S = (q * _scale(q, how)) @ k.mT
    if mask is None:
        return S.softmax(-1)
    # A query that may look at nothing has weights of zero, as in torch.
    nothing = (mask == -math.inf).all(-1, keepdim=True)
    return (S + mask).softmax(-1).masked_fill(nothing, 0.0)


def _scale(q: Tensor, how: Attending) -> float:
    return 1 / math.sqrt(q.shape[-1]) if how.scale is None else how.scale


def _rescale(how: Attending) -> float:
    return 0.0 if how.dropout_p == 1 else 1 / (1 - how.dropout_p)


def added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask to be added: True of a boolean one becomes 0, False -∞."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        return mask if mask.dtype == dtype else mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def causal(q: Tensor, k: Tensor) -> Tensor:
    """Which keys a query may look at: those at its place and before it."""
    queries = torch.arange(q.shape[-2], device=q.device)
    return queries.unsqueeze(-1) >= torch.arange(k.shape[-2], device=q.device)


def mask_rows(mask: Tensor | None, token: Tensor, keys: int, how: Attending) -> Tensor | None:
    """The rows of the mask that the kept queries ``token: [N, c]`` look at: ``[N, ·, c, keys]``."""
    if how.is_causal:
        return (token.unsqueeze(-1) >= torch.arange(keys, device=token.device)).unsqueeze(1)
    if mask is None:
        return None
    N, c = token.shape
    mask = _with_four_axes(mask)
    assert mask is not None
    if mask.shape[-2] == 1:
        return mask.expand(-1, -1, c, -1)
    place = token[:, None, :, None].expand(N, mask.shape[1], c, mask.shape[-1])
    return mask.expand(N, -1, -1, -1).gather(2, place)


def _with_four_axes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask[(None,) * (4 - mask.dim())]


def check_mask(mask: Tensor | None, shape: tuple[int, ...], how: Attending) -> None:
    """A mask that fits, or an error that says which would."""
    if mask is None:
        return
    if how.is_causal:
        raise ValueError(
            "attn_mask and is_causal=True exclude each other; put causality into the mask: "
            "attn_mask & torch.ones(T, T, dtype=torch.bool).tril()"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"attn_mask is {mask.dtype}; give a bool mask or one of floats to add")
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if mask.dim() > 4 or any(m not in (1, s) for m, s in zip(sizes, shape, strict=True)):
        raise ValueError(
            f"attn_mask of shape {tuple(mask.shape)} does not broadcast to {shape}: samples, "
            "heads, queries, keys. For a padding mask [N, S] type attn_mask[:, None, None, :]"
        )


def _as_many_heads(q: Tensor, k: Tensor) -> Tensor:
    """Keys or values of grouped-query heads, repeated for each head of the group."""
    groups = q.shape[1] // max(1, k.shape[1])
    return k if groups == 1 else k.repeat_interleave(groups, 1)


def _as_few_heads(dk: Tensor, heads: int) -> Tensor:
    return dk if dk.shape[1] == heads else dk.view(dk.shape[0], heads, -1, *dk.shape[2:]).sum(2)
