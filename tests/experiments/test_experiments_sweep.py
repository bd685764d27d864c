"""Sweeps: what a TOML file asks for, which runs that is, and how claims are decided."""

from functools import partial

import pytest
from experiment_helpers import changed

from experiments.lab import ExperimentError, claims, sweep
from experiments.lab.engine import missing_jobs
from experiments.lab.selection import PointResult, Results, SeedResult
from experiments.lab.sweep import Point, Run, planned_runs
from experiments.methods import COLOURS, METHODS, make_sketch
from experiments.mnist.study import CLAIMS, FIGURES, MNIST

Protocol = partial(changed, MNIST.protocol)


def test_methods_are_the_sketches_of_the_paper():
    """p ∝ proxy is the paper's 'squared'; its masks are independent coins."""
    for name, method in METHODS.items():
        sketch = make_sketch(method.expression(0.2))
        if sketch is None:
            assert name in ("exact",)
            continue
        coins = name.endswith("-independent") or name in ("element", "sample", "column")
        assert (sketch.sampling == "independent") == coins
        assert getattr(sketch, "root", False) == name.endswith("-root")
        assert sketch.budget == 0.2
        assert method.colour in COLOURS or not method.figures


def test_a_budget_of_one_keeps_all_and_a_whole_number_is_a_rank():
    """1.0 once became the text "1", which is rank 1."""
    for name in set(METHODS) - {"exact"}:
        assert make_sketch(METHODS[name].expression(1.0)).rank(64) == 64
        assert make_sketch(METHODS[name].expression(3)).rank(64) == 3


@pytest.mark.parametrize("preset", ["paper", "smoke"])
def test_presets_make_every_figure(preset):
    made = MNIST.load(preset)
    assert set(made.figures) == set(FIGURES)
    networks = {p.cell.widths for p in (*made.extras, *made.points("2b"))}
    assert networks >= {(784, 64, 64, 64, 10)}
    runs = [run for p in made.select(made.figures, True) for run in planned_runs(p, {})]
    assert len({run.identity for run in runs}) == len(runs)


def test_identity_is_all_that_decides_the_result():
    protocol = Protocol()
    cell = protocol.cell(METHODS["l1"], 0.1, "all")
    assert cell.identity == protocol.cell(METHODS["l1"], 0.1, "all").identity
    others = [
        changed(protocol, **change).cell(METHODS["l1"], 0.1, "all")
        for change in (
            {"epochs": 7}, {"batch_size": 64}, {"clip": 0.0}, {"widths": (784, 64, 64, 64, 10)},
            {"train_rows": 99}, {"validation_rows": 1}, {"test_rows": 5}, {"pixels": "normalised"},
        )
    ]  # fmt: skip
    others += [protocol.cell(METHODS["l1"], 0.2, "all"), protocol.cell(METHODS["l2"], 0.1, "all")]
    others += [protocol.cell(METHODS["l1"], 0.1, "first")]
    identities = {c.identity for c in (cell, *others)}
    assert len(identities) == 1 + len(others)
    runs = {Run(cell, i, s).identity for i in (0, 1) for s in (0, 1)}
    assert len(runs) == 4
    # What only decides which runs there are is no part of it.
    same = changed(protocol, seeds=(9,), stack=3, widen=0, budgets=(0.1,)).cell(
        METHODS["l1"], 0.1, "all"
    )
    assert same.identity == cell.identity


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[[extra]]\nmethods = ["l3"]', r"method 'l3' is unknown; did you mean 'l[12]'"),
        ("[protocol]\nepoch = 3", r"\[protocol\]: epoch is unknown; use .*epochs"),
        ("[protocol]\nepochs = 'many'", "epochs = 'many' must be a number"),
        ("[protocol]\npixels = 'grey'", "pixels = 'grey'; use unit or normalised"),
        ("[protocol]\nseeds = [0, 1, 0]", r"seeds = \[0, 1, 0\] has 0 more than once; give each"),
        ("[protocol]\nbudgets = [1.5]", r"budget=1.5 is not a kept fraction"),
        ("[protocol]\nseeds = [0]\ntuning_seeds = 2", "tuning_seeds = 2; use 0 .* to 1"),
        ("[protocol]\nhalving = [3, 1, 1]", r"halving = \[3, 1, 1\]; give falling .* at least 2"),
        ("[protocol]\nhalving = [13, 1, 2]", "widen = 0 and tuning_seeds = 0"),
        ("[protocol]\nhalving = [13, 1, 2]\nwiden = 0\nstack = 12", "must be at least 13"),
        ("figures = ['3']", "figure '3' is unknown; use 1a"),
        ("[protocol", "is not valid TOML"),
    ],
)
def test_a_wrong_sweep_is_refused_before_anything_runs(tmp_path, content, message):
    path = tmp_path / "mine.toml"
    path.write_text(content)
    with pytest.raises(ExperimentError, match=message):
        MNIST.load(str(path))


def test_an_unknown_preset_is_refused():
    with pytest.raises(ExperimentError, match="no sweep 'huge'; use one of gpu, paper, smoke"):
        MNIST.load("huge")


def plan(best_of, seeds=(0,), **changes):
    """All runs, with validation accuracy decreasing in the distance from ``best_of[seed]``."""
    protocol = Protocol(learning_rates=(2, 4, 6), seeds=seeds, **changes)
    point = Point("l1", "all", 0.1, protocol)
    scores = {}
    for _ in range(20):
        runs = planned_runs(point, scores)
        missing = [run for run in runs if run.identity not in scores]
        if not missing:
            break
        scores |= {r.identity: 90.0 - abs(r.rate_index - best_of[r.seed]) for r in missing}
    return {seed: sorted(r.rate_index for r in runs if r.seed == seed) for seed in seeds}


def test_the_grid_widens_where_the_best_rate_is_at_an_edge():
    assert plan({0: 4}) == {0: [2, 4, 6]}
    assert plan({0: 6}) == {0: [2, 4, 6, 8]}
    assert plan({0: 2}) == {0: [0, 2, 4, 6]}
    assert plan({0: 8, 1: 4}, seeds=(0, 1), widen=3) == {0: [2, 4, 6, 8, 10], 1: [2, 4, 6]}
    assert plan({0: 99}, widen=2) == {0: [2, 4, 6, 8, 10]}
    assert plan({0: -99}, widen=1) == {0: [0, 2, 4, 6]}
    assert plan({0: 99}, widen=0) == {0: [2, 4, 6]}


def test_some_seeds_choose_the_rate_of_all():
    """The others wait for the choice, then train at that rate alone."""
    best = {0: 4, 1: 4, 2: 6}
    assert plan(best, (0, 1, 2), tuning_seeds=1) == {0: [2, 4, 6], 1: [4], 2: [4]}
    assert plan(best, (0, 1, 2), tuning_seeds=2) == {0: [2, 4, 6], 1: [2, 4, 6], 2: [4]}
    # The mean decides, of widening too: alone, seed 0 would go on to 0.
    grid = [2, 4, 6]
    far = {0: 2, 1: 4, 2: 4, 3: 6}
    assert plan(far, (0, 1, 2, 3), tuning_seeds=3) == {0: grid, 1: grid, 2: grid, 3: [4]}
    assert plan({0: 6, 1: 4}, (0, 1), tuning_seeds=1) == {0: [2, 4, 6, 8], 1: [6]}
    point = Point("l1", "all", 0.1, Protocol(learning_rates=(2, 4), tuning_seeds=1))
    assert {run.seed for run in planned_runs(point, {})} == {0}
    assert sweep.waiting_seeds(point, {}) == {1, 2}


def test_halving_keeps_the_best_rates_of_each_seed():
    cell = Protocol().cell(METHODS["l1"], 0.1, "all")
    values = {0: (90, 95, 95, 10), 1: (99, 20, 30, 40)}
    runs = [Run(cell, index, seed) for seed in (0, 1) for index in range(4)]
    scores = {run: values[run.seed][run.rate_index] for run in runs}
    passed = sweep.climbing(runs, scores, 2)
    assert [(run.seed, run.rate_index) for run in passed] == [(0, 1), (0, 2), (1, 0), (1, 3)]
    # Of equals the smallest rate, as in the choice at the end.
    alone = sweep.climbing(runs[:4], scores, 1)
    assert [run.rate_index for run in alone] == [2]
    assert sweep.best_rate(runs[:4], {r.identity: scores[r] for r in runs}) == 2


def test_halving_is_part_of_the_identity_and_seeds_stay_whole():
    whole = Protocol(learning_rates=(0, 2, 4), widen=0, seeds=(0, 1, 2), stack=7)
    halved = changed(whole, halving=(3, 1, 2))
    point = Point("l1", "all", 0.1, halved)
    assert point.cell.identity != Point("l1", "all", 0.1, whole).cell.identity
    jobs = missing_jobs([point], [])
    assert [[run.seed for run in job.runs] for job in jobs] == [[0, 0, 0, 1, 1, 1], [2, 2, 2]]
    # 3 rates for an epoch and 2 for 49, in stacks of two seeds and of one
    assert sum(job.cost for job in jobs) < sum(
        job.cost for job in missing_jobs([Point("l1", "all", 0.1, whole)], [])
    )


def stored(point, values):
    """Rows from (seed, rate): (validation, test there, highest test)."""
    return [
        {
            "run": Run(point.cell, rate, seed).identity,
            "validation_accuracy": validation,
            "test_accuracy": test,
            "best_test_accuracy": best,
            "best_epoch": 3,
            "clipped_fraction": 0.5,
            "diverged_epoch": int(test == 0),
            "ranks": [6, 6, 1],
        }
        for (seed, rate), (validation, test, best) in values.items()
    ]


def test_choice_on_validation_accuracy_from_test():
    protocol = Protocol(learning_rates=(0, 2, 4), seeds=(0, 1), widen=0)
    point = Point("l1", "all", 0.1, protocol)
    values = {  # seed, rate: validation, test there, highest test
        (0, 0): (90, 89, 99), (0, 2): (95, 93, 94), (0, 4): (91, 95, 95),
        (1, 0): (97, 96, 96), (1, 2): (95, 93, 94), (1, 4): (0, 0, 0),
    }  # fmt: skip
    rows = stored(point, values)
    summary = Results(rows).of(point)
    assert [summary.seeds[s].test for s in (0, 1)] == [93, 96]
    assert [summary.seeds[s].best_test for s in (0, 1)] == [99, 96]
    assert [summary.seeds[s].at_edge for s in (0, 1)] == [False, True]
    assert (summary.median, summary.best_median, summary.diverged) == (94.5, 97.5, 1)
    assert Results(rows[1:]).of(point) is None


def test_a_seed_that_follows_is_judged_at_the_rate_of_those_that_chose():
    protocol = Protocol(learning_rates=(0, 2), seeds=(0, 1, 2), widen=0, tuning_seeds=2)
    point = Point("l1", "all", 0.1, protocol)
    found = {(0, 0): 90, (0, 2): 80, (1, 0): 70, (1, 2): 75, (2, 0): 60, (2, 2): 99}
    rows = stored(point, {run: (value, value - 1, value) for run, value in found.items()})
    summary = Results(rows).of(point)
    assert [summary.seeds[s].test for s in (0, 1, 2)] == [89, 69, 59]
    assert [summary.seeds[s].best_test for s in (0, 1, 2)] == [90, 75, 60]
    assert {result.learning_rate for result in summary.seeds.values()} == {1.0}
    assert summary.runs == 5
    assert Results(rows[:4]).of(point) is None


def summaries(name, place="all", values=(), budgets=(0.05, 0.5)):
    found = {}
    for budget in budgets:
        point = Point(name, place, budget, Protocol(seeds=tuple(range(len(values)))))
        seeds = {s: SeedResult(v, v, 0, 0.1, 1, 0.0, False) for s, v in enumerate(values)}
        found[name, place, budget] = PointResult(point, seeds, (), 1, 0)
    return found


def test_sign_flips_are_counted_exactly():
    assert claims.sign_flip([1, 1, 1, 1, 1]) == 1 / 32
    assert claims.sign_flip([3, -1]) == 0.5
    assert claims.sign_flip([-1, -1, -1]) == 1.0
    assert claims.sign_flip([0.0, 0.0]) == 1.0


@pytest.mark.parametrize(
    ("better", "margin", "verdict"),
    [
        ((91, 92, 93, 94, 95), 0.0, claims.CONFIRMED),
        ((89, 88, 87, 86, 85), 0.0, claims.NOT_CONFIRMED),
        ((91, 89, 91, 89, 90), 0.0, claims.UNDECIDED),
        ((89.5, 89.4, 89.6, 89.5, 89.5), 1.0, claims.CONFIRMED),
        ((91, 92), 0.0, claims.UNDECIDED),
    ],
)
def test_a_comparison_is_decided_by_its_seeds(better, margin, verdict):
    found = summaries("gsv", values=better) | summaries("l1", values=[90] * len(better))
    outcome = claims.check(claims.Comparison(("gsv", "all"), ("l1", "all"), margin=margin), found)
    assert outcome.verdict == verdict
    assert outcome.difference == pytest.approx(sum(better) / len(better) - 90)


def test_a_claim_needs_all_of_its_comparisons():
    def outcome(p_above, p_below):
        return claims.Outcome(CLAIMS[0].comparisons[0], 0.0, 0.0, p_above, p_below, 5)

    yes, no, open_ = outcome(0.03, 1), outcome(1, 0.03), outcome(0.4, 0.6)
    assert claims.verdict([yes, yes]) == claims.CONFIRMED
    assert claims.verdict([yes, no, open_]) == claims.NOT_CONFIRMED
    assert claims.verdict([yes, open_]) == claims.UNDECIDED
    assert claims.verdict([yes, None]) == claims.UNDECIDED
    assert claims.verdict([]) == claims.UNDECIDED


def test_every_comparison_of_a_claim_is_run():
    made = MNIST.load("smoke")
    run = {(p.method, p.place) for name in made.figures for p in made.points(name)}
    for claim in CLAIMS:
        for comparison in claim.comparisons:
            assert {comparison.better, comparison.worse} <= run
