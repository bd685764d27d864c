"""``nn.MultiheadAttention``, taken whole: it never calls its ``out_proj``."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.samples import Samples
from ..ops import sketched_linear
from .sketched import SketchedModule

Projection = tuple[Tensor, Tensor, Tensor | None]
"""An input with the weight and the bias of the linear map that it goes through."""


class SketchedMultiheadAttention(SketchedModule, nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with sketched projections in training mode.

    The input and output projections have a sketched backward; attention itself is exact. In
    self-attention q, k and v come from one product, with one draw over all of their columns.
    """

    plain = nn.MultiheadAttention

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched = query.dim() == 3
        inputs = (query, key, value)
        if not (_fits(*inputs) and self._drops(*inputs) and self.is_sketching()):
            rest: Any = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return super().forward(*inputs, *rest)
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "is_causal=True is a hint about attn_mask, and none was given; pass attn_mask="
                "nn.Transformer.generate_square_subsequent_mask(length)"
            )
        is_causal = is_causal and key_padding_mask is None and not need_weights
        q, k, v = (self._heads(x, batched) for x in self._project(*inputs))
        mask = None if is_causal else attn_mask
        k, v, bias = self._keys_and_mask(q, k, v, mask, key_padding_mask, query.dtype)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            logits = (q * math.sqrt(1 / q.shape[-1])) @ k.mT
            weights = (logits if bias is None else logits + bias).softmax(-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            out = weights @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, bias, dropout, is_causal)
        # Sequence first in memory, as the parent returns it: a dropout behind this layer draws
        # its mask in memory order, and must draw the same one under `exact`.
        out = out.permute(2, 0, 1, 3).flatten(2)
        out = self._linear(out, self.out_proj.weight, self.out_proj.bias, part=0, axis=1)
        if not batched:
            out = out.squeeze(1)
        elif self.batch_first:
            out = out.transpose(0, 1)
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        return out, weights

    def _projections(self, query: Tensor, key: Tensor, value: Tensor) -> list[Projection]:
        """One for q, k and v together if they have one input, or one for k and v, or three."""
        E = self.embed_dim
        W, b = self.in_proj_weight, self.in_proj_bias
        biases: tuple[Tensor | None, ...] = (None,) * 3 if b is None else b.chunk(3)
        if W is None:
            parts = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            return list(zip((query, key, value), parts, biases, strict=True))
        if query is key and key is value:
            return [(query, W, b)]
        if key is value:
            return [(query, W[:E], biases[0]), (key, W[E:], None if b is None else b[E:])]
        return list(zip((query, key, value), W.chunk(3), biases, strict=True))

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        # Without a batch all rows are tokens of one sample.
        axis = None if query.dim() == 2 else 0 if self.batch_first else 1
        outputs = [
            self._linear(*projection, part, axis)
            for part, projection in enumerate(self._projections(query, key, value), 1)
        ]
        return [part for out in outputs for part in torch.split(out, self.embed_dim, -1)]

    def _linear(
        self, x: Tensor, W: Tensor, b: Tensor | None, part: int, axis: int | None
    ) -> Tensor:
        planner, samples = self.sketching.planner_of(part), Samples.of(tuple(x.shape[:-1]), axis)
        return sketched_linear(x, W, b, self.sketch, planner=planner, samples=samples)

    def _drops(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether any of the products is smaller; if none is, the parent's forward will do."""
        shapes = [(x, W.shape) for x, W, _ in self._projections(query, key, value)]
        shapes.append((query, self.out_proj.weight.shape))
        return not all(
            self.sketch.keeps_all(x.numel() // max(1, x.shape[-1]), n, d) for x, (n, d) in shapes
        )

    def _heads(self, x: Tensor, batched: bool) -> Tensor:
        """``[L, N, E]`` or ``[N, L, E]`` or ``[L, E]`` as a view ``[N, heads, L, E/heads]``."""
        if not batched:
            x = x.unsqueeze(0 if self.batch_first else 1)
        x = x.view(*x.shape[:-1], self.num_heads, self.head_dim)
        return x.permute(0, 2, 1, 3) if self.batch_first else x.permute(1, 2, 0, 3)

    def _keys_and_mask(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values with the extra ones asked for, and both masks as one to be added."""
        N, H, L, hd = q.shape
        mask = one_mask(attn_mask, key_padding_mask, (N, H, L, k.shape[2]), dtype)
        extra = []
        if self.bias_k is not None and self.bias_v is not None:
            extra.append((self.bias_k.view(1, H, 1, hd), self.bias_v.view(1, H, 1, hd)))
        if self.add_zero_attn:
            extra.append((k.new_zeros(1, H, 1, hd), v.new_zeros(1, H, 1, hd)))
        for more_k, more_v in extra:
            k = torch.cat([k, more_k.to(k.dtype).expand(N, -1, -1, -1)], 2)
            v = torch.cat([v, more_v.to(v.dtype).expand(N, -1, -1, -1)], 2)
        if mask is not None and extra:
            mask = F.pad(mask, (0, len(extra)))
        return k, v, mask

    @classmethod
    def matrices(cls, layer: nn.Module) -> tuple[tuple[int, int], ...]:
        assert isinstance(layer, nn.MultiheadAttention)
        E = layer.embed_dim
        if layer.in_proj_weight is not None:
            return (3 * E, E), (E, E)
        return (E, E), (E, layer.kdim), (E, layer.vdim), (E, E)


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Shapes that the parent takes; of others it says what is wrong."""
    dims = {x.dim() for x in (query, key, value)}
    nested = query.is_nested or key.is_nested or value.is_nested
    return dims in ({2}, {3}) and not nested and key.shape[:-1] == value.shape[:-1]


def one_mask(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> Tensor | None:
    """Both masks as one to be added that broadcasts to ``shape``: samples, heads, queries, keys."""
    N, H, L, S = shape
    mask = _additive(attn_mask, "attn_mask", dtype)
    if mask is not None:
        allowed = [(L, S), (N * H, L, S)]
        if tuple(mask.shape) not in allowed:
            raise RuntimeError(
                f"attn_mask has shape {tuple(mask.shape)}; it must be {allowed[0]} or {allowed[1]}"
            )
        mask = mask.view(-1, H if mask.dim() == 3 else 1, L, S)
    padding = _additive(key_padding_mask, "key_padding_mask", dtype)
    if padding is not None:
        padding = padding.view(N, 1, 1, S)
        mask = padding if mask is None else mask + padding
    return mask


def _additive(mask: Tensor | None, name: str, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} is {mask.dtype}; give a bool mask or one of floats to add")
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
