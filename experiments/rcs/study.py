"""Why does RCS, optimal on paper, not dominate? Its literal form, a corrected one, and others.

The paper's answer is a conjecture: sketches are local. Another cause can be computed: in a layer
with more outputs than inputs the literal RCS never draws what W cannot see, and dW is biased.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..cifar import model
from ..cifar.study import FINDINGS, CifarCell, CifarStudy
from ..lab import claims
from ..lab.claims import Claim, all_layers, pairs
from ..lab.selection import PointResult
from ..lab.study import Reading
from ..lab.sweep import Figure, Point, Protocol, Run, Sweep
from ..methods import EXACT, METHODS
from .bias import LayerBias, measure_bias, read_bias, write_bias

MOMENTS = (0.0, 0.1, 0.5, 1.0)
"""When the bias is measured, as a share of all steps."""
MEASURED = ("rcs", "rcs-corrected", "gsv")
_LITERAL, _CORRECTED = all_layers("rcs"), all_layers("rcs-corrected")

CLAIMS = (
    Claim(
        "rcs",
        "Removing the bias helps: the corrected RCS is above the literal one.",
        pairs(_CORRECTED, _LITERAL),
        clause="ours",
    ),
    Claim(
        "rcs",
        "The literal RCS dominates G-SV, DS and ℓ1, as its optimality suggests.",
        pairs(_LITERAL, all_layers("gsv", "ds", "l1")),
        clause="the paper's theory",
    ),
    Claim(
        "rcs",
        "The corrected RCS dominates G-SV, DS and ℓ1.",
        pairs(_CORRECTED, all_layers("gsv", "ds", "l1")),
        clause="ours",
    ),
)


@dataclass(frozen=True, kw_only=True)
class RcsStudy(CifarStudy):
    preset_prefix = ""

    def measure(self, sweep: Sweep, points: Sequence[Point], out: Path) -> None:
        write_bias(measured(sweep.protocol), out)

    def facts(self, reading: Reading) -> dict[str, Any]:
        bias = read_bias(reading.out)
        points = {s.point.key: s for s in reading.points}
        return {
            **super().facts(reading),
            "off": list(bias_by_budget(bias)),
            "rounding": max(b.error for b in bias if b.method != "rcs"),
            "rare": span([b.rare for b in bias if b.method == "rcs-corrected"]),
            "comparisons": list(comparisons(points)),
            **bias_table(bias),
        }


def measured(protocol: Protocol) -> list[LayerBias]:
    """Trains the model exactly, once, and measures all layers at a few moments on the way."""
    cell = protocol.cell(METHODS[EXACT], 1.0)
    assert isinstance(cell, CifarCell)
    middle = sorted(protocol.learning_rates)[len(protocol.learning_rates) // 2]
    methods = [(name, budget) for name in MEASURED for budget in protocol.budgets]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer = model.trainer_of(Run(cell, middle, protocol.seeds[0]), torch.device("cpu"))
        layers, batch = list(model.layer_shapes(cell)), trainer.feed.first()
        found: list[LayerBias] = []
        for moment in sorted({round(share * trainer.recipe.steps) for share in MOMENTS}):
            trainer.run_to(moment)
            found += measure_bias(trainer.model, batch, layers, methods, moment)
        return found
    finally:
        torch.set_num_threads(threads)


def bias_by_budget(bias: Sequence[LayerBias]) -> Iterator[dict[str, Any]]:
    """How far off the literal RCS is, in layers that expand and in others."""
    literal = [b for b in bias if b.method == "rcs"]
    for budget in sorted({b.budget for b in literal}):
        own = [b for b in literal if b.budget == budget]
        wide = [b for b in own if b.shape == "expands"]
        yield {
            "budget": budget,
            "wide": span([b.error for b in wide]),
            "rows": span([b.row for b in wide]),
            "other": span([b.error for b in own if b.shape != "expands"]),
        }


def span(values: Sequence[float]) -> str:
    return f"{min(values):.2g} to {max(values):.2g}" if values else "(no such layer)"


def comparisons(points: Mapping[claims.Key, PointResult]) -> Iterator[dict[str, Any]]:
    """Each comparison of the claims, at each budget alone."""
    words = {
        claims.CONFIRMED: "is above",
        claims.NOT_CONFIRMED: "is below",
        claims.UNDECIDED: "cannot be told from",
    }
    for comparison in (comparison for claim in CLAIMS for comparison in claim.comparisons):
        for budget in sorted({key[2] for key in points if key[:2] == comparison.better}):
            own = {key: s for key, s in points.items() if key[2] == budget}
            if outcome := claims.check(comparison, own):
                better, worse = (METHODS[x[0]].label for x in (comparison.better, comparison.worse))
                text = f"{better} {words[outcome.verdict]} {worse}"
                yield {"budget": budget, "text": text, "outcome": outcome}


def bias_table(bias: Sequence[LayerBias]) -> dict[str, Any]:
    """A line for each layer, at the lowest budget."""
    lowest = min(b.budget for b in bias)
    shown = [b for b in bias if b.budget == lowest]
    lines = []
    for name in dict.fromkeys(b.layer for b in shown):
        own = {m: [b for b in shown if (b.layer, b.method) == (name, m)] for m in MEASURED}
        literal = sorted(own["rcs"], key=lambda b: b.step)
        last = literal[-1]
        worst = [max(b.error for b in own[m]) for m in MEASURED[1:]]
        line = [name, str(last.rows), str(last.n), str(last.d), last.shape]
        line += [f"{b.error:.1e}" for b in literal] + [f"{last.row:.1e}", f"{last.unseen:.1%}"]
        lines.append([*line, *(f"{w:.1e}" for w in worst)])
    return {"lowest": lowest, "steps": sorted({b.step for b in shown}), "bias_lines": lines}


RCS = RcsStudy(
    name="rcs",
    help="is the bias of dW why RCS does not dominate?",
    title="The RCS question on a vision transformer",
    published={"cpu": "rcs-cpu"},
    protocol=Protocol(CifarCell(), learning_rates=(-4, -2, 0, 2, 4), widen=1),
    findings=FINDINGS,
    figures={"rcs": Figure("rcs", "RCS literal and corrected", 100, highest=None)},
    claims=CLAIMS,
    sort_by=("model", "size", "epochs"),
)
