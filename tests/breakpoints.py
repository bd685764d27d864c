"""The exact mean of anything that is drawn with one or several uniforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

import sketchprop as sp


def pieces(sketch: sp.Sketch, G: Tensor, W: Tensor) -> Iterator[tuple[float, Tensor]]:
    """Lengths and midpoints of the intervals of u on which the draw does not change.

    Where a sketch takes several uniforms they move together: its estimate is a sum of terms that
    each depend on one of them.
    """
    p = sketch.probabilities(G, W).detach().double().flatten()
    sums = p.cumsum(0)
    ends = p.new_tensor([0.0, 1.0])
    points = torch.cat([ends, sums - sums.floor(), p.clamp(0, 1)]).sort().values
    shape = sketch.uniform_shape(G, W)
    for low, high in pairwise(points.tolist()):
        if high > low:
            yield high - low, torch.full(shape, (low + high) / 2, dtype=torch.float64)


def expected(
    sketch: sp.Sketch, G: Tensor, W: Tensor, gradients: Callable[[Tensor], tuple[Tensor, ...]]
) -> list[Tensor]:
    """E of each of ``gradients(u)`` as a finite sum."""
    parts = [[length * g for g in gradients(u)] for length, u in pieces(sketch, G, W)]
    return [torch.stack(part).sum(0) for part in zip(*parts, strict=True)]
