"""Pictures and digits to train on, and parts that problems are made of."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sketchprop.zoo import ViT

from . import data
from .lab.problem import Problem
from .lab.trainer import Batch

EVALUATED = 500
"""Samples at a time when evaluating."""


def in_blocks(module: nn.Module, name: str) -> bool:
    """Every linear layer of the transformer blocks."""
    return "blocks" in name


def hidden(module: nn.Module, name: str) -> bool:
    """Every linear layer but the one with ten outputs."""
    return getattr(module, "out_features", 0) != 10


def drawer(x: Tensor, y: Tensor, ready: Callable[[Tensor], Tensor]) -> Callable[..., Batch]:
    """Batches drawn with replacement; ``ready`` makes numbers of bytes."""

    def draw(source: torch.Generator, size: int) -> Batch:
        index = torch.randint(len(y), (size,), generator=source)
        return ready(x[index]), y[index]

    return draw


def pieces(x: Tensor, y: Tensor, ready: Callable[[Tensor], Tensor]) -> Callable[[], list[Batch]]:
    def batches() -> list[Batch]:
        parts = zip(torch.split(x, EVALUATED), torch.split(y, EVALUATED), strict=True)
        return [(ready(a), b) for a, b in parts]

    return batches


@lru_cache(maxsize=4)
def cifar_vit(name: str, batch_size: int, **sizes: int) -> Problem:
    """A ViT on CIFAR-10."""
    train, test = data.cifar10(train=True), data.cifar10(train=False)
    last, end = 20000, 21000
    model = ViT(**sizes)
    (tokens, dim), depth = model.position.shape, len(model.blocks)
    return Problem(
        name=name,
        title=f"ViT (dimension {dim}, depth {depth}) on CIFAR-10, {tokens} tokens a picture, "
        f"batch {batch_size}, AdamW",
        model=partial(ViT, **sizes),
        draw=drawer(train.images[:last], train.labels[:last], pixels),
        loss=F.cross_entropy,
        validation=pieces(train.images[last:end], train.labels[last:end], pixels),
        test=pieces(test.images[:2000], test.labels[:2000], pixels),
        batch_size=batch_size,
        inner=in_blocks,
    )


def pixels(images: Tensor) -> Tensor:
    return images.float().div_(255).sub_(0.47).div_(0.25)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
