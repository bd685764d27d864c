"""Fills in the measured numbers of README and of the pages, so that nobody types one.

    python docs/show_numbers.py

``<!--= gain("vit", "tokens-0.2", 64) -->22 % less time<!--/-->``: what stands between the two
comments is what the expression gives now. It calls a function of this file, which reads the stored
results of a command. A line of text does not begin with such a comment, or it would be HTML.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from docs_pages import pages  # noqa: E402
from experiments.depth.study import figures, final_scores  # noqa: E402
from experiments.lab.pages import number_text, read_json, table  # noqa: E402
from experiments.pay.facts import facts, numbers  # noqa: E402
from experiments.pay.outcome import Curve, Outcome  # noqa: E402
from experiments.pay.predictions import read_option  # noqa: E402
from experiments.pay.study import PAY  # noqa: E402
from sketchprop.layers.depth import Factors  # noqa: E402
from sketchprop.meters.advising.advice import between  # noqa: E402
from sketchprop.meters.words import change_in_words  # noqa: E402

RESULTS, BENCHMARKS = ROOT / "docs/results", ROOT / "benchmarks/results"
MISSING = "not measured yet"
_FILLED = re.compile(r"(<!--= (.+?) -->)(\n?).*?(<!--/-->)", re.S)


def filled(text: str) -> str:
    """A page with the numbers that are stored now."""

    def one(match: re.Match[str]) -> str:
        value = eval(match[2], globals())  # written by us, on our own pages
        return f"{match[1]}{match[3]}{value}{match[3]}{match[4]}"

    return _FILLED.sub(one, text)


# -- whole trainings: python -m experiments pay; predictions: python -m experiments advise ----


@cache
def _outcomes() -> dict[str, Outcome]:
    os.chdir(ROOT)  # studies find what others stored from here
    return PAY.outcomes(PAY.contests("cpu")[1], RESULTS / "pay")


@cache
def _facts() -> dict[str, Any]:
    return facts(_outcomes(), RESULTS / "pay")


def _part(task: str) -> dict[str, Any]:
    return next(part for part in _facts()["parts"] if part["task"].name == task)


def _curves(task: str) -> list[Curve]:
    """Of a task; none while it was not trained."""
    return _outcomes()[task].curves if task in _outcomes() else []


def pay(task: str, way: str, batch: int, what: str) -> str:
    """``step``, ``same``, ``told``, ``end``, ... of one method, as the page of ``pay`` says it."""
    known = any((c.way.name, c.batch) == (way, batch) for c in _curves(task))
    return numbers(_outcomes()[task], way, batch)[what] if known else MISSING


def gain(task: str, way: str = "", batch: int = 0, best: bool = False) -> str:
    """Time to equal quality over exact training at the same batch size (or at its best one).
    Without a method: the kept tokens that did best."""
    found = []
    for curve in _curves(task):
        if (curve.way.name, curve.batch) == (way, batch) or (curve.way.kept and not way):
            outcome = _outcomes()[task]
            control = outcome.control if best else outcome.same_batch(curve)
            found.append(outcome.ratio(curve, control, beyond=True))
    if not found:
        return MISSING
    shown = min((r for r in found if r), key=lambda ratio: ratio.value, default=None)
    if shown is None or not math.isfinite(shown.value):
        return "no gain"
    doubt = ", not certain" if shown.value < 1 <= shown.high else ""
    return change_in_words(shown.value, "time") + doubt


def padded(task: str) -> str:
    """A step that skips the zero rows, over one that does not."""
    return f"{change_in_words(float(_part(task)['step']), 'time')} a step"


def evidence(*tasks: str) -> str:
    """All methods on these tasks against exact training at the same and at its best batch size."""
    lines = []
    for task in tasks:
        outcome, label = _outcomes().get(task), ""
        for curve in outcome.curves if outcome else ():
            same = outcome.same_batch(curve)
            if same is None or curve is same or not curve.way.sketch:
                continue
            ratios = [outcome.ratio(curve, control) for control in (same, outcome.control)]
            cells = [r.text() if r else "" for r in ratios]
            name = _part(task)["task"].label
            line = [f"[{name}](results/pay/README.md#{task})" if name != label else ""]
            method = curve.way.label.split()[0]
            line += [f"`{method}`", str(curve.batch), f"{outcome.cost(curve):.2f}"]
            lines.append([*line, *cells])
            label = name
    head = ["task", "method", "batch", "step", "same batch", "best batch"]
    return table(head, lines)


def headlines() -> str:
    """Every task with the method that it is there for, as the page of ``pay`` begins."""
    lines = [
        [f"[{p['task'].label}](pay/README.md#{p['task'].name})", p["winner"], p["same"], p["ratio"]]
        for p in _facts()["parts"]
        if p["contest"].trained
    ]
    return table(["task", "method", "time, same batch", "time, best batch"], lines)


def ends(*asked: tuple[str, int]) -> str:
    """Where exact training, the tuner and VCAS end, and what their steps cost."""
    lines = []
    for task, batch in asked:
        names = ("exact", "tuner", "vcas")
        cells = [f"{pay(task, n, batch, 'step')}, {pay(task, n, batch, 'end')} %" for n in names]
        lines.append([f"{_part(task)['task'].label}, batch {batch}", *cells])
    return table(["task", "exact", "`Tuner`", "VCAS"], lines)


def steps(*asked: tuple[str, str]) -> str:
    """Time of a step over an exact one by the size of the batch, of each task and sketch."""
    costs = {task: read_json(RESULTS / f"pay/{task}/times.json")["costs"] for task, _ in asked}
    sizes = sorted({int(key[1:]) for own in costs.values() for key in own if key[0] == "/"})
    lines = []
    for task, sketch in asked:
        own = costs[task]
        of = [f"{own[f'{sketch}/{n}'] / own[f'/{n}']:.2f}" if f"/{n}" in own else "" for n in sizes]
        shown = sketch.replace(", share='measured'", "")
        lines.append([f"{_part(task)['task'].label}, `{shown}`", *of])
    return table(["batch size", *map(str, sizes)], lines)


def told(what: str) -> str:
    """Of what ``advise`` said before whole trainings: how many gains were ``promised`` and
    ``kept``; how many intervals held what was measured (``inside``), of how many ``pairs``."""
    found = _facts()["foretold"][what]
    return str(found if isinstance(found, int) else len(found))


def answer(task: str) -> str:
    """What ``advise`` says of a task."""
    found = read_json(RESULTS / "advise/results.json")[task]
    best = read_option(next(o for o in found["options"] if o["line"] == found["line"]))
    said = f"{change_in_words(found['change'], 'time')} to the same quality ({between(best)})"
    return f"```text\nIt pays: {said}.\n\n    {found['line']}\n\nWhy: {best.numbers}.\n```"


# -- noise: python -m experiments noise, depth; the location page is archived -----------------


def _range(values: Iterable[float]) -> str:
    found = sorted(values)
    return " to ".join(dict.fromkeys(number_text(v, 2) for v in (found[0], found[-1])))


def noise(task: str, *points: str) -> str:
    """V/σ² while a task trains, by budget: the smallest and the largest."""
    known = read_json(RESULTS / f"tokens-noise/{task}/results.json")["noise"]
    lines = []
    for point in points:
        values = (line["ratio"] for key, line in known.items() if key.endswith(f"/{point}"))
        lines.append([point.replace("/", " / "), _range(values)])
    return table(["rows / queries / keys", "V/σ²"], lines)


def _moments(task: str) -> dict[str, Any]:
    own = read_json(RESULTS / "depth/results.json")[task]
    return {step: moment for step, moment in own.items() if step.isdecimal()}


def depth(task: str) -> str:
    """V/σ² of the worst block and of all parameters, by moment and budgets."""
    lines = []
    for step, moment in _moments(task).items():
        for way, line in moment["ways"].items():
            cells = [number_text(figures(moment, line)[name], 2) for name in ("worst", "all")]
            lines.append([step, way, f"{line['time']:.2f}", *cells])
    return table(["step", "budgets", "time of a step", "worst block", "all parameters"], lines)


def trained(task: str) -> str:
    """Where exact training ends, and even and shared budgets in the same time."""
    runs = read_json(RESULTS / "depth/results.json")[task]["runs"]
    head = ["budgets", "test accuracy (%)", "left the plateau", "above exact, paired [95 %]"]
    return table(head, final_scores(runs))


def even(task: str, what: str) -> str:
    """``worst`` or ``all`` of even budgets: the smallest and the largest moment."""
    return _range(figures(m, m["ways"]["even"])[what] for m in _moments(task).values())


def factors(*asked: tuple[str, str]) -> str:
    """What was measured of each block, by task and moment, from the top down."""
    lines = []
    for task, step in asked:
        shares = _moments(task)[step]["shares"]
        found = Factors.of(list(shares.values()))
        for k, name in sorted(enumerate(shares), key=lambda block: -int(block[1].split(".")[-1])):
            values = (found.through[k], found.felt[k], *found.own[k, :2], *found.out[k, :2])
            cells = [number_text(float(value), 2) for value in values]
            lines.append([f"{task}, {name.rpartition('.')[2]}", *cells])
    kinds = [f"{factor}, {kind}" for factor in ("own", "out") for kind in ("rows", "queries")]
    return table(["task, block", "through", "felt", *kinds], lines)


def location() -> str:
    """V/σ² on the paper's MLP at 0.2, by the layers that are sketched."""
    lines: dict[str, list[str]] = {}
    for point in read_json(RESULTS / "location-mnist-mlp.json")["points"]:
        if point["budget"] == 0.2 and point["steps"] in (0, 2345):
            found = point["relative"]
            shown = f"{number_text(found['value'])} ± {number_text(found['error'], 2)}"
            lines.setdefault(point["method"], []).append(shown)
    head = [f"{place}, step {step}" for step in (0, 2345) for place in ("first", "last", "all")]
    return table(["sketch", *head], [[f"`{name}`", *cells] for name, cells in lines.items()])


# -- times, memory, messages: python -m benchmarks --------------------------------------------


def layers(*methods: str) -> str:
    """Backward of one linear layer over the exact one, by sketch at a budget of 0.1."""
    known: dict[str, dict[str, str]] = {}
    for line in read_json(BENCHMARKS / "linear-1-thread.json")["lines"]:
        if line["budget"] == 0.1:
            own = known.setdefault(line["case"], {})
            own[line["method"]] = f"{line['ratio']['median']:.2f}"
            if line["method"] == "L1":
                own["floor"] = f"{line['floor']:.2f}"
    lines = [[case, *(own.get(name, "") for name in methods)] for case, own in known.items()]
    return table(["rows × inputs × outputs", *methods], [line for line in lines if line[1]])


def peaks() -> str:
    """Peak memory of a step of a transformer, and the largest batch that fits, over exact."""
    rows = [r for path in sorted(BENCHMARKS.glob("peak*.json")) for r in read_json(path)["rows"]]
    models = [row["model"] for row in rows if row["method"] == "Tokens"]
    lines = [
        [row["model"], row["method"], f"{row['of exact']:.2f}", f"{row['times']:.1f}"]
        for row in rows
        if row["model"] in models and row["method"] in ("checkpointing", "Tokens")
    ]
    return table(["model", "method", "peak", "largest batch"], lines)


def stored(name: str, **columns: str) -> str:
    """Lines of a benchmark: ``head="{field:.2f}"`` for each column."""
    content = read_json(BENCHMARKS / f"{name}.json")
    lines = content.get("rows") or content["lines"]
    return table(list(columns), [[c.format(**line) for c in columns.values()] for line in lines])


def main() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        now = filled(text)
        if now != text:
            page.write_text(now, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
