"""Labelled pictures: their split, and batches of random crops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import Labelled
from .checkpoints import State
from .sweep import Cell
from .trainer import Batch, generator

SPLIT_SEED = 20240
"""The validation split is the same for every run."""
PADDING = 4
"""Pixels around a picture before it is cropped at random."""
_EVALUATION_ROWS = 500


class Parts(NamedTuple):
    """What is trained on, what rates and epochs are chosen on, and what is reported."""

    train: Labelled
    validation: Labelled
    test: Labelled


@dataclass(frozen=True, kw_only=True)
class PictureCell(Cell):
    """What all runs on pictures have; 0 rows: all there are."""

    epochs: int = 50
    batch_size: int = 128
    clip: float = 1.0
    train_rows: int = 0
    validation_rows: int = 5000
    test_rows: int = 0

    ROWS: ClassVar[tuple[int, int]]
    """Of the training and the test set."""

    @property
    def epoch_steps(self) -> float:
        """Steps of an epoch; to look at what is kept apart takes a third of training on it."""
        train, test = self.ROWS
        rows = self.train_rows or train - self.validation_rows
        return (rows + (self.validation_rows + (self.test_rows or test)) / 3) / self.batch_size

    def stretches(self, runs: int) -> list[tuple[float, int]]:
        return [(self.epochs * self.epoch_steps, 1)] * runs

    def problem(self) -> str:
        if min(self.epochs, self.batch_size, self.validation_rows) < 1:
            return "epochs, batch_size and validation_rows must be at least 1"
        return ""


def split(all_train: Labelled, all_test: Labelled, rows: tuple[int, int, int]) -> Parts:
    """A random part of the training set kept apart for choosing; 0 rows: all there are."""
    train_rows, validation_rows, test_rows = rows
    images, labels = all_train
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    held, rest = order[:validation_rows], order[validation_rows:][: train_rows or None]
    count = test_rows or None
    return Parts(
        Labelled(images[rest], labels[rest]),
        Labelled(images[held], labels[held]),
        Labelled(all_test.images[:count], all_test.labels[:count]),
    )


class PictureFeed:
    """Epochs in random order: random crops of padded pictures, and flips."""

    def __init__(
        self,
        parts: Parts,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        batch_size: int,
        seed: int,
        device: torch.device,
        augment: bool = True,
    ) -> None:
        self.parts = Parts(*(Labelled(x.to(device), y.to(device)) for x, y in parts))
        self.device, self.batch_size = device, batch_size
        self.steps_per_epoch = len(parts.train.labels) // batch_size
        if not self.steps_per_epoch:
            raise ValueError(f"{len(parts.train.labels)} pictures make no batch of {batch_size}")
        shape = (1, -1, 1, 1)
        self._mean = torch.tensor(mean, device=device).view(shape) * 255
        self._std = torch.tensor(std, device=device).view(shape) * 255
        self._padded = F.pad(self.parts.train.images, (PADDING,) * 4) if augment else None
        self.order, self.crops = generator("order", seed), generator("crops", seed)
        self.permutation = torch.empty(0, dtype=torch.int64)
        self.used = self.steps_per_epoch

    def first(self) -> Batch:
        """The first pictures as they are."""
        return self._batch(torch.arange(self.batch_size), None)

    def next(self) -> Batch:
        if self.used == self.steps_per_epoch:
            self.permutation = torch.randperm(len(self.parts.train.labels), generator=self.order)
            self.used = 0
        start = self.used * self.batch_size
        self.used += 1
        return self._batch(self.permutation[start : start + self.batch_size], self.crops)

    def batches(self, part: Labelled) -> Iterator[Batch]:
        """A part as it is, in pieces for evaluation."""
        pieces = (torch.split(tensor, _EVALUATION_ROWS) for tensor in part)
        return ((self._scaled(images), labels) for images, labels in zip(*pieces, strict=True))

    def state(self) -> State:
        return {
            "permutation": self.permutation,
            "used": self.used,
            "order": self.order.get_state(),
            "crops": self.crops.get_state(),
        }

    def load_state(self, state: State) -> None:
        self.permutation, self.used = state["permutation"], state["used"]
        self.order.set_state(state["order"])
        self.crops.set_state(state["crops"])

    def _scaled(self, images: Tensor) -> Tensor:
        return images.float().sub_(self._mean).div_(self._std)

    def _batch(self, index: Tensor, crops: torch.Generator | None) -> Batch:
        labels = self.parts.train.labels[index.to(self.device)]
        if self._padded is None or crops is None:
            return self._scaled(self.parts.train.images[index.to(self.device)]), labels
        return self._scaled(cropped(self._padded, index, crops)), labels


def cropped(padded: Tensor, index: Tensor, source: torch.Generator) -> Tensor:
    """Pictures ``index``, each cut out of its padded version at random, half of them mirrored.

    ``padded: [N, C, H + 8, W + 8]``; all pictures at once, by one look-up.
    """
    B = len(index)
    height, width = (size - 2 * PADDING for size in padded.shape[-2:])
    down, right = torch.randint(0, 2 * PADDING + 1, (2, B, 1), generator=source)
    mirror = torch.randint(0, 2, (B, 1), generator=source).bool()
    across = torch.arange(width).expand(B, -1)
    rows = down + torch.arange(height)
    columns = right + torch.where(mirror, width - 1 - across, across)
    places = (
        t.to(padded.device) for t in (index[:, None, None], rows[:, :, None], columns[:, None])
    )
    picture, row, column = places
    # Looked up by picture, row and column at once, the channels come last; in memory they stay so.
    return padded[picture, :, row, column].permute(0, 3, 1, 2)
