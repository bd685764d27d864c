"""Trains one model on pictures: batches, schedule, curves, and a state that can be saved.

    model = initialised(lambda: zoo.ViT(dim=96), seed=0)
    sp.sketch_(model, sp.L1(0.1))
    found = train(model, data, Recipe(optimizer="adamw", learning_rate=3e-4, epochs=6), seed=0)

Initial weights, the order of batches, crops and draws have streams of their own for each seed, so
two methods with one seed start from the same weights and see the same pictures.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sketchprop.meters import measure_flops

from .checkpoints import Checkpoint

PADDING = 4
"""Pixels around a picture before it is cropped at random."""
_EVALUATION_ROWS = 500
_LOOK_EVERY = 20
"""Steps between two looks at whether the loss is still finite."""
Model = TypeVar("Model", bound=nn.Module)


class Split(NamedTuple):
    """``images: uint8 [N, C, H, W]``, ``labels: [N]``."""

    images: Tensor
    labels: Tensor


class Pictures(NamedTuple):
    """What is trained on, what rates and epochs are chosen on, and what is reported."""

    train: Split
    validation: Split
    test: Split
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """By channel, of pixels in [0, 1]."""


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: optimizer, schedule, batches."""

    optimizer: str
    """``sgd`` or ``adamw``."""
    learning_rate: float
    epochs: int
    batch_size: int = 128
    weight_decay: float = 0.0
    momentum: float = 0.9
    """Of ``sgd``."""
    warmup_epochs: float = 0.0
    final_rate: float = 0.0
    """Where the cosine ends, in the last step."""
    clip: float = 0.0
    """Largest norm of the gradient; 0: no clipping."""
    augment: bool = True
    """Random crops of padded pictures, and flips."""

    def rate(self, step: int, steps_per_epoch: int) -> float:
        """The learning rate of a step: up in a line, then down in a cosine."""
        total, warm = self.epochs * steps_per_epoch, round(self.warmup_epochs * steps_per_epoch)
        if step < warm:
            return self.learning_rate * (step + 1) / (warm + 1)
        share = (step - warm) / max(1, total - 1 - warm)
        low = min(self.final_rate, self.learning_rate)
        return low + (self.learning_rate - low) * (1 + math.cos(math.pi * share)) / 2

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), momentum=self.momentum, **options)
        return torch.optim.AdamW(model.parameters(), **options)


def seed_of(purpose: str, seed: int) -> int:
    """A number of its own for each purpose of each seed."""
    digest = hashlib.sha256(f"{purpose}/{seed}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def initialised(make: Callable[[], Model], seed: int) -> Model:
    """A model with the initial weights of a seed; the default generator stays as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed_of("initial weights", seed))
        return make()


def best_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def train(
    model: nn.Module,
    data: Pictures,
    recipe: Recipe,
    seed: int,
    *,
    checkpoint: Checkpoint | None = None,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Trains ``model``, sketched or not, and returns what was found, as plain numbers.

    ``validation_curve``, ``test_curve`` (percent), ``loss_curve`` and ``seconds_curve`` (training
    alone, without evaluation) have one entry for each epoch; ``flops_step`` counts one step:
    forward, backward, scores and decompositions. With a ``checkpoint`` a killed run goes on where
    it was saved; on the CPU its results are bitwise those of a run that was never stopped.
    """
    with torch.random.fork_rng():
        trainer = Trainer(model, data, recipe, seed, device or best_device())
        state = checkpoint.load() if checkpoint else None
        if state is None:
            trainer.start()
        else:
            trainer.load_state(state)
        while trainer.steps < trainer.total:
            trainer.step()
            if checkpoint:
                checkpoint.offer(trainer.state)
        return trainer.found()


class Trainer:
    """One run in progress; all that changes is in ``state``."""

    def __init__(
        self, model: nn.Module, data: Pictures, recipe: Recipe, seed: int, device: torch.device
    ) -> None:
        self.model, self.recipe, self.device, self.seed = model.to(device), recipe, device, seed
        train, validation, test = (
            Split(part.images.to(device), part.labels.to(device)) for part in data[:3]
        )
        self.data = data._replace(train=train, validation=validation, test=test)
        self.steps_per_epoch = len(data.train.labels) // recipe.batch_size
        if not self.steps_per_epoch:
            raise ValueError(
                f"{len(data.train.labels)} pictures make no batch of {recipe.batch_size}"
            )
        shape = (1, -1, 1, 1)
        self._mean = torch.tensor(data.mean, device=device).view(shape) * 255
        self._std = torch.tensor(data.std, device=device).view(shape) * 255
        self._padded = F.pad(self.data.train.images, (PADDING,) * 4) if recipe.augment else None
        self.optimizer = recipe.make(model)
        self.order = torch.Generator().manual_seed(seed_of("order", seed))
        self.crops = torch.Generator().manual_seed(seed_of("crops", seed))
        self.steps = self.clipped = self.diverged = 0
        self.total = recipe.epochs * self.steps_per_epoch
        self.permutation = torch.empty(0, dtype=torch.int64)
        self.loss = torch.zeros((), device=device)
        self.flops = 0.0
        self.seconds, self.wall = 0.0, 0.0
        self.curves: dict[str, list[float | None]] = {
            name: [] for name in ("validation", "test", "loss", "seconds")
        }

    def start(self) -> None:
        """What a new run does once: counts a step, and seeds the draws."""
        began = time.perf_counter()
        torch.manual_seed(seed_of("counting", self.seed))
        self.model.train()
        report = measure_flops(self.model, _loss, self.first_batch())
        self.flops = report.forward + report.sketched_backward
        self.model.zero_grad()
        torch.manual_seed(seed_of("draws", self.seed))
        self.wall += time.perf_counter() - began

    def first_batch(self) -> tuple[Tensor, Tensor]:
        """The first pictures as they are: for meters."""
        return self._batch(torch.arange(self.recipe.batch_size), None)

    def step(self) -> None:
        """One step; with the last of an epoch, the evaluation."""
        lost = self.train_step()
        if lost or self.steps % self.steps_per_epoch == 0:
            self._end_epoch(lost)

    def train_step(self) -> bool:
        """One step alone; whether the run is lost."""
        began = time.perf_counter()
        at = self.steps % self.steps_per_epoch
        if at == 0:
            self.permutation = torch.randperm(len(self.data.train.labels), generator=self.order)
            self.model.train()
        B = self.recipe.batch_size
        batch = self._batch(self.permutation[at * B : (at + 1) * B], self.crops)
        rate = self.recipe.rate(self.steps, self.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = _loss(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.recipe.clip:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
            self.clipped += int(norm > self.recipe.clip)
        self.optimizer.step()
        self.loss += loss.detach()
        self.steps += 1
        last = self.steps % self.steps_per_epoch == 0
        lost = (last or at % _LOOK_EVERY == 0) and not self._finite(last)
        spent = time.perf_counter() - began
        self.seconds += spent
        self.wall += spent
        return lost

    def _finite(self, thoroughly: bool) -> bool:
        if not bool(self.loss.isfinite()):
            return False
        return not thoroughly or all(bool(p.isfinite().all()) for p in self.model.parameters())

    def _end_epoch(self, lost: bool) -> None:
        began = time.perf_counter()
        if lost:
            epoch = len(self.curves["loss"])
            self.diverged, rest = epoch + 1, self.recipe.epochs - epoch
            for name, value in (("validation", 0.0), ("test", 0.0), ("loss", None)):
                self.curves[name] += [value] * rest
            self.curves["seconds"] += [self.seconds] + [0.0] * (rest - 1)
            self.steps = self.total
        else:
            self.curves["validation"].append(self.accuracy(self.data.validation))
            self.curves["test"].append(self.accuracy(self.data.test))
            self.curves["loss"].append(float(self.loss) / self.steps_per_epoch)
            self.curves["seconds"].append(self.seconds)
        self.loss.zero_()
        self.seconds = 0.0
        self.wall += time.perf_counter() - began

    def accuracy(self, split: Split) -> float:
        """In percent."""
        self.model.eval()
        right = 0
        with torch.no_grad():
            for images, labels in zip(
                torch.split(split.images, _EVALUATION_ROWS),
                torch.split(split.labels, _EVALUATION_ROWS),
                strict=True,
            ):
                right += int((self.model(self._scaled(images)).argmax(-1) == labels).sum())
        return 100.0 * right / len(split.labels)

    def _scaled(self, images: Tensor) -> Tensor:
        return images.float().sub_(self._mean).div_(self._std)

    def _batch(self, index: Tensor, crops: torch.Generator | None) -> tuple[Tensor, Tensor]:
        labels = self.data.train.labels[index.to(self.device)]
        if self._padded is None or crops is None:
            return self._scaled(self.data.train.images[index.to(self.device)]), labels
        return self._scaled(cropped(self._padded, index, crops)), labels

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "permutation": self.permutation,
            "loss": self.loss,
            "curves": self.curves,
            "numbers": {name: getattr(self, name) for name in _NUMBERS},
            "order": self.order.get_state(),
            "crops": self.crops.get_state(),
            "draws": torch.get_rng_state(),
            "device draws": torch.cuda.get_rng_state(self.device) if self._cuda else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.permutation = state["permutation"]
        self.loss.copy_(state["loss"])
        self.curves = state["curves"]
        for name in _NUMBERS:
            setattr(self, name, state["numbers"][name])
        self.order.set_state(state["order"])
        self.crops.set_state(state["crops"])
        torch.set_rng_state(state["draws"])
        if self._cuda:
            torch.cuda.set_rng_state(state["device draws"], self.device)
        self.model.train()

    @property
    def _cuda(self) -> bool:
        return self.device.type == "cuda"

    def found(self) -> dict[str, Any]:
        digits = {"validation": 4, "test": 4, "loss": 6, "seconds": 4}
        return {
            **{
                f"{name}_curve": [v if v is None else round(v, digits[name]) for v in values]
                for name, values in self.curves.items()
            },
            "clipped_fraction": round(self.clipped / self.total, 6),
            "diverged_epoch": self.diverged,
            "steps_per_epoch": self.steps_per_epoch,
            "flops_step": self.flops,
            "wall_seconds": round(self.wall, 4),
        }


_NUMBERS = ("steps", "clipped", "diverged", "flops", "seconds", "wall")


def cropped(padded: Tensor, index: Tensor, generator: torch.Generator) -> Tensor:
    """Pictures ``index``, each cut out of its padded version at random, half of them mirrored.

    ``padded: [N, C, H + 8, W + 8]``; all pictures at once, by one look-up.
    """
    B = len(index)
    height, width = (size - 2 * PADDING for size in padded.shape[-2:])
    down, right = torch.randint(0, 2 * PADDING + 1, (2, B, 1), generator=generator)
    mirror = torch.randint(0, 2, (B, 1), generator=generator).bool()
    across = torch.arange(width).expand(B, -1)
    rows = down + torch.arange(height)
    columns = right + torch.where(mirror, width - 1 - across, across)
    places = (
        t.to(padded.device) for t in (index[:, None, None], rows[:, :, None], columns[:, None])
    )
    picture, row, column = places
    # Looked up by picture, row and column at once, the channels come last; in memory they stay so.
    return padded[picture, :, row, column].permute(0, 3, 1, 2)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])
