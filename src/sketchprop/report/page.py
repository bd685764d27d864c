"""The page: the answer, the figures, the layers, how it was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape

from ..meters import MeasureReport, PlanReport
from ..meters.measure import plain_data
from .sections import (
    flops_section,
    memory_section,
    node_section,
    plan_section,
    variance_section,
    verdict_section,
)
from .setup import setup_facts
from .style import STYLE
from .tables import facts_table, prose
from .words import GLOSSARY, amount, answer, explanation, ratio


def html_report(
    measured: MeasureReport,
    plans: Sequence[PlanReport] = (),
    *,
    title: str = "sketchprop report",
    facts: Mapping[str, str] | None = None,
) -> str:
    """A whole HTML document in one string, that needs nothing from elsewhere.

    ``plans`` adds, for each sketch, which layers get faster. ``facts`` say how it was measured:
    by default versions and machine; the batches, draws and rounds of ``measured`` are added.
    All text is escaped; a layer may have any name.
    """
    known = {**(setup_facts() if facts is None else facts), **_effort(measured)}
    sections = [
        verdict_section(measured),
        variance_section(measured),
        node_section(measured),
        flops_section(measured),
        memory_section(measured),
        *(plan_section(planned) for planned in plans),
        _method(measured, plans, known),
    ]
    body = "\n".join(section for section in sections if section)
    about = " · ".join(_sketches(measured, plans))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<header><h1>{escape(title)}</h1>\n<p class="about">{about}</p></header>\n'
        f"{_answer(measured)}\n{_cards(measured)}\n{body}\n</main>\n</body>\n</html>\n"
    )


def _sketches(measured: MeasureReport, plans: Sequence[PlanReport]) -> list[str]:
    used = [line.sketch for line in measured.variance.layers]
    names = dict.fromkeys(used or [repr(planned.sketch) for planned in plans])
    return [f"<code>{escape(name)}</code>" for name in names]


def _answer(measured: MeasureReport) -> str:
    style, short = answer(measured)
    sentences = "".join(f"<p>{prose(text)}</p>" for text in explanation(measured))
    return f'<div class="verdict {style}"><strong>{escape(short)}</strong>{sentences}</div>'


def _cards(measured: MeasureReport) -> str:
    before, after = measured.exact_memory.total, measured.sketched_memory.total
    verdict, times, flops = measured.verdict, measured.times, measured.flops
    cards = []
    if times is not None:
        seconds = f"{amount(times.sketched, 's')}, exact {amount(times.exact, 's')}"
        cards.append(("Time of a step", ratio(times.ratio), seconds))
    error = f"{verdict.error:.2g}" if math.isfinite(verdict.error) else "?"
    cards += [
        (
            "Backward memory",
            ratio(after / max(1, before)),
            f"{amount(after, 'B')}, exact {amount(before, 'B')}",
        ),
        ("Gradient variance", ratio(verdict.steps), f"V/σ² = {measured.relative}"),
        (
            "Backward FLOPs",
            ratio(flops.kept),
            f"{amount(flops.sketched_backward, '')}, exact {amount(flops.exact_backward, '')}",
        ),
        (f"In all, by {verdict.basis}", ratio(verdict.change), f"± {error}; below 1 it pays"),
    ]
    shown = "".join(
        f'<div class="card"><h3>{escape(name)}</h3><div class="figure">{escape(figure)}</div>'
        f"<p>{prose(text)}</p></div>"
        for name, figure, text in cards
    )
    return f'<div class="cards">{shown}</div>'


def _effort(measured: MeasureReport) -> dict[str, str]:
    effort = {
        "batches": str(measured.variance.batches),
        "draws for each batch": str(measured.variance.draws),
    }
    if measured.times is not None:
        rounds = measured.times.rounds
        effort["timed steps"] = f"{rounds} exact and {rounds} sketched in turns, medians"
    return effort


def _method(measured: MeasureReport, plans: Sequence[PlanReport], facts: Mapping[str, str]) -> str:
    data = {
        "facts": dict(facts),
        "measure": measured.as_dict(),
        "plans": [planned.as_dict() for planned in plans],
    }
    text = json.dumps(plain_data(data), indent=1, ensure_ascii=False, allow_nan=False)
    words = "".join(
        f"<dt>{escape(word)}</dt><dd>{escape(meaning)}</dd>" for word, meaning in GLOSSARY.items()
    )
    return (
        "<section><h2>How it was measured</h2>"
        '<p class="note">Times hold for this machine and these shapes; variances for these '
        "parameters, so a model measured after training may answer differently.</p>"
        f"{facts_table(facts)}"
        f"<details><summary>What the words mean</summary><dl>{words}</dl></details>"
        "<details><summary>All numbers, as JSON</summary>"
        f'<pre id="numbers">{escape(text, quote=False)}</pre></details></section>'
    )
