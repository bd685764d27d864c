"""What was found: figures, a summary table and a page in Markdown, from stored results alone."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from . import claims
from .figures import draw, order
from .methods import EXACT, METHODS
from .selection import Results, Summary
from .store import TABLE, Row, write_file
from .sweep import FIGURES, Point, Protocol, Sweep

PAGE, SUMMARY = "README.md", "summary.csv"
SHOWN = 8
"""Of a claim with more comparisons only the least favourable are listed."""


def write_results(sweep: Sweep, names: Sequence[str], rows: Sequence[Row], out: Path) -> list[Path]:
    """All figures of ``names`` that have results, the table of points and the page."""
    results = Results(rows)
    found = {name: results.summaries(sweep.points(name)) for name in names}
    found = {name: summaries for name, summaries in found.items() if summaries}
    extras = results.summaries(sweep.extras)
    written: list[Path] = []
    for name, summaries in found.items():
        written += draw(FIGURES[name], summaries, describe(sweep.protocol), out)
    every = {s.point.cell: s for group in (*found.values(), extras) for s in group}
    written.append(write_file(out / SUMMARY, _summary_table(every.values()).encode()))
    written.append(write_file(out / PAGE, _page(sweep, found, extras, rows).encode()))
    return written


def describe(protocol: Protocol) -> str:
    widths = "-".join(map(str, protocol.widths))
    return (
        f"MNIST, MLP {widths}, epochs: {protocol.epochs}, batch {protocol.batch_size}, "
        f"seeds: {len(protocol.seeds)}"
    )


def _summary_table(summaries: Iterable[Summary]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["widths", "epochs", "clip", "method", "place", "budget", "test_median", "test_std",
         "best_test_median", "learning_rate_median", "rates_at_edge", "clipped_fraction",
         "diverged_runs", "runs", "seeds", "ranks", "sketch", "cell"]
    )  # fmt: skip
    for s in sorted(
        summaries,
        key=lambda s: (s.point.cell.widths, s.point.cell.epochs, s.point.cell.clip, order(s)),
    ):
        cell = s.point.cell
        writer.writerow(
            ["-".join(map(str, cell.widths)), cell.epochs, cell.clip, s.point.method,
             s.point.place, s.point.budget, round(s.median, 4), round(s.spread, 4),
             round(s.best_median, 4), round(s.learning_rate, 6), s.at_edge, round(s.clipped, 4),
             s.diverged, s.runs, len(s.seeds), " ".join(f"{r:g}" for r in s.ranks), cell.sketch,
             cell.identity]
        )  # fmt: skip
    return text.getvalue()


def _page(
    sweep: Sweep,
    found: Mapping[str, Sequence[Summary]],
    extras: Sequence[Summary],
    rows: Sequence[Row],
) -> str:
    parts = [
        f"# The paper's MLP study on MNIST: preset `{sweep.name}`",
        _protocol_text(sweep, rows),
    ]
    baselines = [s for group in found.values() for s in group if s.point.method == EXACT]
    shown = list({s.point.cell: s for s in (*baselines, *extras)}.values())
    parts += ["## Baselines and longer training", _baseline_table(shown)]
    parts += ["## Claims", _claims_text(found)]
    for name, summaries in found.items():
        parts += [f"## Figure {name}: {FIGURES[name].title}", f"![](figure-{name}.png)"]
        parts.append(_figure_table(summaries))
    return "\n\n".join(parts) + "\n"


def _protocol_text(sweep: Sweep, rows: Sequence[Row]) -> str:
    protocol = sweep.protocol
    versions = sorted(
        {f"sketchprop {r['package_version']}, torch {r['torch_version']}" for r in rows}
    )
    hours = sum(row["wall_seconds"] for row in rows) / 3600
    diverged = sum(row["diverged_epoch"] > 0 for row in rows)
    rates = ", ".join(f"{10 ** (-i / 4):.3g}" for i in protocol.learning_rates)
    first = (
        f"{describe(protocol)}. SGD without momentum or schedule, cross-entropy, gradient clipping "
        f"at norm {protocol.clip:g}, learning rates {rates}; where a seed's best rate sits at an "
        f"edge, up to {protocol.widen} more beyond it. {protocol.validation_rows} training images "
        "are kept apart: learning rate and epoch are chosen on them for each seed, and the "
        "accuracy is that of the test set at this choice. The paper's 'best accuracy', the highest "
        "on the test set itself, is an extra column. The batch size and the "
        f"scaling of pixels ({protocol.pixels}) are not given in the paper. "
        "Median over seeds ± one standard deviation."
    )
    second = (
        "Formulas are the paper's, literally (`paper=True`, bias gradient from the sketch). Series "
        "are named by what was run: in two of the paper's figure sources the legends of RCS and DS "
        "are swapped. 'clipped' is the share of steps in which clipping was active: such an update "
        "is not unbiased. 'at edge' counts the seeds whose best rate is at an edge even of the "
        "widened grid. A per-sample mask in the last layer alone also is a smaller minibatch: rows "
        "dropped there stay zero below."
    )
    third = (
        f"{len(rows)} runs in the store, {diverged} of them diverged, {hours:.2f} core-hours; "
        f"{'; '.join(versions)}. All runs: [{TABLE}]({TABLE}); all points: [{SUMMARY}]({SUMMARY})."
    )
    return "\n\n".join([first, second, third])


def _baseline_table(summaries: Sequence[Summary]) -> str:
    lines = [
        "| network | epochs | clipping | method | kept | test | paper's 'best' | learning rate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for s in summaries:
        cell = s.point.cell
        lines.append(
            f"| {'-'.join(map(str, cell.widths))} | {cell.epochs} | {cell.clip or 'off'} | "
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
        ranks = ", ".join(f"{rank:g}" for rank in s.ranks)
        lines.append(
            f"| {METHODS[s.point.method].label} | {s.point.place} | {s.point.budget:g} | {ranks} | "
            f"{_value(s)} | {s.best_median:.2f} | {s.learning_rate:.3g} | "
            f"{s.at_edge}/{len(s.seeds)} | {s.clipped:.0%} | {s.diverged}/{s.runs} |"
        )
    return "\n".join(lines)


def _value(summary: Summary) -> str:
    return f"{summary.median:.2f} ± {summary.spread:.2f}"


def _claims_text(found: Mapping[str, Sequence[Summary]]) -> str:
    clipped = [s for name, group in found.items() for s in group if name != "2b-no-clip"]
    points = {_key(s.point): s for s in clipped}
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
    for claim in claims.CLAIMS:
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
        f"| {o.comparison} | {o.difference:+.2f} ± {o.error:.2f} | {o.p_above:.3g} | {o.seeds} | "
        f"{o.verdict} |"
        for o in done[:SHOWN]
    ]
    left = len(done) - SHOWN
    more = [f"\n{left} more comparisons are more favourable than these."] if left > 0 else []
    missing = len(outcomes) - len(done)
    more += [f"\n{missing} comparisons were not run."] if missing else []
    return "\n".join(lines + more)


def _key(point: Point) -> claims.Key:
    return point.method, point.place, point.budget
