"""Every draw that a computation can make, with its probability: exact expectations.

A draw only changes where a uniform crosses a breakpoint: a fractional part of the cumulative sum
of p for an exact draw, p itself for a coin. Between two of them everything is constant, so an
expectation is a finite sum. Where one draw decides what the next one sees (one block above
another) the sum runs over the tree of all draws, depth first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import TypeVar

import torch
from torch import Tensor

from .sampling import Uniforms

Result = TypeVar("Result")
Outcome = tuple[float, Tensor]
"""A probability, and uniforms that lead there."""


def every_draw(
    run: Callable[[Uniforms], Result], *, together: bool = True
) -> Iterator[tuple[float, Result]]:
    """``run(uniforms)`` for every outcome of the draws it makes, each with its probability.

    ``run`` must take all of its randomness from ``uniforms``, in an order that depends on nothing
    else. ``together``: where one draw takes several uniforms (a stack, coins) they move together.
    That gives the right mean of any sum of terms that each depend on one of them, and a few
    outcomes; ``False`` runs through all combinations, for anything else.

    >>> p = torch.tensor([0.5, 0.5], dtype=torch.float64)
    >>> [(chance, int(u > 0.5)) for chance, u in every_draw(lambda uniforms: uniforms(p, ()))]
    [(0.5, 0), (0.5, 1)]
    """
    path: list[tuple[list[Outcome], int]] = []
    while True:
        depth = 0

        def uniforms(p: Tensor, shape: tuple[int, ...]) -> Tensor:
            nonlocal depth
            if depth == len(path):
                path.append((_outcomes(p.detach(), shape, together), 0))
            outcomes, place = path[depth]
            depth += 1
            return outcomes[place][1]

        result = run(uniforms)
        chance = 1.0
        for outcomes, place in path:
            chance *= outcomes[place][0]
        yield chance, result
        while path and path[-1][1] + 1 == len(path[-1][0]):
            path.pop()
        if not path:
            return
        outcomes, place = path.pop()
        path.append((outcomes, place + 1))


def expectation(
    run: Callable[[Uniforms], tuple[Tensor, ...]], *, together: bool = True
) -> tuple[Tensor, ...]:
    """The mean of each of the tensors that ``run(uniforms)`` returns, over all draws.

    ``together`` as in ``every_draw``.
    """
    totals: list[Tensor] = []
    for chance, parts in every_draw(run, together=together):
        if not totals:
            totals = [torch.zeros_like(part) for part in parts]
        for total, part in zip(totals, parts, strict=True):
            total.add_(chance * part.detach())
    return tuple(totals)


def _outcomes(p: Tensor, shape: tuple[int, ...], together: bool) -> list[Outcome]:
    if p.isnan().any():
        raise ValueError(
            "a draw was asked for with NaN probabilities; for a finite gradient that means weights "
            "that are negative or NaN"
        )
    coins = shape == tuple(p.shape)
    if together or not shape:
        pieces = _pieces(_breakpoints(p, coins))
        return [(length, torch.full(shape, at, dtype=torch.float64)) for length, at in pieces]
    draws = p.reshape(-1, 1) if coins else p.reshape(-1, p.shape[-1])
    each = [_pieces(_breakpoints(q, coins)) for q in draws]
    found = []
    for combination in product(*each):
        chance = 1.0
        for length, _ in combination:
            chance *= length
        points = torch.tensor([at for _, at in combination], dtype=torch.float64)
        found.append((chance, points.view(shape)))
    return found


def _breakpoints(p: Tensor, coins: bool) -> Tensor:
    p = p.double().cpu()
    if not coins:
        p = p.cumsum(-1)
        p = p - p.floor()
    return p.clamp(0, 1).flatten()


def _pieces(breakpoints: Tensor) -> list[tuple[float, float]]:
    """Lengths and midpoints of the intervals of [0, 1) between breakpoints."""
    points = torch.cat([breakpoints, breakpoints.new_tensor([0.0, 1.0])])
    points = torch.unique_consecutive(points.sort().values)
    return [(high - low, (low + high) / 2) for low, high in pairwise(points.tolist())]
