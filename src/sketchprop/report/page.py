"""The page: the answer, the figures, the layers, how it was measured."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import torch

from .._version import __version__
from ..core.stopwatch import cpu_name
from ..core.table import plain_data
from ..meters import MeasureReport, PlanReport
from .pictures import as_svg, noise_chart, plan_chart, require_matplotlib


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
    facts = dict(setup_facts() if facts is None else facts)
    facts["batches"] = str(measured.variance.batches)
    facts["draws for each batch"] = str(measured.variance.draws)
    if measured.times is not None:
        rounds = measured.times.rounds
        facts["timed steps"] = f"{rounds} exact and {rounds} sketched in turns, medians"
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


def setup_facts(device: torch.device | None = None) -> dict[str, str]:
    """Versions, processor, threads and the time of day, as words.

    >>> setup_facts()["sketchprop"] == __version__
    True
    """
    facts = {
        "when": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "sketchprop": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": f"{cpu_name()}, {os.cpu_count()} cores",
        "threads": str(torch.get_num_threads()),
    }
    if device is not None and device.type != "cpu":
        name = getattr(torch.get_device_module(device), "get_device_name", lambda _: "")
        facts["device"] = f"{device} {name(device)}".strip()
    return facts


def _template() -> Any:
    import jinja2  # torch requires it, too
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["svg"] = lambda chart: Markup(as_svg(chart))
    source = files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(source)
