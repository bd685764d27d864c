"""Quality at equal wall-clock: who runs how long, what it costs, what is chosen and why."""

import math
from dataclasses import replace

import pytest
import torch

from experiments.__main__ import main
from experiments.lab import ExperimentError
from experiments.lab.checkpoints import Checkpoint, Checkpoints
from experiments.lab.store import read_rows
from experiments.lab.sweep import Run
from experiments.lab.trainer import Trainer
from experiments.pay import earnest, predictions
from experiments.pay.choices import CONTROL, Decisions, missing_jobs, read_choices, write_choices
from experiments.pay.contest import Contest
from experiments.pay.outcome import Outcome, reached
from experiments.pay.study import PAY, SCHEMA
from experiments.pay.times import compared, missing_kinds
from experiments.pay.ways import TUNER, WAYS, TunedSteps, find_way
from experiments.tasks.table import TASKS
from sketchprop.tuning.rule import LADDER

RATES = (0.05, 0.03, 0.01, 0.003, 0.001)
CONTEST = Contest(
    task="vit", size="small", length=12, batches=(4, 8, 16), rates=RATES, seeds=(0, 1),
    ways=("exact", "tokens-0.3", "tuner", "rows-0.3"), shares=(0.5, 1.0),
)  # fmt: skip


def costs_of(contest, of=lambda sketch: 1.0 if not sketch else 0.5):
    return {
        f"{sketch}/{size}": of(sketch) * size / contest.middle for sketch, size in contest.kinds
    }


def played(contest, score):
    """All rows of a contest, every run scored by ``score(run)`` instead of trained."""
    rows, costs = [], costs_of(contest)
    while jobs := missing_jobs(contest, costs, rows, None):
        for (run,) in (job.runs for job in jobs):
            value = score(run)
            tested = run.cell.tested
            rows.append({
                "run": run.identity, "validation_accuracy": 0.0 if tested else value,
                "test_accuracy": value if tested else 0.0, "second": 0.0,
                "steps": run.cell.steps, "seed": run.seed, "tested": tested, "story": [],
            })  # fmt: skip
    return rows


def chosen(contest, rows):
    """The table of choices, by way and batch size."""
    decided = Decisions(contest, costs_of(contest), rows).choices()
    return {(choice.way, choice.batch): choice for choice in decided}


def outcome_of(contest, rows):
    return Outcome(contest, costs_of(contest), rows, list(chosen(contest, rows).values()))


def test_equal_time_is_more_steps_for_a_cheaper_way_and_for_a_smaller_batch():
    costs = costs_of(CONTEST)
    exact, kept = WAYS["exact"], WAYS["tokens-0.3"]
    cells = [CONTEST.cell(w, b, 1.0, costs, 1) for w, b in ((exact, 8), (exact, 4), (kept, 8))]
    assert [cell.steps for cell in cells] == [12, 24, 24]
    assert CONTEST.cell(kept, 8, 0.5, costs, 1).steps == 12


def test_one_budget_goes_on_at_a_size_that_is_good_for_exact_training_and_pays_for_measuring():
    contest = replace(
        CONTEST, ways=("exact", "shared-0.1", "shared-0.2", "tuner-shared"), lead="shared-0.1",
        length=24, tried_sizes=2, best_budget=True, ended_sizes=1,
    )  # fmt: skip
    costs = {**costs_of(contest), "Tokens(0.2, share='measured')/16": 1.0}
    cell = contest.cell(WAYS["shared-0.2"], 8, 1.0, costs, 1)
    assert (cell.time, cell.steps) == (24 - 6, 36)
    assert contest.cell(WAYS["tuner-shared"], 8, 1.0, costs, 1).time == 24

    def score(run):
        best = {"exact": 8, "shared-0.1": 16, "shared-0.2": 16, "tuner-shared": 16}[run.cell.way]
        return 50 + 5 * (run.cell.way == "shared-0.2") - abs(run.cell.batch - best)

    rows = played(contest, score)
    table = chosen(contest, rows)
    tried = {size for way, size in table if way == "shared-0.1"}
    assert len(tried) == 2
    assert 8 in tried
    lengths = {key: choice.lengths for key, choice in table.items() if choice.lengths}
    size = max(tried)
    assert lengths["shared-0.2", size] == lengths["tuner-shared", size] == contest.shares
    assert not any(way == "shared-0.1" for way, _ in lengths)
    (control,) = (c for c in table.values() if c.role == "control")
    assert control.lengths == (0.5, 1.0)
    assert not Decisions(contest, costs_of(contest), rows).missing()
    early = [row for row in rows if not row["tested"]][:-4]
    assert not Decisions(contest, costs_of(contest), early).settled
    even = Decisions(contest, costs_of(contest), played(contest, lambda run: -run.cell.batch))
    assert even.dropped == {"shared-0.2"}  # of equal ones the first goes on, at each start
    alone = replace(contest, ways=("exact", "tuner-shared"))
    assert Decisions(alone, costs_of(alone), []).missing()


def test_rates_and_sizes_are_chosen_by_a_seed_that_is_not_reported():
    def score(run):
        assert (run.seed == 100) == (not run.cell.tested)
        best = 3 if run.cell.way == "exact" else 2
        return 50 - abs(run.rate_index - best) - 10 * (run.cell.batch != 4)

    table = chosen(CONTEST, played(CONTEST, score))
    assert [batch for way, batch in table if way in ("tuner", "rows-0.3")] == [4, 4]
    exact = table["exact", 4]
    assert (exact.rate, exact.role, exact.lengths) == (RATES[3], CONTROL, (0.5, 1.0))
    # Its best was at an edge: one rate more was tried.
    assert exact.tried == "0.03: 48; 0.01: 49; 0.003: 50; 0.001: 49"
    assert table["tokens-0.3", 4].rate == RATES[2]
    assert table["exact", 8].lengths == (1.0,)
    assert table["tokens-0.3", 8].lengths == ()


def test_whole_runs_near_to_the_best_rate_choose_where_they_are_long():
    """All rates at batch 8, of which 0.003 is best; then that one and a neighbour at others."""
    contest = replace(
        CONTEST, ways=("exact", "tokens-0.3", "tuner"), near=True, tuned_at=1.0, tried_sizes=2
    )

    def score(run):
        best = 3 if run.cell.way == "exact" else 4
        return 50 - abs(run.rate_index - best) - (run.cell.batch != 8)

    rows = played(contest, score)
    tried = {key: choice.tried for key, choice in chosen(contest, rows).items()}
    assert tried["exact", 8].count(":") == 4
    assert tried["exact", 16] == "0.003: 49; 0.01: 48"
    assert tried["exact", 4] == "0.003: 49; 0.001: 48"
    assert tried["tokens-0.3", 8] == "0.003: 49; 0.001: 50"
    assert {key: text for key, text in tried.items() if key[0] == "tuner"} == {
        ("tuner", 8): "0.001: 50"
    }
    assert not Decisions(contest, costs_of(contest), rows).missing()
    assert chosen(contest, rows[:2])["exact", 4].tried == ""


def test_further_seeds_try_the_best_two_rates_and_the_mean_of_all_chooses():
    """The first seed likes the largest rate by luck; in the mean the next one is better."""
    contest = replace(CONTEST, ways=("exact",), batches=(8,), tuning_seeds=(100, 101))
    by_seed = {100: (0.0, 50.0, 48.0, 40.0, 0.0), 101: (0.0, 20.0, 46.0, 99.0, 0.0)}

    def score(run):
        return by_seed[run.seed][run.rate_index] if not run.cell.tested else 1.0

    rows = played(contest, score)
    choice = chosen(contest, rows)["exact", 8]
    assert choice.tried == "0.03: 50, 20; 0.01: 48, 46; 0.003: 40; 0.05: 0"
    assert (choice.rate, choice.ended) == (0.01, "0.01: 1")
    first = [row for row in rows if row["seed"] != 101]
    assert chosen(contest, first)["exact", 8].rate is None


def test_nothing_is_reported_before_its_rate_is_known():
    first = [run for job in missing_jobs(CONTEST, costs_of(CONTEST), [], None) for run in job.runs]
    assert first
    assert not any(run.cell.tested for run in first)
    assert {run.cell.way for run in first} == {"exact", "tokens-0.3"}


def test_the_control_is_the_exact_training_that_ends_best_whatever_validation_chose():
    """Validation chooses batches of 8 for exact training and of 16 for kept tokens; 4 ends best."""
    contest = replace(CONTEST, shares=(0.25, 0.5, 1.0))

    def score(run):
        size, exact = run.cell.batch, run.cell.way == "exact"
        if not run.cell.tested:
            return float(size == (8 if exact else 16))
        return 62.0 if exact and size == 4 else 60.0

    rows = played(contest, score)
    outcome = outcome_of(contest, rows)
    assert outcome.control.batch == 4
    found = {c.batch: c.shares for c in outcome.curves if c.way.name == "exact"}
    assert found == {4: [0.25, 0.5, 1.0], 8: [0.5, 1.0], 16: [0.5, 1.0]}
    kept = next(curve for curve in outcome.curves if curve.way.name == "tokens-0.3")
    assert math.isinf(outcome.ratio(kept).value)
    cell = contest.cell(WAYS["exact"], 4, 1.0, costs_of(contest), 1)
    lost = {Run(cell, place, 0).identity for place in range(5)}
    assert outcome_of(contest, [row for row in rows if row["run"] not in lost]).control is None


def test_exact_training_gets_the_rates_of_others_too_and_keeps_what_ends_best():
    """Validation gives 0.01 to exact training and 0.03 to kept tokens; over the whole time 0.03 is
    the better for both, in batches of 8, in which both are best."""

    def score(run):
        rate, exact = run.learning_rate, run.cell.way == "exact"
        if not run.cell.tested:
            return 10.0 * (run.cell.batch == 8) + (rate == (0.01 if exact else 0.03))
        return 60.0 + 5 * (rate == 0.03)

    rows = played(CONTEST, score)
    table = chosen(CONTEST, rows)
    assert table["exact", 8].rate == table["tokens-0.3", 8].rate == 0.03
    assert table["exact", 8].ended == "0.01: 60; 0.03: 65"
    assert table["exact", 8].why.endswith("(Tokens(0.3))")
    assert table["exact", 4].rate == table["exact", 16].rate == 0.01, "no other way is there"
    short = CONTEST.cell(WAYS["exact"], 8, 0.5, costs_of(CONTEST), 1)
    done = {row["run"] for row in rows}
    assert Run(short, RATES.index(0.01), 0).identity not in done, "only the whole time is run twice"


def test_with_finals_the_whole_time_decides_between_the_best_two_rates():
    """In half of the time 0.03 is the best and 0.01 the second, for all ways; in the whole 0.01 is
    the better on validation data, and of exact training on test data."""
    early, late = {0.03: 3.0, 0.01: 2.0}, {0.01: 3.0, 0.03: 2.0}

    def score(run):
        whole = run.cell.time == CONTEST.length
        value = (late if whole else early).get(run.learning_rate, 0.0)
        return value + (run.cell.batch == 8) * 10

    contest = replace(CONTEST, tuning_seeds=(100, 101), finals=True)
    rows = played(contest, score)
    table = chosen(contest, rows)
    assert {table[way, 8].rate for way in contest.ways} == {0.01}
    assert table["tokens-0.3", 8].ended == "0.03: 12; 0.01: 13"
    wrong = contest.cell(WAYS["tokens-0.3"], 8, 1.0, costs_of(contest), 1)
    done = {row["run"] for row in rows}
    assert Run(wrong, RATES.index(0.03), 0).identity not in done, "finals come first"
    assert chosen(replace(contest, finals=False), rows)["exact", 8].rate == 0.03


def test_other_ways_take_the_batch_that_is_best_for_those_that_they_follow():
    def score(run):
        return float(run.cell.batch == (8 if run.cell.way == "exact" else 4))

    def sizes(*ways, **changes):
        contest = replace(CONTEST, ways=("exact", *ways), **changes)
        table = chosen(contest, played(contest, score))
        return [batch for way, batch in table if way == ways[-1]]

    assert sizes("tokens-0.3", "tokens-0.2") == [4]
    assert sizes("tokens-0.3", "rows-0.3") == [8]
    assert sizes("tokens-0.3", "tuner") == [8, 4]
    assert sizes("tokens-0.2") == [8]  # nobody tried sizes for it
    assert sizes("tokens-0.3", "tokens-0.169", published=16) == [4, 16]


def test_choices_are_stored_by_task_and_come_back_as_they_were(tmp_path):
    table = list(chosen(CONTEST, played(CONTEST, lambda run: 50.0)).values())
    open_ = list(chosen(CONTEST, []).values())
    assert {choice.rate for choice in open_} == {None}
    other = [choice._replace(task="gpt") for choice in open_]
    write_choices(tmp_path, other)
    write_choices(tmp_path, open_)
    write_choices(tmp_path, table)
    assert read_choices(tmp_path) == [*other, *table]


def test_the_time_to_equal_quality_is_that_of_the_definition():
    """Exact training: 60 at its end, with batches of 4, which validation did not choose, 55.

    Kept tokens: 50 at the half, 70 at the end.
    """

    def score(run):
        if not run.cell.tested:
            return 1.0 + (run.cell.batch == 8)
        half = run.cell.time < CONTEST.length
        if run.cell.way == "exact":
            return 40.0 if half else 60.0 - 5 * (run.cell.batch == 4)
        if run.cell.way == "rows-0.3":
            return 55.0
        return (50.0 if half else 70.0) + 8 * (run.seed - 0.5) * (run.cell.way == "tuner")

    outcome = outcome_of(CONTEST, played(CONTEST, score))
    found = {curve.way.name: outcome.ratio(curve) for curve in outcome.curves if curve.batch == 8}
    assert outcome.control.batch == 8
    assert found["exact"].value == 1.0
    assert found["tokens-0.3"].value == found["tokens-0.3"].low == 0.75
    # Seeds 4 below and 4 above: of the four resamples one has twice the better, one the worse.
    assert (found["tuner"].low, found["tuner"].value) == (0.65, 0.75)
    assert found["tuner"].high == pytest.approx(0.85)
    assert math.isinf(found["rows-0.3"].value)
    assert found["rows-0.3"].text() == "> 1"
    assert {c.way.name: outcome.cost(c) for c in outcome.curves if c.batch == 8}[
        "tokens-0.3"
    ] == 0.5
    assert reached([(0.25, 61.0), (1.0, 70.0)], 60.0) == 0.25


def test_a_tuner_pays_for_its_probes_and_for_the_budgets_it_chose():
    problem = TASKS["vit"].problem(small=True)
    model = problem.prepared("Tokens(0.3)")
    optimizer = torch.optim.AdamW(model.parameters())
    steps = TunedSteps(model, optimizer, problem, LADDER, steps=5000)
    count = len(steps.units)
    assert steps.cost([1.0] * count) == 1
    assert steps.cost([0.5] * count) == 0.5
    trial = [0.5] * count
    alone = count * (0.5 / count + (count - 1) / count)
    assert steps.probe_cost(trial) == pytest.approx(3 + alone + 0.5)
    batch = problem.draw(torch.Generator().manual_seed(0), 8)
    problem.loss_of(model, batch).backward()
    optimizer.step()
    steps.tuner.next_probe = 0
    paid = steps.before(batch)
    assert paid > 4
    assert len(steps.story) == 1
    assert steps.before(batch) == steps.cost(steps.tuner.controller.budgets)


def test_a_run_that_was_stopped_goes_on_to_the_same_score(tmp_path):
    contest = replace(CONTEST, ways=("exact", TUNER), length=20)
    cell = contest.cell(find_way(TUNER), 8, 1.0, costs_of(contest), 1)
    run = Run(cell, 2, 0)
    whole, _ = cell.trainer(run)
    stopped, _ = cell.trainer(run)
    file = tmp_path / "run.pt"
    stopped.run_to(9, Checkpoint(file, 0.0))
    again, _ = cell.trainer(run)
    found, resumed = whole.train(), again.train(Checkpoint(file, 1e9))
    assert resumed["test_curve"] == found["test_curve"]
    assert resumed["loss_curve"] == found["loss_curve"]
    assert whole.steps == again.steps


def test_ratios_are_taken_round_by_round_and_only_what_is_missing_is_timed():
    found = compared({"/8": [1.0, 2.0, 4.0], "Tokens(0.3)/8": [0.5, 1.0, 4.0]}, "/8")
    assert found["costs"] == {"/8": 1.0, "Tokens(0.3)/8": 0.5}
    contest = replace(CONTEST, batches=(8,), ways=("exact", "tokens-0.3", "rows-0.3"))
    assert missing_kinds(contest, found) == [('Rows(0.3, unit="token")', 8)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('task = "chess"', "task 'chess' is unknown; use one of documents"),
        ('task = "vit"\nways = ["l3"]', "way 'l3' is unknown; use some of exact"),
        ('task = "vit"\nrates = [0.1]', "give five, falling"),
        ('task = "vit"\nlength = 0', "length, batches and the way 'exact' are needed"),
    ],
)
def test_what_a_preset_says_wrong_is_told_before_anything_runs(text, told, tmp_path):
    path = tmp_path / "mine.toml"
    shared = f"[protocol]\nlength = 5\nbatches = [8]\nrates = {list(RATES)}\n"
    path.write_text(f"{shared}[[extra]]\n{text}\n")
    with pytest.raises(ExperimentError, match=told.replace("[", r"\[")):
        PAY.contests(str(path))


def test_by_the_clock_each_seed_is_kept_and_none_is_run_twice(monkeypatch):
    contest = replace(CONTEST, ways=("exact", "tokens-0.3"), clocked=(0, 1))
    outcome = outcome_of(contest, played(contest, lambda run: 50.0))
    curve = next(c for c in outcome.curves if c.way.name == "tokens-0.3")
    kept, ran = [], []

    def one_seed(outcome, curve, share, seed, quiet, saved):
        ran.append(seed)
        return {"seconds": [10.0, 4.0 + 4 * seed], "quality": [50.0, 50.0]}

    monkeypatch.setattr(earnest, "_one_seed", one_seed)
    earnest.run_in_earnest(outcome, curve, 0.5, {}, True, kept.append, None)
    assert [found["ratio"] for found in kept] == [0.4, 0.6]
    earnest.run_in_earnest(outcome, curve, 0.5, kept[0], True, kept.append, None)
    assert ran == [0, 1, 1]
    assert kept[-1] == kept[1]
    earnest.run_in_earnest(outcome, curve, 0.6, kept[0], True, kept.append, None)
    assert ran == [0, 1, 1, 0, 1]  # another share: all anew


def test_stopped_by_the_clock_both_go_on_where_they_were(monkeypatch, tmp_path):
    contest = replace(CONTEST, ways=("exact", "tokens-0.3"))
    outcome = outcome_of(contest, played(contest, lambda run: 50.0))
    curve = next(c for c in outcome.curves if c.way.name == "tokens-0.3")
    saved, given = Checkpoints(tmp_path / "checkpoints", every=0.0), (outcome, curve, 0.5, 0, True)
    taken, plain = [], Trainer.train_step

    def counted(trainer, stop=math.inf):
        if len(taken) == stop:
            raise KeyboardInterrupt
        taken.append(trainer)
        return plain(trainer)

    monkeypatch.setattr(Trainer, "train_step", counted)
    whole = earnest._one_seed(*given, Checkpoints(tmp_path / "other"))
    steps = len(taken)
    taken.clear()
    monkeypatch.setattr(Trainer, "train_step", lambda trainer: counted(trainer, 7))
    with pytest.raises(KeyboardInterrupt):
        earnest._one_seed(*given, saved)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    taken.clear()
    monkeypatch.setattr(Trainer, "train_step", counted)
    assert earnest._one_seed(*given, saved)["quality"] == whole["quality"]
    assert len(taken) == steps - 7
    assert not (tmp_path / "checkpoints").exists()


def test_what_was_predicted_is_held_against_exact_training_at_the_same_batch(tmp_path, monkeypatch):
    """Found: 0.75 for kept tokens at batch 4, where exact training ends at 60; rows do not get
    there: exact training has their 50 after 0.7 of the time."""
    monkeypatch.setattr(predictions, "ADVISED", tmp_path)
    lines = ["task,name,line,time,change,error", "vit,Tokens(0.3),,0.5,0.6,0.05"]
    lines.append("vit,Rows(0.3),,0.8,1.4,0.1")
    (tmp_path / "options.csv").write_text("\n".join([*lines, "vit,L1(0.3),,,,", ""]))
    (tmp_path / "summary.csv").write_text("task,batch\nvit,4\n")

    def score(run):
        size = run.cell.batch
        if not run.cell.tested:
            return 10.0 * (size == (8 if run.cell.way == "exact" else 4))
        half = run.cell.time < CONTEST.length
        if run.cell.way == "exact":
            return 40.0 if half else {8: 65.0, 4: 60.0, 16: 50.0}[size]
        return 50.0 if half or run.cell.way == "rows-0.3" else 70.0

    outcome = outcome_of(CONTEST, played(CONTEST, score))
    kept, rows = predictions.pairs({"vit": outcome})
    assert (kept.way, kept.said.change, kept.found.value) == ("Tokens(0.3)", 0.6, 0.75)
    assert kept.miss == pytest.approx(0.2)
    assert rows.found.value == pytest.approx(1 / 0.7)
    # 0.75 is in 0.5 to 1.2 × 0.6 + 0.1, and not in 0.6 ± 0.1; 1.43 is in both of 1.4.
    counted = predictions.summary([kept, rows])
    assert [counted[name] for name in ("inside", "within_errors", "promised", "kept")] == [
        2,
        1,
        1,
        1,
    ]
    (tmp_path / "summary.csv").write_text("task,batch\nvit,16\n")  # rows run at 8, tokens at 4
    assert [pair.way for pair in predictions.pairs({"vit": outcome})] == [rows.way]
    # Asked twice, the nearer batch answers; padding has no budget, so that 0.28 stands for 0.3.
    (tmp_path / "summary.csv").write_text("task,batch\nvit,16\nvit@4,4\n")
    both = ["vit@4,Tokens(0.283),,0.7,0.9,0.05", "vit@4,Tokens(0.189),,0.6,0.8,0.05"]
    (tmp_path / "options.csv").write_text("\n".join([*lines, *both, ""]))
    assert [pair.said.change for pair in predictions.pairs({"vit": outcome})] == [0.9, 1.4]


def test_smoke(tmp_path, capsys):
    """From nothing to a page; from the tables alone, as in a clone, the same again."""
    threads = torch.get_num_threads()
    call = ["pay", "--preset", "smoke", "--out", str(tmp_path), "--quiet", "--seconds", "0"]
    vit = [*call, "--workers", "0", "--task", "vit"]
    try:
        assert main([*call, "--task", "sst2-padded", "--plan"]) == 0
        assert "nothing is trained" in capsys.readouterr().out
        assert main([*vit, "--ways", "l3"]) == 1
        assert "way 'l3' is unknown; use some of exact" in capsys.readouterr().err
        assert main([*vit, "--ways", "tuner"]) == 0
        assert {row["way"] for row in read_rows(tmp_path / "vit", SCHEMA)} == {"exact", "tuner"}
        assert main([*vit, "--earnest"]) == 0
        chosen_ways = {choice.way for choice in read_choices(tmp_path)}
        assert chosen_ways == {"exact", "tokens-0.3", "tuner"}
        stored = ("README.md", "summary.csv", "choices.csv")
        before = [(tmp_path / name).read_bytes() for name in stored]
        (tmp_path / "vit" / "runs.sqlite").unlink()
        assert main([*vit, "--stored"]) == 0
        assert [(tmp_path / name).read_bytes() for name in stored] == before
        capsys.readouterr()
        assert main([*vit, "--plan"]) == 0
        told = capsys.readouterr().out
        assert ", 0 missing" in told
        assert "| exact (control) |" in told
    finally:
        torch.set_num_threads(threads)
        capsys.readouterr()
