"""Dampened or amplified: noise along the depth of the paper's three networks, after some training.

At each layer or block: noise over gradient as it arrives, through the exact Jacobian and with its
own draws; what noise is multiplied by, beside the bound by operator norms.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import nn

import sketchprop as sp
from sketchprop import zoo
from sketchprop.cli.expressions import parse_sketch
from sketchprop.core.table import plain_data
from sketchprop.meters.noise.amplification import Edge, measure_edges

from .. import data
from ..cifar.bagnet import BagNet
from ..cifar.model import sketched
from ..lab.figures import label_axes, picture
from ..lab.noise import noise_batches
from ..lab.pages import made_on, read_json, write_json
from ..lab.problem import Problem
from ..lab.study import MeasuredStudy
from ..problems import drawer, pixels

SKETCHES: dict[str, tuple[str, str, Any]] = {
    "columns": ("L1(0.2)", "C1", sketched),
    "one draw of samples": ("Rows(0.2)", "C4", lambda module, name: True),
    "kept tokens": ("Tokens(0.2)", "C2", None),
}
"""Each with its colour and the layers that it takes: of columns those of the paper."""
GAINS = {"bound": ("k--", "bound ‖J‖²"), "white_gain": ("k:", "white noise"),
         "signal_gain": ("k-", "gradient")}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    steps: int = 400
    depth: int = 8
    rows: int = 64
    batches: int = 2
    draws: int = 16


NETWORKS: dict[str, tuple[Callable[[int], nn.Module], str, float]] = {
    "MLP": (lambda depth: zoo.mlp(784, 64, 64, 64, 10), "[246]", 0.1),
    "ViT": (lambda depth: zoo.ViT(dim=96, depth=depth, heads=4, hidden=192), "blocks.?", 1e-3),
    "BagNet": (lambda depth: BagNet(width=16, blocks=(depth // 4,) * 4), "stages.?.?", 0.05),
}
"""Of a depth, the modules at whose ends noise is taken, the rate of exact training."""


def problem(name: str, settings: Settings) -> Problem:
    digits = name == "MLP"
    pictures = data.mnist() if digits else data.cifar10()
    ready = (lambda images: images.flatten(1).float().div_(255)) if digits else pixels
    return Problem(
        name=name, title=name, model=partial(NETWORKS[name][0], settings.depth),
        draw=drawer(*pictures, ready), loss=F.cross_entropy, validation=list, test=list,
        batch_size=settings.rows, inner=sketched, adam=name == "ViT",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AmplificationStudy(MeasuredStudy):
    def measure(self, settings: Any, out: Path, options: argparse.Namespace) -> None:
        """A network at a time; those that are stored are not measured again."""
        path = out / "results.json"
        stored = read_json(path, {"machine": made_on(), "edges": {}})
        for name, (_, pattern, rate) in NETWORKS.items():
            if name in stored["edges"]:
                continue
            task = problem(name, settings)
            trainer = task.trainer(rate, 0, [settings.steps + 1])
            trainer.run_to(settings.steps)
            batches, model = noise_batches(task, settings.batches), trainer.model
            names = [n for n, _ in model.named_modules() if fnmatch(n, pattern)]
            stored["edges"][name] = found = {}
            for label, (sketch, _, rule) in SKETCHES.items():
                if rule is None and name != "ViT":
                    continue
                sp.sketch_(model, parse_sketch(sketch), rule)
                edges = measure_edges(model, task.loss_of, batches, names, draws=settings.draws)
                found[label] = plain_data(edges)
                sp.unsketch_(model)
            write_json(path, stored)

    def results(self, settings: Any, out: Path) -> tuple[list[Path], dict[str, Any]]:
        stored = read_json(out / "results.json")
        edges = {
            name: {label: [Edge(**line) for line in lines] for label, lines in found.items()}
            for name, found in stored["edges"].items()
        }
        spans = {n: {label: _spans(lines) for label, lines in f.items()} for n, f in edges.items()}
        facts = {"edges": edges, "spans": spans, "machine": stored["machine"]}
        written = picture(out, "amplification", 2 * len(edges), partial(_draw, edges), columns=3)
        return written, {**facts, "sketches": SKETCHES}


def _spans(lines: Sequence[Edge]) -> dict[str, list[float]]:
    """The least and the most over edges at which noise arrives."""
    noisy = [edge for edge in lines if edge.at_output] or list(lines)
    draws = sorted((1 + edge.with_draw) / (1 + edge.at_input) for edge in noisy)
    factors = sorted(edge.factor for edge in noisy)
    return {"draws": [draws[0], draws[-1]], "factor": [factors[0], factors[-1]]}


def _draw(edges: dict[str, dict[str, list[Edge]]], panels: Sequence[Any]) -> None:
    """Above what noise is, below what it is multiplied by; backward goes from left to right."""
    for number, (name, found) in enumerate(edges.items()):
        above, below = panels[number], panels[number + len(edges)]
        names = [edge.name for edge in next(iter(found.values()))][::-1]
        for label, lines in found.items():
            look = {"color": SKETCHES[label][1], "marker": "o", "ms": 3, "label": label}
            above.plot(names, [e.with_draw for e in reversed(lines)], **look)
            below.plot(names, [e.noise_gain or math.nan for e in reversed(lines)], **look)
        for field, (style, label) in GAINS.items():
            gains = [getattr(e, field) for e in reversed(lines)]
            below.plot(names, gains, style, lw=1, label=label)
        for axes, y in ((above, "noise over gradient"), (below, "‖·‖² is multiplied by")):
            axes.set_yscale("log")
            axes.tick_params("x", rotation=30)
            label_axes(axes, name, "backward →", y)
    panels[1].legend(fontsize=6)
    panels[len(edges) + 1].legend(fontsize=6)


AMPLIFICATION = AmplificationStudy(
    name="amplification",
    help="noise along the depth: dampened or amplified",
    published={"cpu": "amplification"},
    settings=Settings(),
)
