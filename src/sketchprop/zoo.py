"""Small models to try sketches on: plain torch, one screen each. Not for production."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Anatomy, SelfAttention, SketchedBlock, sketchable


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU in between; by default the paper's 784-64-64-10.

    >>> [m.out_features for m in mlp(8, 16, 4) if isinstance(m, nn.Linear)]
    [16, 4]
    """
    widths = widths or (784, 64, 64, 10)
    layers: list[nn.Module] = []
    for i in range(len(widths) - 1):
        layers += [nn.Linear(widths[i], widths[i + 1]), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Attention(nn.Module):
    """Self-attention of several heads: one linear layer in, one out."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        # [B, T, 3·dim] -> three of [B, heads, T, dim/heads]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    """A transformer block, normalised first; dropout behind each part of the two branches."""

    def __init__(self, dim: int, heads: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        drop = [nn.Dropout(dropout)] if dropout else []
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), *drop, nn.Linear(hidden, dim))
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        y: Tensor = x + self.drop(self.mlp(self.norm2(x)))
        return y


@sketchable(Block)
class SketchedZooBlock(SketchedBlock, Block):
    """``Block`` with a backward on kept tokens: what a block of your own needs for ``Tokens``."""

    roles = (("attn.qkv", "packed"), ("attn.out", "queries"))

    def anatomy(self, x: Tensor) -> Anatomy | str:
        def plain(normed: Tensor) -> Tensor:
            y: Tensor = self.drop(self.attn(normed))
            return y

        attn = self.attn
        attention = SelfAttention((attn.qkv,), (attn.out, self.drop), attn.heads)
        norms, known = (self.norm1, self.norm2), ((attn, Attention),)
        return Anatomy(x, attention, plain, norms, (self.mlp, self.drop), True, stands_for=known)


class ViT(nn.Module):
    """A vision transformer: patches as tokens, their mean to a linear head."""

    def __init__(
        self,
        image: int = 32,
        patch: int = 4,
        channels: int = 3,
        dim: int = 96,
        depth: int = 4,
        heads: int = 4,
        hidden: int = 384,
        classes: int = 10,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.patch = patch
        tokens = (image // patch) ** 2
        self.embed = nn.Linear(channels * patch * patch, dim)
        self.position = nn.Parameter(torch.randn(tokens, dim) * 0.02)
        self.blocks = nn.Sequential(*(Block(dim, heads, hidden, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = F.unfold(images, self.patch, stride=self.patch).mT
        x = self.blocks(self.embed(patches) + self.position)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


class Bert(nn.Module):
    """An encoder over tokens that predicts a token at each position."""

    def __init__(
        self,
        vocabulary: int = 1000,
        length: int = 64,
        dim: int = 96,
        depth: int = 4,
        heads: int = 4,
        hidden: int = 384,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.position = nn.Embedding(length, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads, hidden) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.token(tokens) + self.position(places))
        logits: Tensor = self.head(self.norm(x))
        return logits
