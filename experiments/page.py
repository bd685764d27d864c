"""What was found: figures, a summary table and a page in Markdown, from stored results alone."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from . import claims
from .figures import draw, order
from .methods import EXACT, METHODS
from .selection import Results, Summary
from .store import TABLE, Row, write_file
from .study import Study
from .sweep import Sweep

PAGE, SUMMARY = "README.md", "summary.csv"
SHOWN = 8
"""Of a claim with more comparisons only the least favourable are listed."""


def write_results(
    study: Study, sweep: Sweep, names: Sequence[str], rows: Sequence[Row], out: Path
) -> list[Path]:
    """All figures of ``names`` that have results, the table of points and the page."""
    results = Results(rows)
    found = {name: results.summaries(sweep.points(name)) for name in names}
    found = {name: summaries for name, summaries in found.items() if summaries}
    extras = results.summaries(sweep.extras)
    written: list[Path] = []
    for name, summaries in found.items():
        written += draw(sweep.figures[name], summaries, study.describe(sweep.protocol), out)
    every = {s.point.cell: s for group in (*found.values(), extras) for s in group}
    written.append(write_file(out / SUMMARY, _summary_table(every.values()).encode()))
    written.append(write_file(out / PAGE, _page(study, sweep, found, extras, rows).encode()))
    return written


def _summary_table(summaries: Iterable[Summary]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["network", "epochs", "clip", "method", "place", "budget", "test_median", "test_std",
         "best_test_median", "learning_rate_median", "rates_at_edge", "clipped_fraction",
         "diverged_runs", "runs", "seeds", "ranks", "sketch", "cell"]
    )  # fmt: skip
    for s in sorted(
        summaries,
        key=lambda s: (s.point.cell.network, s.point.cell.epochs, s.point.cell.clip, order(s)),
    ):
        cell = s.point.cell
        writer.writerow(
            [cell.network, cell.epochs, cell.clip, s.point.method,
             s.point.place, s.point.budget, round(s.median, 4), round(s.spread, 4),
             round(s.best_median, 4), round(s.learning_rate, 6), s.at_edge, round(s.clipped, 4),
             s.diverged, s.runs, len(s.seeds), " ".join(f"{r:g}" for r in s.ranks), cell.sketch,
             cell.identity]
        )  # fmt: skip
    return text.getvalue()


def _page(
    study: Study,
    sweep: Sweep,
    found: Mapping[str, Sequence[Summary]],
    extras: Sequence[Summary],
    rows: Sequence[Row],
) -> str:
    parts = [
        f"# {study.title}: preset `{sweep.name}`",
        *study.opening(found, rows),
        *study.told(sweep.protocol),
        _stored_text(rows),
    ]
    baselines = [s for group in found.values() for s in group if s.point.method == EXACT]
    shown = list({s.point.cell: s for s in (*baselines, *extras)}.values())
    parts += ["## Baselines and longer training", _baseline_table(shown)]
    parts += ["## Claims", _claims_text(study, found)]
    for name, summaries in found.items():
        title = sweep.figures[name].title
        parts += [f"## Figure {name}: {title}", f"![](figure-{name}.png)"]
        parts.append(_figure_table(summaries))
    parts += study.more(found, rows)
    return "\n\n".join(parts) + "\n"


def _stored_text(rows: Sequence[Row]) -> str:
    versions = sorted(
        {f"sketchprop {r['package_version']}, torch {r['torch_version']}" for r in rows}
    )
    hours = sum(row["wall_seconds"] for row in rows) / 3600
    diverged = sum(row["diverged_epoch"] > 0 for row in rows)
    return (
        f"{len(rows)} runs in the store, {diverged} of them diverged, {hours:.2f} core-hours; "
        f"{'; '.join(versions)}. All runs: [{TABLE}]({TABLE}); all points: [{SUMMARY}]({SUMMARY})."
    )


def _baseline_table(summaries: Sequence[Summary]) -> str:
    lines = [
        "| network | epochs | clipping | method | kept | test | paper's 'best' | learning rate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for s in summaries:
        cell = s.point.cell
        lines.append(
            f"| {cell.network} | {cell.epochs} | {cell.clip or 'off'} | "
            f"{METHODS[s.point.method].label} | {s.point.budget:g} | {_value(s)} | "
            f"{s.best_median:.2f} | {s.learning_rate:.3g} |"
        )
    return "\n".join(lines)


def _figure_table(summaries: Sequence[Summary]) -> str:
    lines = [
        "| method | layers | kept | rank by layer | test | paper's 'best' | learning rate | at "
        "edge | clipped | diverged |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for s in sorted(summaries, key=order):
        lines.append(
            f"| {METHODS[s.point.method].label} | {s.point.place} | {s.point.budget:g} | "
            f"{_ranks(s)} | {_value(s)} | {s.best_median:.2f} | {s.learning_rate:.3g} | "
            f"{s.at_edge}/{len(s.seeds)} | {s.clipped:.0%} | {s.diverged}/{s.runs} |"
        )
    return "\n".join(lines)


def _ranks(summary: Summary) -> str:
    """Of each layer; of many layers the smallest and the largest."""
    ranks = [f"{rank:g}" for rank in summary.ranks]
    if len(ranks) <= SHOWN:
        return ", ".join(ranks)
    return f"{min(summary.ranks):g} to {max(summary.ranks):g}"


def _value(summary: Summary) -> str:
    spread = f" ± {summary.spread:.2f}" if len(summary.seeds) > 1 else ""
    return f"{summary.median:.2f}{spread}"


def _claims_text(study: Study, found: Mapping[str, Sequence[Summary]]) -> str:
    used = [s for name, group in found.items() for s in group if name not in study.no_claims]
    points = {s.point.key: s for s in used}
    parts = [
        "Each comparison is paired by seed (same initial weights, same batches): the mean "
        "difference in test accuracy over the budgets, in percentage points, ± its standard error, "
        "and the exact one-sided p-value of a sign-flip test over seeds. A comparison is confirmed "
        f"at p ≤ {claims.LEVEL:g}, not confirmed if the opposite is significant at that level, "
        "else undecided; a claim is confirmed if all of its comparisons are, not confirmed if one "
        "is reversed. Levels are not corrected for the number of comparisons. With n seeds the "
        "smallest p-value is 2⁻ⁿ: five are needed to decide anything."
    ]
    overview = ["| claim | of | figure | verdict at this preset |", "|---|---|---|---|"]
    details = []
    for claim in study.claims:
        outcomes = [claims.check(comparison, points) for comparison in claim.comparisons]
        verdict = claims.verdict(outcomes)
        overview.append(f"| {claim.text} | {claim.clause} | {claim.figure} | **{verdict}** |")
        details.append(f"**{claim.text}** {verdict.capitalize()}.\n\n{_outcomes(outcomes)}")
    return "\n\n".join([*parts, "\n".join(overview), *details])


def _outcomes(outcomes: Sequence[claims.Outcome | None]) -> str:
    done = [outcome for outcome in outcomes if outcome is not None]
    if not done:
        return "Not run."
    done.sort(key=lambda outcome: outcome.difference + outcome.comparison.margin)
    lines = ["| comparison | difference | p | seeds | |", "|---|---|---|---|---|"]
    lines += [
        f"| {o.comparison} | {_difference(o)} | {o.p_above:.3g} | {o.seeds} | {o.verdict} |"
        for o in done[:SHOWN]
    ]
    left = len(done) - SHOWN
    more = [f"\n{left} more comparisons are more favourable than these."] if left > 0 else []
    missing = len(outcomes) - len(done)
    more += [f"\n{missing} comparisons were not run."] if missing else []
    return "\n".join(lines + more)


def _difference(outcome: claims.Outcome) -> str:
    """With its standard error, where there are two seeds to tell it from."""
    error = "" if math.isnan(outcome.error) else f" ± {outcome.error:.2f}"
    return f"{outcome.difference:+.2f}{error}"
