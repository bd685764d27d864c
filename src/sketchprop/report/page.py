"""The page: the answer, the figures, the layers, how it was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from ..core.table import Column, plain_data
from ..meters import MeasureReport, PlanReport
from .pictures import as_svg, noise_chart, plan_chart, require_matplotlib
from .setup import setup_facts


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
    ``title``: of the page.
    All text is escaped; a layer may have any name. matplotlib draws: ``sketchprop[cli]`` has it.
    """
    require_matplotlib()
    facts = {**(setup_facts() if facts is None else facts), **_effort(measured)}
    charts = [noise_chart(measured), *map(plan_chart, plans)]
    sketches = [line.sketch for line in measured.variance.layers]
    numbers = {"facts": facts, "measure": measured.as_dict(), "plans": [p.as_dict() for p in plans]}
    page: str = _template().render(
        title=title,
        sketches=list(dict.fromkeys(sketches or [repr(plan.sketch) for plan in plans])),
        answer=measured.answer(),
        explanation=measured.explanation(),
        figures=measured.figures().cells(),
        charts=[chart for chart in charts if chart.table.rows],
        facts=facts,
        numbers=json.dumps(plain_data(numbers), indent=1, ensure_ascii=False, allow_nan=False),
    )
    return page


def _template() -> Any:
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise ImportError(
            "the HTML report needs jinja2, which torch requires too: pip install jinja2"
        ) from error

    def words(column: Column) -> Markup:
        return Markup(' class="words"' if column.align == "<" else "")

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {
        "prose": _prose,
        "svg": lambda chart: Markup(as_svg(chart)),
        "words": words,
    }
    source = files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(source)


def _prose(text: str) -> str:
    """No line ends between a number and its sign or unit."""
    for sign in (" ×", " ± ", " %", " ms", " MB", " kB"):
        text = text.replace(sign, sign.replace(" ", "\u00a0"))
    return text


def _effort(measured: MeasureReport) -> dict[str, str]:
    effort = {
        "batches": str(measured.variance.batches),
        "draws for each batch": str(measured.variance.draws),
    }
    if measured.times is not None:
        rounds = measured.times.rounds
        effort["timed steps"] = f"{rounds} exact and {rounds} sketched in turns, medians"
    return effort
