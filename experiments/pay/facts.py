"""What page and summary say: numbers from stored results; the words are in the templates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from sketchprop.meters.advising.advice import LONGER

from ..lab.pages import read_json
from ..tasks.table import TASKS, Task
from .choices import choices_table
from .contest import Contest
from .outcome import LEVEL, Curve, Outcome, Ratio, kept_in_the_end
from .predictions import answer_near, pairs, predicted, told
from .predictions import summary as foretold
from .ways import EXACT, Way, find_way

TIMES, EARNEST = "times.json", "earnest.json"
NOISE = Path("docs/results/tokens-noise")


def noise_of(outcome: Outcome, curve: Curve) -> tuple[float, float] | None:
    """The smallest and the largest V/σ² that were measured over exact training, of what a way
    draws in the end."""
    way = outcome.ends_as(curve)
    if way.name == EXACT:
        return 0.0, 0.0
    path = NOISE / outcome.contest.task / "results.json"
    if not path.is_file() or not way.point:
        return None
    found = [line["ratio"] for key, line in read_json(path)["noise"].items()
             if key.partition("/")[2] == way.point]  # fmt: skip
    return (min(found), max(found)) if found else None


def _noise_text(noise: tuple[float, float] | None) -> str:
    """
    >>> _noise_text((0.0532, 0.281)), _noise_text((0.0, 0.0)), _noise_text(None)
    ('0.053 - 0.28', '0', '')
    """
    if noise is None:
        return ""
    return " - ".join(dict.fromkeys(f"{value:.2g}" for value in noise))


def summary(outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    """A line for each way on each task."""
    lines = []
    for task, outcome in outcomes.items():
        if not outcome.contest.trained:
            continue
        for curve in outcome.curves:
            ratio, noise = outcome.ratio(curve), noise_of(outcome, curve)
            same = _same(outcome, curve)
            lines.append({
                "task": task, "way": curve.way.name, "batch": curve.batch, "rate": curve.rate,
                "step_ratio": outcome.cost(curve), "noise": noise[1] if noise else "",
                "time_ratio": ratio.value if ratio else "", "low": ratio.low if ratio else "",
                "high": ratio.high if ratio else "", "same_batch": same.value if same else "",
                "same_low": same.low if same else "", "same_high": same.high if same else "",
                "seeds": len(outcome.contest.seeds),
                "quality": curve.last, "steps": curve.steps,
            })  # fmt: skip
    return lines


def facts(outcomes: Mapping[str, Outcome], out: Path) -> dict[str, Any]:
    parts = [_part(TASKS[task], outcome, out / task) for task, outcome in outcomes.items()]
    said = foretold(pairs(outcomes))
    more = {"noise_page": "../tokens-noise", "longer": LONGER}
    return {"parts": parts, "level": LEVEL, "foretold": said, **more}


def _part(task: Task, outcome: Outcome, folder: Path) -> dict[str, Any]:
    """What the page says of a task."""
    contest, times = outcome.contest, read_json(folder / TIMES)
    seen = contest.length * contest.middle
    common = {
        "task": task, "contest": contest, "times": times, "goal": f"≤ {contest.goal:.2f}",
        "seen": seen, "passes": f"{seen / task.samples:.2g}",
        "seconds": times["seconds"][f"/{contest.middle}"] * contest.length,
    }  # fmt: skip
    if not contest.trained:
        way = find_way(contest.ways[-1])
        key = f"{way.sketch}/{contest.middle}"
        quartiles = " - ".join(f"{q:.2f}" for q in times["quartiles"][key])
        step = f"{times['costs'][key]:.2f}"
        memory = _memory(times, way)
        return {**common, "step": step, "quartiles": quartiles, "memory": memory,
                "predicted": _predicted(task.name, None)}  # fmt: skip
    shown = _shown(outcome)
    shares = [f"{share:g} T" for share in contest.shares]
    return {
        **common,
        **dict.fromkeys(HEADLINE, "-"),
        "winner": "none so far" if outcome.curves else "not run yet",
        **(_headline(outcome, *shown, folder) if shown else {}),
        "predicted": _predicted(task.name, shown[0].batch if shown else None),
        "header": ["method", "rate", "steps", "step", "V/σ²", *shares, "time to equal quality",
                   "over exact at the same batch"],
        "lines": [_line(outcome, curve) for curve in outcome.curves],
        "controllers": [line for curve in outcome.curves if (line := _controller(outcome, curve))],
        "choices": choices_table(outcome.choices),
        "noise_known": (NOISE / task.name / "results.json").is_file(),
        "sizes": _sizes(contest, times),
        "lead": find_way(contest.lead).label,
        "kept_memory": _memory(times, find_way(contest.lead)),
        "of": partial(numbers, outcome),
    }  # fmt: skip


HEADLINE = ("winner", "ratio", "same", "step", "noise", "memory", "earnest")


def _headline(outcome: Outcome, curve: Curve, ratio: Ratio, folder: Path) -> dict[str, str]:
    return {
        "winner": f"{curve.way.label}, batch {curve.batch}",
        "ratio": ratio.text(),
        "same": _text(_same(outcome, curve)),
        "step": f"{outcome.cost(curve):.2f}",
        "noise": _noise_text(noise_of(outcome, curve)),
        "memory": _memory(read_json(folder / TIMES), outcome.ends_as(curve)),
        "earnest": _by_clock(folder, len(outcome.contest.clocked)),
    }


def _shown(outcome: Outcome) -> tuple[Curve, Ratio] | None:
    """The way that the task is there for; else the winner."""
    if not outcome.contest.shown:
        return best(outcome)
    curves = [c for c in outcome.curves if c.way.name == outcome.contest.shown]
    ratio = outcome.ratio(curves[0]) if curves else None
    return (curves[0], ratio) if ratio else None


def _memory(times: Mapping[str, Any], way: Way) -> str:
    saved = times.get("saved", {})
    known = way.sketch in saved and not way.control
    return f"{saved[way.sketch] / saved['']:.2f}" if known else ""


def _by_clock(folder: Path, wanted: int) -> str:
    """Seconds over the control's seconds, for the very share of the time that was counted."""
    if not (folder / EARNEST).is_file():
        return ""
    found = read_json(folder / EARNEST)
    done = len(found["seeds"])
    short = f", {done} of {wanted} seeds so far" if done < wanted else ""
    return f"{found['ratio']:.2f} (counted {found['share']:.2f}{short})"


def _predicted(task: str, batch: int | None) -> str:
    """What ``advise`` said of the task before anything was trained, at a batch like this."""
    row = answer_near(task, batch)
    if row is None:
        return ""
    change, line = float(row["change"]), row["answer"]
    sketch = line.removeprefix("sp.sketch_(model, sp.").removesuffix(")")
    return line if change == 1 else f"{change:.2f}, `{sketch}`"


def best(outcome: Outcome) -> tuple[Curve, Ratio] | None:
    """The sketched way that is soonest as good as the control, and how soon."""
    found = [
        (curve, ratio)
        for curve in outcome.curves
        if curve.way.name != EXACT and (ratio := outcome.ratio(curve)) is not None
    ]
    return min(found, key=lambda pair: (pair[1].value, -pair[0].last)) if found else None


def numbers(outcome: Outcome, way: str, batch: int) -> dict[str, str]:
    """Of one way: what the notes of a task may quote; a dash for what is not known."""
    curve = next((c for c in outcome.curves if (c.way.name, c.batch) == (way, batch)), None)
    said, numbers = told(outcome.contest.task, way, batch), defaultdict(lambda: "-")
    if said is not None:
        numbers["told"] = (
            f"{predicted(said):.2f} ({said.interval[0]:.2f} to {said.interval[1]:.2f})"
        )
    if curve is not None:
        ends = sorted(map(kept_in_the_end, outcome.stories(curve)))
        numbers |= {
            "time": _text(outcome.ratio(curve)), "same": _text(_same(outcome, curve)),
            "step": f"{outcome.cost(curve):.2f}", "steps": str(curve.steps),
            "noise": _noise_text(noise_of(outcome, curve)),
            "end": f"{curve.last:.3g}", "rate": f"{curve.rate:g}",
            "half": f"{fmean(curve.points[0.5]):.3g}" if 0.5 in curve.points else "-",
            "kept": " to ".join(dict.fromkeys(f"{end:.2f}" for end in ends[:: len(ends) - 1 or 1])),
        }  # fmt: skip
    return numbers


def _line(outcome: Outcome, curve: Curve) -> list[str]:
    ratio = outcome.ratio(curve)
    label = f"{curve.way.label}, batch {curve.batch}"
    if curve is outcome.control:
        label = f"**{label}** (control)"
    cells = [label, f"{curve.rate:g}", str(curve.steps), f"{outcome.cost(curve):.3f}"]
    cells.append(_noise_text(noise_of(outcome, curve)))
    for share in outcome.contest.shares:
        if share not in curve.points:
            cells.append("")
            continue
        mean = curve.mean(share, range(len(curve.points[share])))
        text = f"{mean:.4g} ± {curve.spread(share):.2g}"
        if TASKS[outcome.contest.task].second and share == 1.0:
            text += f" (F1 {sum(curve.second[share]) / len(curve.second[share]):.4g})"
        cells.append(text)
    cells.append("1" if curve is outcome.control else _text(ratio))
    cells.append(_text(_same(outcome, curve)))
    return cells


def _sizes(contest: Contest, times: Mapping[str, Any]) -> list[list[str]]:
    """What a step costs by the size of the batch: exact, a sample; kept tokens, over exact."""
    costs, seconds = times["costs"], times["seconds"]
    lines = [["batch", *map(str, contest.batches)]]
    shown = [f"{1000 * seconds[f'/{size}'] / size:.3g}" for size in contest.batches]
    lines.append(["exact, ms a sample", *shown])
    for way in (way for way in map(find_way, contest.ways) if way.kept):
        shown = [f"{costs[f'{way.sketch}/{n}'] / costs[f'/{n}']:.2f}" for n in contest.batches]
        lines.append([f"{way.label}, over exact", *shown])
    return lines


def _controller(outcome: Outcome, curve: Curve) -> list[str]:
    """Of a way whose budgets move: how often it looked, and what it had decided in the end."""
    stories = outcome.stories(curve) if curve.way.control else []
    if not stories:
        return []
    control = outcome.control
    ahead = curve.last - control.last if control else math.nan
    return [
        curve.way.label, str(curve.batch), _text(outcome.ratio(curve)),
        _text(_same(outcome, curve)), f"{ahead:+.2g}",
        f"{outcome.cost(curve):.3f}", f"{fmean(len(story) for story in stories):.1f}",
        f"{fmean(map(kept_in_the_end, stories)):.2f}",
    ]  # fmt: skip


def _same(outcome: Outcome, curve: Curve) -> Ratio | None:
    """Over exact training at the same batch size."""
    control = outcome.same_batch(curve)
    if control is None or curve.way.name == EXACT:
        return None
    return outcome.ratio(curve, control)


def _text(ratio: Ratio | None) -> str:
    return ratio.text() if ratio else ""
