"""Two networks where no sketch should be advised, the paper's MLP and a ResNet with BatchNorm; and
tasks once more, in small batches."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sketchprop.zoo import mlp

from .. import data
from ..lab.problem import Problem
from ..lab.trainer import generator
from ..mnist.stack import load as load_mnist
from ..problems import drawer, hidden, pieces, pixels
from ..tasks.table import TASKS

HELD = 1000
"""Training pictures that are kept apart."""


class Residual(nn.Module):
    """Two 3×3 convolutions with BatchNorm around a sum, as in He et al. (2015)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.short = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.short(x))


class ResNet(nn.Module):
    """Three stages of one block each: ResNet-8."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        sizes = ((width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2))
        self.stages = nn.Sequential(*(Residual(*size) for size in sizes))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.stages(F.relu(self.norm(self.conv(images))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


@lru_cache(maxsize=2)
def paper_mlp(small: bool) -> Problem:
    """784-64-64-10 on MNIST, batch 128, SGD."""
    if small:
        source = generator("made-up", 4)
        labels = torch.randint(10, (256,), generator=source)
        rows = torch.randn(256, 784, generator=source) + labels.view(-1, 1) / 10
        train = held = (rows, labels)
    else:
        found = load_mnist(0, 2000, 5000, "normalised")
        train, held = found.train, found.validation

    def same(x: Tensor) -> Tensor:
        return x

    return Problem(
        name="mlp",
        title="the paper's MLP 784-64-64-10 on MNIST, batch 128, SGD",
        model=mlp,
        draw=drawer(*train, same),
        loss=F.cross_entropy,
        validation=pieces(*held, same),
        test=pieces(*held, same),
        batch_size=32 if small else 128,
        inner=hidden,
        adam=False,
    )


@lru_cache(maxsize=2)
def resnet(small: bool) -> Problem:
    """ResNet-8 of width 16 on CIFAR-10, batch 128, AdamW."""
    if small:
        source = generator("made-up", 5)
        labels = torch.randint(2, (64,), generator=source)
        images = torch.randint(0, 200, (64, 3, 32, 32), generator=source)
    else:
        found = data.cifar10(train=True)
        images, labels = found.images, found.labels
    held = pieces(images[-HELD:], labels[-HELD:], pixels)
    return Problem(
        name="resnet",
        title="ResNet-8 (width 16) with BatchNorm on CIFAR-10, batch 128, AdamW",
        model=lambda: ResNet(4 if small else 16),
        draw=drawer(*((images, labels) if small else (images[:-HELD], labels[:-HELD])), pixels),
        loss=F.cross_entropy,
        validation=held,
        test=held,
        batch_size=8 if small else 128,
        inner=hidden,
    )


def in_fours(task: str, small: bool) -> Problem:
    """A task in batches of 4."""
    own = TASKS[task].problem(small)
    title = own.title.replace(f"batch {own.batch_size}", "batch 4")
    return replace(own, batch_size=4, title=title)
