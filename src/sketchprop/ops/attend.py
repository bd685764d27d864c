"""Scaled dot-product attention with a backward for some of its queries.

With S = QKᵀ/√d + mask, P = softmax(S), O = PV the gradients of the queries in a set are

    dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O)),   dQ = dS K/√d,   dK = dSᵀ Q/√d,   dV = Pᵀ dO

and rows of dO that are zero are rows of zeros in all of them: only the kept rows of Q, O, dO, of
the log-sum-exp and of the mask are looked at, and all keys and values. Ways to compute it: torch's
flash kernel for CPUs and its memory-efficient one for CUDA, whose backward takes such rows and
needs no second forward pass; elsewhere ``F.scaled_dot_product_attention`` once more for the kept
queries; and the formulas above where none can be (dropout, whose mask must be the same; compiled
for other devices).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
_BIAS, _LSE = 16, 32
"""What the memory-efficient kernel wants rows of a mask and of log-sum-exps to be multiples of."""
Heads = tuple[Tensor, Tensor, Tensor]
"""q, k and v, or their gradients: ``[N, heads, tokens, size]`` each."""
Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of the angles of each place."""


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
        if q.device.type == "cuda" and _is_efficient(q, v):
            return "efficient"
        return "formulas" if torch.compiler.is_compiling() else "again"

    def factor(self, q: Tensor) -> float:
        return 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale

    @property
    def rescale(self) -> float:
        """What dropout multiplies the weights by that it keeps."""
        return 0.0 if self.dropout_p == 1 else 1 / (1 - self.dropout_p)


class Attended(NamedTuple):
    """The result, and what backward wants of it: log-sum-exp of a kernel, mask of dropout.

    The memory-efficient kernel pads log-sum-exps to a multiple of 32 queries.
    """

    out: Any
    logsumexp: Tensor | None = None
    dropout: Tensor | None = None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    how: Attending,
    dropout: Tensor | None = None,
) -> Attended:
    """Attention of ``q: [N, H, T, ·]`` to ``k, v: [N, H or fewer, S, ·]``.

    ``dropout``: the mask of an earlier dropout, to be used again.
    """
    engine = how.engine(q, v)
    k, v = _as_many_heads(q, k), _as_many_heads(q, v)
    mask = None if mask is None else with_four_axes(mask)
    if engine == "flash":
        out, logsumexp = _aten._scaled_dot_product_flash_attention_for_cpu(
            *[_side_by_side(t) for t in (q, k, v)], 0.0, how.is_causal,
            attn_mask=_mask_for_flash(mask, q), scale=how.scale,
        )  # fmt: skip
        return Attended(out, logsumexp)
    if engine == "efficient":
        out, logsumexp, _, _ = _aten._scaled_dot_product_efficient_attention(
            *[_aligned(t) for t in (q, k, v)], _bias(mask, q, k), True,
            is_causal=how.is_causal, scale=how.scale,
        )  # fmt: skip
        return Attended(out, logsumexp)
    if engine == "again":
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, how.is_causal, scale=how.scale)
        return Attended(out)
    P = _weights(q, k, causal(q, k) if how.is_causal else mask, how)
    if how.dropout_p == 0:
        return Attended(P @ v)
    if dropout is None:
        P, dropout = torch.native_dropout(P, how.dropout_p, True)
    else:
        P = P * dropout * how.rescale
    return Attended(P @ v, None, dropout)


def attend_back(
    g: Tensor, heads: Heads, attended: Attended, mask: Tensor | None, how: Attending
) -> Heads:
    """dQ, dK, dV from the kept rows of g, q, of what was attended and of the mask.

    ``mask`` includes causality: rows that are picked out have no diagonal of their own.
    """
    q, k, v = heads
    wide_k, wide_v = _as_many_heads(q, k), _as_many_heads(q, v)
    engine = how.engine(q, v)
    if engine == "flash":
        added = _mask_for_flash(mask, q)
        if added is not None and mask is not None and mask.dtype != torch.bool:
            g = _for_masked_rows(g, attended.logsumexp, added)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *[_side_by_side(t) for t in (g, q, wide_k, wide_v)],
            attended.out, attended.logsumexp, 0.0, False, attn_mask=added, scale=how.scale,
        )  # fmt: skip
    elif engine == "efficient":
        dq, dk, dv = _efficient_back(g, (q, wide_k, wide_v), attended, mask, how)
    elif engine == "again":
        with torch.enable_grad():
            q, wide_k, wide_v = (t.detach().requires_grad_() for t in (q, wide_k, wide_v))
            out = F.scaled_dot_product_attention(q, wide_k, wide_v, mask, scale=how.scale)
            dq, dk, dv = torch.autograd.grad(out, (q, wide_k, wide_v), g)
    else:
        dq, dk, dv = _formulas(g, (q, wide_k, wide_v), attended.dropout, mask, how)
    return dq, _as_few_heads(dk, k.shape[1]), _as_few_heads(dv, k.shape[1])


def _is_efficient(q: Tensor, v: Tensor) -> bool:
    """Whether torch has its memory-efficient kernel for such tensors on NVIDIA's GPUs."""
    if torch.version.hip is not None or 0 in (*q.shape, *v.shape):
        return False
    if q.dtype == torch.bfloat16 and torch.cuda.get_device_properties(q.device).major < 8:
        return False
    whole = all(t.shape[-1] * t.element_size() % 16 == 0 for t in (q, v))
    return whole and q.dtype in (torch.float32, torch.float16, torch.bfloat16)


def _efficient_back(
    g: Tensor, heads: Heads, attended: Attended, mask: Tensor | None, how: Attending
) -> Heads:
    q, k, v = heads
    logsumexp: Any = attended.logsumexp
    if logsumexp.shape[-1] % _LSE:
        logsumexp = F.pad(logsumexp, (0, -logsumexp.shape[-1] % _LSE), value=math.inf)
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # of dropout: never read
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        *[_aligned(t) for t in (g, q, k, v)], _bias(mask, q, k), attended.out, logsumexp,
        seed, seed, 0.0, [True, True, True, False], scale=how.scale,
    )  # fmt: skip
    return dq, dk, dv


def _aligned(x: Tensor, step: int = 0) -> Tensor:
    """Rows that begin at a multiple of ``step`` numbers, of 16 bytes unless given."""
    step = step or 16 // x.element_size()
    # Not traced; torch.compile copies inputs that are not aligned.
    offset = 0 if torch.compiler.is_compiling() else x.storage_offset()
    fits = not any(n % step for n in (*x.stride()[:-1], offset))
    return x if fits and x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A mask to be added, for each head and query, as the memory-efficient kernel wants it."""
    if mask is None:
        return None
    keys = k.shape[-2]
    mask = additive(mask if mask.stride(-2) else mask[..., :1, :], q.dtype)
    if mask.shape[-1] != keys:
        mask = mask.expand(-1, -1, -1, keys)
    if keys % _BIAS:
        mask = F.pad(mask, (0, -keys % _BIAS))
    return _aligned(mask, _BIAS)[..., :keys].expand(*q.shape[:-1], -1)


def _for_masked_rows(g: Tensor, logsumexp: Any, added: Tensor) -> Tensor:
    """g for a kernel that computes P = exp(S - logsumexp), where that loses its sum.

    In a row that is masked whole with the smallest number instead of -∞ all of S is that number,
    and so is its log-sum-exp: log n is rounded away, and P would be 1 instead of 1/n for the n
    keys that have it. All gradients are linear in P and in g, so g takes the 1/n.
    """
    added = added if added.stride(-2) else added[..., :1, :]
    ties = (added == added.amax(-1, keepdim=True)).sum(-1)
    lost = logsumexp < torch.finfo(logsumexp.dtype).min / 4
    return g * torch.where(lost, 1 / ties, 1.0).to(g.dtype).unsqueeze(-1)


def _formulas(
    g: Tensor, heads: Heads, dropout: Tensor | None, mask: Tensor | None, how: Attending
) -> Heads:
    q, k, v = heads
    P = _weights(q, k, mask, how)
    dP = g @ v.mT
    dropped = P
    if dropout is not None:
        factor = dropout.to(dP.dtype) * how.rescale
        dropped, dP = P * factor, dP * factor
    dS = P * (dP - (dP * P).sum(-1, keepdim=True)) * how.factor(q)
    return dS @ k, dS.mT @ q, dropped.mT @ g


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, how: Attending) -> Tensor:
    S = (q * how.factor(q)) @ k.mT
    if mask is None:
        return S.softmax(-1)
    mask = additive(mask, q.dtype)
    # A query that may look at nothing has weights of zero, as in torch.
    nothing = (mask == -math.inf).all(-1, keepdim=True)
    return (S + mask).softmax(-1).masked_fill(nothing, 0.0)


def _side_by_side(x: Tensor) -> Tensor:
    """The kernel reads numbers that lie side by side, and does not ask whether they do."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _mask_for_flash(mask: Tensor | None, q: Tensor) -> Tensor | None:
    return None if mask is None else _side_by_side(additive(mask, q.dtype))


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to be added: True of a boolean one becomes 0, False -∞."""
    if mask.dtype != torch.bool:
        return mask if mask.dtype == dtype else mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def causal(q: Tensor, k: Tensor) -> Tensor:
    """Which keys a query may look at: those at its place and before it."""
    queries = torch.arange(q.shape[-2], device=q.device)
    return queries.unsqueeze(-1) >= torch.arange(k.shape[-2], device=q.device)


def with_four_axes(mask: Tensor) -> Tensor:
    return mask[(None,) * (4 - mask.dim())]


def check_heads(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> None:
    """Shapes that attention takes, or an error that says which."""
    if q.is_nested or k.is_nested or v.is_nested:
        raise TypeError(
            "nested tensors have no rows to draw; pad them, and give attn_mask for the padding"
        )
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"q, k, v have shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; give "
            "[samples, heads, tokens, head size], with heads of size 1 by q.unsqueeze(1)"
        )
    H, keys = q.shape[1], k.shape[1]
    fits = keys == v.shape[1] and (keys == H or (grouped and keys and H % keys == 0))
    if not fits:
        raise ValueError(
            f"{H} query heads do not fit {keys} key and {v.shape[1]} value heads; give equal "
            "numbers, or with enable_gqa=True a multiple of those of k and v"
        )


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


def rotated(q: Tensor, rotary: Rotary) -> Tensor:
    """Each pair of the two halves of ``q: [N, H, T, d]`` rotated: q cos + (-q₂, q₁) sin."""
    cos, sin = (t.unsqueeze(-3).to(q.dtype) for t in rotary)
    first, second = q.chunk(2, -1)
    return q * cos + torch.cat([-second, first], -1) * sin


def rotated_back(g: Tensor, rotary: Rotary) -> Tensor:
    """The vjp of ``rotated``: the other way round, with the halves of the sines exchanged."""
    cos, sin = rotary
    return rotated(g, (cos, -sin.roll(sin.shape[-1] // 2, -1)))
