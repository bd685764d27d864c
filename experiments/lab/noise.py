"""Gradients of a problem, exact and drawn, on batches of a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .problem import Problem
from .trainer import Batch, generator


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def gradients_of(model: nn.Module, problem: Problem, batch: Batch, count: int) -> Iterator[Any]:
    """So many gradients of one batch, all from one forward pass: layers draw in backward."""
    parameters = trained_parameters(model)
    loss = problem.loss_of(model, batch)
    for _ in range(count):
        yield list(torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True))


def exact_gradient(model: nn.Module, problem: Problem, batch: Batch) -> list[Tensor]:
    """Of a model that is not sketched."""
    found: list[Tensor] = next(gradients_of(model, problem, batch, 1))
    return found


def noise_batches(problem: Problem, count: int) -> list[Batch]:
    """The first so many of a stream of their own."""
    source = generator("noise", 0)
    return [problem.draw(source, problem.batch_size) for _ in range(count)]
