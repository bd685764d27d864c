"""Does it pay? Quality at equal wall-clock, the rate decayed to zero, against exact training at its
best batch size."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sketchprop.core.allocator import keep_pages

from ..lab import ExperimentError
from ..lab.checkpoints import FOLDER, Checkpoints
from ..lab.engine import ENGINES, Job, progress_lines, run_sweep
from ..lab.pages import read_json, write_csv, write_json
from ..lab.store import Store, rows_so_far, write_table
from ..lab.study import Study, schema_of
from ..lab.sweep import checked
from .choices import Decisions, choices_table, missing_jobs, read_choices, write_choices
from .contest import FINDINGS, Contest, TimedCell
from .earnest import run_in_earnest
from .facts import EARNEST, TIMES, best, facts, summary
from .figure import draw as draw_figure
from .outcome import Outcome
from .predictions import draw as draw_predictions
from .predictions import pairs
from .times import measure_memory, measure_times, missing_kinds
from .ways import EXACT, find_way

SCHEMA = schema_of(TimedCell(), FINDINGS, ("task", "way", "batch", "time"))


@dataclass(frozen=True, kw_only=True)
class PayStudy(Study):
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        add = parser.add_argument
        add("--task", help="only this one; all by default")
        add("--ways", default="", help="only these, by commas, of those that a preset has")
        add(
            "--times",
            action="store_true",
            help="only time the steps, which needs a quiet machine, and replace stored times",
        )
        add(
            "--earnest",
            action="store_true",
            help="then run each task's winner and its control in turns and count seconds, which "
            "needs a quiet machine",
        )
        add("--seconds", type=float, default=600.0, help="how long steps of a task are timed (600)")
        add("--workers", type=int, default=os.cpu_count() or 1, help="processes; 0: in this one")
        add("--engine", default="processes", choices=sorted(ENGINES), help="ray: a Ray cluster")
        add(
            "--plan",
            action="store_true",
            help="only say what was chosen and how much there is to do",
        )

    def contests(self, preset: str) -> tuple[str, list[Contest]]:
        """What a preset says of each task."""
        name, content, path = self.read_preset(preset)
        (shared,) = checked((Contest(),), content.get("protocol", {}), f"{path} [protocol]")
        contests = []
        for part in content.get("extra", ()):
            where = f"{path} [[extra]]"
            (values,) = checked((Contest(),), part, where)
            contests.append(replace(Contest(), **{**shared, **values}).check(where))
        return name, contests

    def run(self, options: argparse.Namespace) -> int:
        name, every = self.contests(options.preset)
        out = self.out_folder(options, name)
        asked = [c for c in every if options.task in (None, c.task)]
        if not asked:
            raise ExperimentError(f"preset {name} has no task {options.task}")
        for way in filter(None, options.ways.split(",")):
            find_way(way)  # says which there are
        if options.plan:
            for contest in asked:
                sys.stdout.write(_plan(_narrowed(contest, options.ways), out / contest.task))
            return 0
        if not options.stored:
            keep_pages()
            for contest in asked:
                self._do(contest, out, options)
            if options.times:
                return 0
        outcomes = self.outcomes(every, out)
        if not outcomes:
            raise ExperimentError(f"{out} holds no results; run the command without --stored")
        if options.earnest:
            keep_pages()
            for contest in asked:
                if contest.task in outcomes:
                    _earnest(outcomes[contest.task], out / contest.task, options.quiet)
        written = [write_csv(out / "summary.csv", summary(outcomes)), *draw_figure(outcomes, out)]
        written += draw_predictions(pairs(outcomes), out)
        return self.finish(written, out, {"preset": name, **facts(outcomes, out)})

    def outcomes(self, contests: list[Contest], out: Path) -> dict[str, Outcome]:
        """What is stored of each task."""
        choices = read_choices(out)
        return {
            c.task: Outcome(
                c,
                read_json(out / c.task / TIMES)["costs"],
                rows_so_far(out / c.task, SCHEMA),
                choices,
            )
            for c in contests
            if (out / c.task / TIMES).is_file()
        }

    def _do(self, contest: Contest, out: Path, options: argparse.Namespace) -> None:
        """Times all that was not timed, trains what was not trained of the ways asked for, and
        stores what was chosen on the way."""
        folder = out / contest.task
        known = {} if options.times else read_json(folder / TIMES, {})
        if missing_kinds(contest, known):
            known = measure_times(contest, known, options.seconds, options.quiet)
            write_json(folder / TIMES, known)
        write_json(folder / TIMES, {**known, "saved": measure_memory(contest, known)})
        if options.times or not contest.trained:
            return
        costs = known["costs"]
        report = None if options.quiet else progress_lines()
        with Store(folder, SCHEMA) as store:
            missing = partial(missing_jobs, _narrowed(contest, options.ways), costs)
            run_sweep(missing, store, ENGINES[options.engine], options.workers, report)
            rows = store.rows()
        write_table(rows, folder, SCHEMA)
        begun = _narrowed(contest, ",".join({row["way"] for row in rows}))
        write_choices(out, Decisions(begun, costs, rows).choices())


def _narrowed(contest: Contest, ways: str) -> Contest:
    """With exact training, which all are held against, and those ways that were asked for."""
    if not ways:
        return contest
    asked = {EXACT, *ways.split(",")}
    return replace(contest, ways=tuple(name for name in contest.ways if name in asked))


def _earnest(outcome: Outcome, folder: Path, quiet: bool) -> None:
    """Where there is a winner, the clock is asked too."""
    winner = best(outcome)
    if winner is not None and winner[1].value <= 1:
        known, keep = read_json(folder / EARNEST, {}), partial(write_json, folder / EARNEST)
        saved = Checkpoints(folder / FOLDER)
        run_in_earnest(outcome, winner[0], winner[1].value, known, quiet, keep, saved)


def _plan(contest: Contest, folder: Path) -> str:
    """What was chosen so far and why; how much there is to do."""
    if not contest.trained:
        return f"{contest.task}: steps are timed, nothing is trained\n"
    if not (folder / TIMES).is_file():
        return f"{contest.task}: nothing is stored; steps are timed first\n"
    times, rows = read_json(folder / TIMES), rows_so_far(folder, SCHEMA)
    decisions = Decisions(contest, times["costs"], rows)
    seconds, missing = times["seconds"][f"/{contest.middle}"], decisions.missing()
    hours = seconds * sum(Job((run,)).cost for run in missing) / 3600
    done = sum(row["time"] for row in rows) * seconds / 3600
    more = "" if decisions.settled else ", more when rates are chosen"
    stored = f"{len(rows)} runs stored ({done:.2f} core-hours)"
    told = f"{contest.task}: {stored}, {len(missing)} missing ({hours:.2f} core-hours){more}\n"
    return f"{told}\n{choices_table(decisions.choices())}\n\n"


PAY = PayStudy(
    name="pay",
    help="quality at equal wall-clock, against exact training at its best",
    published={"cpu": "pay"},
)
