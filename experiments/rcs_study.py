"""Why does RCS, optimal on paper, not dominate? Its literal form, a corrected one, and others.

The paper's answer is a conjecture: sketches are local. Another cause can be computed: in a layer
with more outputs than inputs the literal RCS never draws what W cannot see, and dW is biased.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from . import cifar, cifar_study, claims
from .bias import TABLE, LayerBias, measure_bias, read_bias, write_bias
from .cifar_study import SCHEMA, VIT, CifarCell, CifarProtocol, cost_part
from .claims import Claim, all_layers, pairs
from .command import out_folder, run_study
from .methods import EXACT, METHODS
from .selection import Summary
from .store import Row
from .sweep import Figure, Protocol, Run, Sweep
from .training import Trainer, initialised

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


def told(protocol: Protocol) -> list[str]:
    """As the study of the transformer, with other methods."""
    return [
        cifar_study.told(protocol)[0],
        "Every linear layer is sketched except the classifier, the bias gradient from the sketch. "
        "RCS is the paper's formula, literally (`paper=True`); the corrected one gives every "
        "direction of G a chance (`RankConstrained` as the library has it). DS is literal too.",
    ]


RCS = replace(
    VIT,
    name="rcs",
    title="The RCS question on a vision transformer",
    figures={"rcs": Figure("rcs", "RCS literal and corrected", 100, highest=None)},
    schema=SCHEMA,
    claims=CLAIMS,
    told=told,
)


def run(options: argparse.Namespace) -> int:
    sweep = RCS.load(options.preset)
    if options.plan:
        return run_study(RCS, options, list(RCS.figures), extras=True)
    out = out_folder(RCS, sweep, options)
    if options.stored:
        found = read_bias(out)
    else:
        found = measured(sweep)
        write_bias(found, out)
    study = replace(RCS, opening=partial(opening, found), more=partial(further, found))
    return run_study(study, options, list(RCS.figures), extras=True)


def measured(sweep: Sweep) -> list[LayerBias]:
    """Trains the model exactly, once, and measures all layers at a few moments on the way."""
    protocol = sweep.protocol
    assert isinstance(protocol, CifarProtocol)
    cell = protocol.cell(METHODS[EXACT], 1.0, "all")
    middle = sorted(protocol.learning_rates)[len(protocol.learning_rates) // 2]
    one = Run(cell, middle, protocol.seeds[0])
    pictures = cifar.load(cell.train_rows, cell.validation_rows, cell.test_rows)
    methods = [(name, budget) for name in MEASURED for budget in protocol.budgets]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            model = initialised(lambda: cifar.model_of(cell), one.seed)
            trainer = Trainer(model, pictures, cifar.recipe_of(one), one.seed, torch.device("cpu"))
            trainer.start()
            return _along(trainer, cell, methods)
    finally:
        torch.set_num_threads(threads)


def _along(
    trainer: Trainer, cell: CifarCell, methods: Sequence[tuple[str, float]]
) -> list[LayerBias]:
    layers, batch = list(cifar.layer_shapes(cell)), trainer.first_batch()
    found: list[LayerBias] = []
    for moment in sorted({round(share * trainer.total) for share in MOMENTS}):
        while trainer.steps < moment:
            trainer.train_step()
        found += measure_bias(trainer.model, batch, layers, methods, moment)
    return found


def opening(
    bias: Sequence[LayerBias], found: Mapping[str, Sequence[Summary]], rows: Sequence[Row]
) -> list[str]:
    """The answer, from the numbers below."""
    points = {s.point.key: s for group in found.values() for s in group}
    lines = [_bias_sentence(bias), *_accuracy_sentences(points)]
    return ["## What came out", "\n".join(f"- {line}" for line in lines)]


def _bias_sentence(bias: Sequence[LayerBias]) -> str:
    literal = [b for b in bias if b.method == "rcs"]
    rest = [b.error for b in bias if b.method != "rcs"]
    rare = [b.rare for b in bias if b.method == "rcs-corrected"]
    parts = []
    for budget in sorted({b.budget for b in literal}):
        own = [b for b in literal if b.budget == budget]
        wide = [b for b in own if b.shape == "expands"]
        other = [b.error for b in own if b.shape != "expands"]
        parts.append(
            f"At {budget:g} the mean of the literal RCS's dW is off by "
            f"{_range([b.error for b in wide])} of ‖dW‖ in layers that expand (row by row by "
            f"{_range([b.row for b in wide])} in the median), by {_range(other)} in the others."
        )
    return (
        f"{' '.join(parts)} Where more atoms are kept than W can see, the rest of the draws go to "
        "the unseen ones, and the bias is gone; in square layers it is of directions that W sees "
        "less than rounding. The corrected RCS and G-SV are off by at most "
        f"{max(rest):.1e}, which is rounding. Leaving out the atoms that are drawn less than once "
        f"in 1000 steps, the corrected RCS is off by {_range(rare)}."
    )


def _range(values: Sequence[float]) -> str:
    if not values:
        return "(no such layer)"
    return f"{min(values):.2g} to {max(values):.2g}"


def _accuracy_sentences(points: Mapping[claims.Key, Summary]) -> list[str]:
    lines = []
    for claim in CLAIMS:
        for comparison in claim.comparisons:
            for budget in sorted({key[2] for key in points if key[:2] == comparison.better}):
                own = {key: s for key, s in points.items() if key[2] == budget}
                outcome = claims.check(comparison, own)
                if outcome is None:
                    continue
                better, worse = (METHODS[x[0]].label for x in (comparison.better, comparison.worse))
                word = {
                    claims.CONFIRMED: "is above",
                    claims.NOT_CONFIRMED: "is below",
                    claims.UNDECIDED: "cannot be told from",
                }[outcome.verdict]
                lines.append(
                    f"At {budget:g} {better} {word} {worse}: {outcome.difference:+.2f} points, "
                    f"p = {outcome.p_above:.3g} for above, {outcome.p_below:.3g} for below, "
                    f"{outcome.seeds} seeds."
                )
    return lines


def further(
    bias: Sequence[LayerBias], found: Mapping[str, Sequence[Summary]], rows: Sequence[Row]
) -> list[str]:
    return [*_bias_part(bias), *cost_part(found, rows)]


def _bias_part(bias: Sequence[LayerBias]) -> list[str]:
    """A line for each layer, at the lowest budget."""
    lowest = min(b.budget for b in bias)
    shown = [b for b in bias if b.budget == lowest]
    steps = sorted({b.step for b in shown})
    heads = [f"step {step}" for step in steps]
    lines = [
        f"| layer | rows | n | d | | RCS, {' | '.join(heads)} | its rows, {heads[-1]} | unseen, "
        f"{heads[-1]} | corrected, at most | G-SV, at most |",
        "|---" * (9 + len(heads)) + "|",
    ]
    for name in dict.fromkeys(b.layer for b in shown):
        own = {m: [b for b in shown if (b.layer, b.method) == (name, m)] for m in MEASURED}
        literal = sorted(own["rcs"], key=lambda b: b.step)
        last = literal[-1]
        worst = [max(b.error for b in own[m]) for m in MEASURED[1:]]
        lines.append(
            f"| {name} | {last.rows} | {last.n} | {last.d} | {last.shape} | "
            f"{' | '.join(f'{b.error:.1e}' for b in literal)} | {last.row:.1e} | "
            f"{last.unseen:.1%} | {' | '.join(f'{w:.1e}' for w in worst)} |"
        )
    text = (
        "‖E[dW] - dW‖/‖dW‖ by layer, on the exact gradients of one batch, while the model trains "
        f"exactly; budget {lowest:g}. The mean over the draw is computed, not sampled: every atom "
        "with a positive probability counts in full. n outputs, d inputs; a layer expands where "
        "n > d. 'Its rows': the same for single rows of dW, the median; AdamW scales each weight "
        "by its own gradients, so a row of small norm counts as much as another. 'Unseen' is the "
        "share of ‖G‖² that the literal RCS never draws. All budgets, and the error without rare "
        f"atoms: [{TABLE}]({TABLE})."
    )
    return ["## The bias of dW", text, "\n".join(lines)]
