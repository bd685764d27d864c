"""Runs of the study on CIFAR-10: data, models, which layers are sketched, and what a run costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn

import sketchprop as sp
from sketchprop import zoo
from sketchprop.core.cost import Size
from sketchprop.layers import select
from sketchprop.meters.cost.shapes import recorded_uses

from ..data import cifar10
from ..lab.checkpoints import Checkpoint
from ..lab.machine import machine
from ..lab.pictures import Parts, PictureFeed, split
from ..lab.sweep import Run
from ..lab.trainer import Recipe, Trainer, accuracy, initialised, outputs
from ..methods import layer_sketch
from .bagnet import BagNet
from .study import SIZES, CifarCell, parse_size

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Of the training set, by channel."""


@lru_cache(maxsize=2)
def load(train_rows: int, validation_rows: int, test_rows: int) -> Parts:
    """CIFAR-10, a part of its training set kept apart for choosing."""
    rows = (train_rows, validation_rows, test_rows)
    return split(cifar10(train=True), cifar10(train=False), rows)


def model_of(cell: CifarCell) -> nn.Module:
    """The model of a cell, not sketched."""
    given = {**SIZES[cell.model], **parse_size(cell.size)}
    options: dict[str, Any] = {k: v[0] if len(v) == 1 else v for k, v in given.items()}
    if cell.model == "bagnet17":
        # On a CPU a third faster than channels first.
        return BagNet(**options).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
    return zoo.ViT(dropout=cell.dropout, **options)


def sketched(module: nn.Module, name: str) -> bool:
    """Linear layers and 1×1 convolutions, but no classifier and no projection of pixels."""
    if isinstance(module, nn.Conv2d):
        return max(module.kernel_size) == 1 and name != "project"
    return isinstance(module, nn.Linear) and name != "head"


PLACES: dict[str, Callable[[nn.Module, str], bool]] = {
    "all": sketched,
    "last": lambda module, name: name == "head",
}


def sketch_model(model: nn.Module, cell: CifarCell) -> nn.Module:
    """Sketches the layers that the cell names, in place."""
    sketch = layer_sketch(cell.sketch)
    return model if sketch is None else sp.sketch_(model, sketch, PLACES[cell.layers])


def trainer_of(run: Run, device: torch.device | None = None) -> Trainer:
    """One run from its seed, evaluated after each epoch."""
    cell: Any = run.cell
    model = sketch_model(initialised(lambda: model_of(cell), run.seed), cell)
    device = device or machine().where
    if machine().compile:
        model.compile()
    parts = load(cell.train_rows, cell.validation_rows, cell.test_rows)
    feed = PictureFeed(parts, MEAN, STD, cell.batch_size, run.seed, device)
    each = feed.steps_per_epoch
    recipe = Recipe(
        optimizer=cell.optimizer,
        learning_rate=run.learning_rate,
        steps=cell.epochs * each,
        weight_decay=cell.weight_decay,
        momentum=cell.momentum,
        warmup=round(cell.warmup_epochs * each),
        final_rate=cell.final_rate,
        clip=cell.clip,
    )

    def evaluate(model: nn.Module) -> tuple[float, float]:
        held, tested = (feed.batches(part) for part in feed.parts[1:])
        return accuracy(*outputs(model, held)), accuracy(*outputs(model, tested))

    marks = range(each, recipe.steps + 1, each)
    return Trainer(model, feed, recipe, evaluate, run.seed, marks, device=device)


def train_run(run: Run, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """One run from its seed to its curves."""
    trainer, cell = trainer_of(run), run.cell
    return {
        **trainer.train(checkpoint),
        "ranks": layer_ranks(cell),  # type: ignore[arg-type]
        "steps_per_epoch": trainer.marks[0],
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
    }


@lru_cache(maxsize=64)
def layer_shapes(cell: CifarCell) -> dict[str, Size]:
    """Rows, outputs and inputs of each layer that is sketched, by name; nothing is computed."""
    with torch.device("meta"):
        model = model_of(cell)
        rule = PLACES[cell.layers]
        layers = {module: name for name, module in select.sketchable_layers(model).items()}
        layers = {module: name for module, name in layers.items() if rule(module, name)}
        with recorded_uses(layers) as uses:
            model(torch.empty(cell.batch_size, 3, 32, 32))
    return {use.name: use.products[0] for use in uses}


def layer_ranks(cell: CifarCell) -> list[float]:
    """How many atoms each sketched layer keeps, or is expected to keep; exact: all columns."""
    sketch = layer_sketch(cell.sketch)
    shapes = layer_shapes(cell).values()
    if sketch is None:
        return [float(shape.n) for shape in shapes]
    return [round(float(sketch.rank_of(shape.B, shape.n, shape.d)), 4) for shape in shapes]


def trial_step(cell: CifarCell) -> Callable[[], None]:
    """Forward and backward of made-up pictures."""
    model = sketch_model(model_of(cell), cell).to(machine().where)
    x = torch.rand(cell.batch_size, 3, 32, 32).to(machine().where)
    return lambda: model(x).square().mean().backward()
