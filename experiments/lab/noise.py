"""The noise of minibatches, and what an estimator adds to it, on the gradients of a problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sketchprop.meters.noise.estimate import Estimate, minibatch_variance, over_draws
from sketchprop.meters.noise.gradients import squared_distance
from sketchprop.meters.noise.variance import alignment, surprising

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


@dataclass(frozen=True)
class Noise:
    """σ² and the batches on which V is measured, with their exact gradients."""

    sigma2: Estimate
    batches: tuple[Batch, ...]
    exact: tuple[list[Tensor], ...]


def noise_batches(problem: Problem, count: int) -> list[Batch]:
    """The first so many of a stream of their own."""
    source = generator("noise", 0)
    return [problem.draw(source, problem.batch_size) for _ in range(count)]


def minibatch_noise(model: nn.Module, problem: Problem, count: int, kept: int) -> Noise:
    """σ² from ``count`` batches; the first ``kept`` of them are for V."""
    batches = noise_batches(problem, count)
    exact = [exact_gradient(model, problem, batch) for batch in batches]
    mean = [sum(parts) / count for parts in zip(*exact, strict=True)]
    deviations = [squared_distance(g, mean) for g in exact]
    return Noise(minibatch_variance(deviations), tuple(batches[:kept]), tuple(exact[:kept]))


def added_noise(
    noise: Noise, draw: Callable[[Batch], Iterator[Sequence[Tensor]]]
) -> dict[str, Any]:
    """V/σ² with its standard error; whether the draws met all that V comes from.

    ``draw`` makes gradients of one batch; the default generator begins anew.
    """
    totals: list[list[float]] = []
    aligned: list[list[list[float]]] = [[] for _ in noise.exact[0]]
    torch.manual_seed(0)
    for batch, exact in zip(noise.batches, noise.exact, strict=True):
        totals.append([])
        for of_parameter in aligned:
            of_parameter.append([])
        for drawn in map(list, draw(batch)):
            totals[-1].append(squared_distance(drawn, exact))
            for of_parameter, value in zip(aligned, alignment(drawn, exact), strict=True):
                of_parameter[-1].append(value)
    V = over_draws(totals)
    ratio = V.value / noise.sigma2.value
    own = V.error / V.value if V.value else 0.0
    return {
        "ratio": ratio,
        "error": ratio * math.hypot(own, noise.sigma2.error / noise.sigma2.value),
        "own_error": ratio * own,
        "lower_bound": any(surprising(of_parameter) for of_parameter in aligned),
        "largest": max(map(max, totals)) / noise.sigma2.value,
    }
