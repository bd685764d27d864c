"""What is trained: models of a screen's size on data that is at hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sketchprop.zoo import Bert, ViT, mlp

from . import data
from .lab import ExperimentError
from .lab.problem import Problem
from .lab.trainer import Batch, generator
from .mnist.stack import load as load_mnist

MASK = 256
"""The token that stands for a hidden byte."""
LENGTH = 64
EVALUATED = 500
"""Samples at a time when evaluating."""
PACKAGES = ("asyncio", "ctypes", "email", "encodings", "http", "idlelib", "importlib", "logging",
            "multiprocessing", "tkinter", "unittest", "urllib", "xml")  # fmt: skip
"""Of the standard library: which one is a snippet from?"""
HELD = 8
"""One stretch of text in eight is kept apart for evaluation."""


def in_blocks(module: nn.Module, name: str) -> bool:
    """Every linear layer of the transformer blocks."""
    return "blocks" in name


def hidden(module: nn.Module, name: str) -> bool:
    """Every linear layer but the one with ten outputs."""
    return getattr(module, "out_features", 0) != 10


class Endless:
    """Batches of 128 digits, as ``sketchprop measure`` takes them."""

    def __init__(self) -> None:
        images, self.labels = data.mnist()
        self.rows = data.normalised(images)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            chosen = torch.randint(len(self.labels), (128,))
            yield self.rows[chosen], self.labels[chosen]


def mnist_mlp() -> tuple[nn.Module, Callable[[nn.Module, Batch], Tensor], Endless]:
    """The paper's MLP: ``sketchprop measure --model experiments.problems:mnist_mlp``."""
    return mlp(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), Endless()


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


def _same(x: Tensor) -> Tensor:
    return x


@lru_cache(maxsize=1)
def wide_mlp(small: bool) -> Problem:
    """784-1024-1024-1024-10 on MNIST, batch 256."""
    rows = (512, 200, 200) if small else (0, 2000, 5000)
    found = load_mnist(*rows, "normalised")
    widths = (784, 32, 32, 10) if small else (784, 1024, 1024, 1024, 10)
    return Problem(
        name="mlp",
        title=f"MLP {'-'.join(map(str, widths))} on MNIST, batch 256, SGD",
        model=lambda: mlp(*widths),
        draw=drawer(*found.train, _same),
        loss=F.cross_entropy,
        validation=pieces(*found.validation, _same),
        test=pieces(*found.test, _same),
        batch_size=256 if not small else 32,
        inner=hidden,
        adam=False,
    )


@lru_cache(maxsize=1)
def small_vit(small: bool) -> Problem:
    """Dimension 96, depth 4, on CIFAR-10, batch 128."""
    return _pictures("vit", "dimension 96, depth 4", small, ViT)


@lru_cache(maxsize=2)
def cifar_vit(large: bool) -> Problem:
    """``small_vit``, or one of dimension 192 and depth 9."""
    if not large:
        return small_vit(False)
    made = partial(ViT, dim=192, depth=9, heads=12, hidden=1024)
    return _pictures("vit-large", "dimension 192, depth 9", False, made)


def _pictures(name: str, sizes: str, small: bool, model: Callable[[], nn.Module]) -> Problem:
    train, test = data.cifar10(train=True), data.cifar10(train=False)
    parts = (256, 100, 100) if small else (20000, 1000, 2000)
    end = parts[0] + parts[1]
    if small:
        model = partial(ViT, dim=16, depth=1, heads=2, hidden=32, patch=8)
    return Problem(
        name=name,
        title=f"ViT ({sizes}) on CIFAR-10, batch 128, AdamW",
        model=model,
        draw=drawer(train.images[: parts[0]], train.labels[: parts[0]], pixels),
        loss=F.cross_entropy,
        validation=pieces(train.images[parts[0] : end], train.labels[parts[0] : end], pixels),
        test=pieces(test.images[: parts[2]], test.labels[: parts[2]], pixels),
        batch_size=16 if small else 128,
        inner=in_blocks,
    )


def pixels(images: Tensor) -> Tensor:
    return images.float().div_(255).sub_(0.47).div_(0.25)


@lru_cache(maxsize=1)
def _source() -> dict[str, bytes]:
    """The standard library's own source, by package; single modules under an empty name."""
    root = Path(os.__file__).parent
    found = {"": b"".join(p.read_bytes() for p in sorted(root.glob("*.py")))}
    for name in PACKAGES:
        files = sorted((root / name).rglob("*.py"))
        found[name] = b"".join(p.read_bytes() for p in files if "test" not in p.parts)
    if sum(map(len, found.values())) < 1 << 20:
        raise ExperimentError(
            f"{root} holds no source of the standard library to train on; use a Python that does"
        )
    return found


def _snippets(text: bytes) -> tuple[Tensor, Tensor]:
    """Rows of ``LENGTH`` bytes for training and for evaluation, the latter in whole stretches."""
    usable = len(text) // LENGTH * LENGTH
    rows = torch.frombuffer(bytearray(text[:usable]), dtype=torch.uint8).view(-1, LENGTH)
    stretch = torch.arange(len(rows)) // 16
    held = stretch % HELD == 0
    return rows[~held], rows[held]


def encoder(small: bool) -> Bert:
    if small:
        return Bert(257, LENGTH, dim=16, depth=1, heads=2, hidden=32)
    return Bert(257, LENGTH, dim=64, depth=3, heads=4, hidden=256)


@lru_cache(maxsize=1)
def masked_bytes(small: bool) -> Problem:
    """An encoder that guesses hidden bytes of the standard library's source."""
    train, held = _snippets(b"".join(_source().values()))
    order = torch.randperm(len(held), generator=generator("held", 0))
    held = held[order[: 64 if small else 1000]]
    source = generator("masks", 0)
    tests = [_hide(part, source) for part in torch.split(held, EVALUATED)]

    def draw(random: torch.Generator, size: int) -> Batch:
        return _hide(train[torch.randint(len(train), (size,), generator=random)], random)

    return Problem(
        name="bytes",
        title="encoder on the source of Python's standard library, hidden bytes, batch 64, AdamW",
        model=lambda: encoder(small),
        draw=draw,
        loss=token_loss,
        validation=lambda: tests,
        test=lambda: tests,
        batch_size=8 if small else 64,
        inner=in_blocks,
    )


def _hide(rows: Tensor, source: torch.Generator) -> Batch:
    """15 % of the bytes are hidden; only those are to be guessed."""
    hidden_ones = torch.rand(rows.shape, generator=source) < 0.15
    tokens = rows.long()
    return tokens.masked_fill(hidden_ones, MASK), tokens.masked_fill(~hidden_ones, -100)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def linear_layers(model: nn.Module, problem: Problem) -> list[str]:
    """Those that a sketch takes which is not everywhere."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and problem.inner(module, name)
    ]
