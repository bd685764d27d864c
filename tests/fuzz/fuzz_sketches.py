"""Random sketches and compositions of them."""

from __future__ import annotations

import random
from typing import Any

import sketchprop as sp
from fuzz_base import pick
from sketchprop.sketches import Every, ForwardRows, Planner

COLUMNS = (sp.ColumnMask, sp.L1, sp.L2, sp.Variance, sp.Diagonal)
SPECTRAL = (sp.GradientSVD, sp.RankConstrained)


def budget(rng: random.Random) -> float | int:
    return pick(rng, 0.1, 0.3, 0.5, 0.7, 0.95, 1.0, 1, 2, 3, 100)


def columns(rng: random.Random) -> sp.Sketch:
    kind = pick(rng, *COLUMNS)
    options = _common(rng)
    if kind in (sp.L1, sp.L2, sp.Variance) and rng.random() < 0.3:
        options["root"] = True
    return kind(budget(rng), **options)


def rows(rng: random.Random) -> sp.Sketch:
    if rng.random() < 0.15:
        return sp.SampleMask(budget(rng), **_common(rng))
    options = _common(rng)
    options["by"] = pick(rng, "gradient", "gradient", "gradient_input", "uniform", "nonzero")
    options["unit"] = pick(rng, None, None, "sample", "token")
    if rng.random() < 0.3:
        options["batch_first"] = False
    return sp.Rows(budget(rng), **options)


def spectral(rng: random.Random) -> sp.Sketch:
    return pick(rng, *SPECTRAL)(budget(rng), **_common(rng))


def forward_rows(rng: random.Random) -> sp.Sketch:
    options = {"sampling": pick(rng, "fixed", "independent"), "by": pick(rng, "input", "uniform")}
    return ForwardRows(budget(rng), **options)


def single(rng: random.Random) -> sp.Sketch:
    roll = rng.random()
    if roll < 0.1:
        return sp.ElementMask(budget(rng), sampling=pick(rng, "fixed", "independent"))
    if roll < 0.2:
        return forward_rows(rng)
    return pick(rng, columns, columns, rows, rows, spectral)(rng)


def pair(rng: random.Random) -> sp.Split:
    sides = [pick(rng, None, single(rng), single(rng)) for _ in range(2)]
    try:
        return sp.Split(input=sides[0], weight=sides[1], exact_bias=rng.random() < 0.7)
    except ValueError:  # a pair that is refused, with a message
        return pair(rng)


def of_layer(rng: random.Random) -> sp.Sketch | sp.Split:
    return pair(rng) if rng.random() < 0.2 else single(rng)


def planner(rng: random.Random, sketch: Any) -> Planner | None:
    """Now and then one that can serve the sketch."""
    if rng.random() < 0.7:
        return None
    made: Planner = pick(rng, Every(1, rows=0.5), Every(1, rows=2), Every(2), Every(3, rows=0.4))
    sides = sketch.sides if isinstance(sketch, sp.Split) else [sketch]
    return None if all(made.refusal(side) for side in sides) else made


def tokens(rng: random.Random) -> sp.Tokens:
    options: dict[str, Any] = {"save": pick(rng, "activations", "input")}
    for name in ("queries", "keys"):
        if rng.random() < 0.5:
            options[name] = pick(rng, 0.2, 0.4, 0.7, 1.0, 1, 2, 50)
    return sp.Tokens(budget(rng), **options)


def _common(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["sampling"] = "independent"
    if rng.random() < 0.3:
        options["exact_bias"] = False
    return options
