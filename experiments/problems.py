"""What is trained: models of a screen's size on data that is at hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sketchprop import data
from sketchprop.zoo import Bert, ViT, mlp

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


class Classifier(nn.Module):
    """A trained encoder with a new head on the mean of its tokens."""

    def __init__(self, body: Bert, classes: int) -> None:
        super().__init__()
        self.body = body
        self.classes = nn.Linear(body.norm.normalized_shape[0], classes)
        del self.body.head

    def forward(self, tokens: Tensor) -> Tensor:
        body = self.body
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = body.blocks(body.token(tokens) + body.position(places))
        logits: Tensor = self.classes(body.norm(x).mean(1))
        return logits


def packages(small: bool, trained: dict[str, Tensor]) -> Problem:
    """Which package of the standard library is a snippet from? Starts from ``trained``."""
    parts = [_snippets(_source()[name]) for name in PACKAGES]
    x, y = _labelled([part[0] for part in parts])
    held_x, held_y = _labelled([part[1] for part in parts])
    order = torch.randperm(len(held_y), generator=generator("held", 1))
    first, second = (50, 100) if small else (1000, 2000)
    chosen, tested = order[:first], order[first : first + second]

    def model() -> nn.Module:
        body = encoder(small)
        body.load_state_dict(trained)
        return Classifier(body, len(PACKAGES))

    def balanced(source: torch.Generator, size: int) -> Batch:
        """Every package as often as any other."""
        wanted = torch.randint(len(PACKAGES), (size,), generator=source)
        share = torch.rand(size, generator=source)
        index = starts[wanted] + (share * counts[wanted]).long()
        return x[index].long(), y[index]

    counts = torch.bincount(y, minlength=len(PACKAGES))
    starts = counts.cumsum(0) - counts
    return Problem(
        name="packages",
        title=f"which of {len(PACKAGES)} packages is a snippet from, batch 64, AdamW",
        model=model,
        draw=balanced,
        loss=F.cross_entropy,
        validation=pieces(held_x[chosen], held_y[chosen], Tensor.long),
        test=pieces(held_x[tested], held_y[tested], Tensor.long),
        batch_size=8 if small else 64,
        inner=in_blocks,
    )


def _labelled(parts: Sequence[Tensor]) -> Batch:
    labels = [torch.full((len(part),), label) for label, part in enumerate(parts)]
    return torch.cat(list(parts)), torch.cat(labels)


@lru_cache(maxsize=1)
def low_digits(small: bool) -> Problem:
    """A small ViT tells 0 to 4 from each other."""
    return _five_digits(small, 0, lambda: _digits_vit(small))


def high_digits(small: bool, trained: dict[str, Tensor]) -> Problem:
    """The same ViT with a new head tells 5 to 9 from each other. Starts from ``trained``."""

    def model() -> nn.Module:
        vit = _digits_vit(small)
        head = vit.head
        vit.head = nn.Identity()  # type: ignore[assignment]
        vit.load_state_dict({k: v for k, v in trained.items() if not k.startswith("head.")})
        vit.head = head
        return vit

    return _five_digits(small, 5, model)


def _digits_vit(small: bool) -> ViT:
    sizes = (16, 1, 2, 32) if small else (64, 3, 4, 256)
    names = ("dim", "depth", "heads", "hidden")
    return ViT(image=28, patch=7, channels=1, classes=5, **dict(zip(names, sizes, strict=True)))


def _five_digits(small: bool, lowest: int, model: Callable[[], nn.Module]) -> Problem:
    """Of MNIST: the digits from ``lowest`` to four above it."""
    found = load_mnist(*((1024, 400, 400) if small else (0, 2000, 5000)), "normalised")
    parts = []
    for x, y in found:
        own = (y >= lowest) & (y < lowest + 5)
        parts.append((x[own], y[own] - lowest))
    train, validation, test = parts
    return Problem(
        name=f"digits-{lowest}",
        title=f"the digits {lowest} to {lowest + 4} of MNIST, batch 128, AdamW",
        model=model,
        draw=drawer(*train, _squares),
        loss=F.cross_entropy,
        validation=pieces(*validation, _squares),
        test=pieces(*test, _squares),
        batch_size=16 if small else 128,
        inner=in_blocks,
    )


def _squares(rows: Tensor) -> Tensor:
    return rows.view(-1, 1, 28, 28)


def linear_layers(model: nn.Module, problem: Problem) -> list[str]:
    """Those that a sketch takes which is not everywhere."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and problem.inner(module, name)
    ]
