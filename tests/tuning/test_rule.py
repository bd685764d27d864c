"""The rule and the controller on problems whose a, c and σ² are known."""

import itertools
import json
import random

import pytest

from sketchprop.tuning import controller as controller_file
from sketchprop.tuning.controller import Controller, Probe
from sketchprop.tuning.rule import LADDER, Problem, best, calmed, undrowned

REST, SLOPES, NOISE = 1.0, (0.8, 0.5, 0.4, 0.3), (0.01, 0.0025, 0.05, 0.2)


def probed(truth, controller, jitter=None, overhead=0.3):
    """What a probe would find on ``truth``; ``jitter`` multiplies each number by up to ±10 %."""
    trial = controller.probe_rungs()
    n = len(trial)
    ones = [1.0] * n

    def seen(value):
        return value if jitter is None else value * jitter.uniform(0.9, 1.1)

    def alone(i):
        return [trial[k] if k == i else 1.0 for k in range(n)]

    return Probe(
        exact=truth.time(ones) - overhead,
        alone=tuple(truth.time(alone(i)) - overhead for i in range(n)),
        together=truth.time(trial) - overhead,
        elsewhere=overhead,
        cost=1.0,
        total=seen(2.0),
        noise=tuple(seen(2 * v) for v in truth.parts(trial)),
        noise_together=seen(2 * truth.added(trial)),
    )


def optimum(truth):
    return min(map(truth.score, itertools.product(LADDER, repeat=len(truth.slopes))))


@pytest.mark.parametrize("power", [1.0, 1.8])
@pytest.mark.parametrize("start", [1.0, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_from_far_off_it_is_within_5_percent_of_the_optimum_after_10_probes(power, start, seed):
    truth = Problem(REST, SLOPES, NOISE, power)
    controller = Controller([0, 1, 2, 3], [start] * 4)
    jitter = random.Random(seed)
    for _ in range(10):
        controller.learn(probed(truth, controller, jitter))
    assert truth.score(controller.budgets) <= 1.05 * optimum(truth)
    assert truth.change(controller.budgets) < 0.9


def test_the_best_rungs_are_those_of_a_full_search():
    draw = random.Random(0)
    for _ in range(20):
        noise = tuple(10 ** draw.uniform(-4, 1) for _ in range(4))
        slopes = tuple(draw.uniform(-0.2, 1) for _ in range(4))
        truth = Problem(1.0, slopes, noise)
        found = best(truth, LADDER, [1.0] * 4)
        assert truth.score(found) <= 1.01 * optimum(truth)
        assert all(p == 1 for p, c in zip(found, slopes, strict=True) if c <= 0)


def test_it_follows_a_problem_that_drifts():
    """The noise grows 50-fold in 20 probes; at every later probe it stays within a tenth."""
    controller = Controller([0, 1, 2, 3], [1.0] * 4)
    budgets = []
    for k in range(20):
        noise = tuple(a * 50 ** (k / 19) for a in NOISE)
        truth = Problem(REST, SLOPES, noise)
        controller.learn(probed(truth, controller))
        budgets.append(list(controller.budgets))
        if k >= 5:
            assert truth.score(controller.budgets) <= 1.1 * optimum(truth)
    assert sum(budgets[-1]) > sum(budgets[5])


def test_a_unit_that_is_never_faster_stays_exact():
    truth = Problem(REST, (0.8, -0.1, 0.0, 0.3), (0.0005,) * 4)
    controller = Controller([0, 1, 2, 3], [0.5] * 4)
    for _ in range(6):
        controller.learn(probed(truth, controller))
    assert controller.budgets[1:3] == [1.0, 1.0]
    assert max(controller.budgets[0], controller.budgets[3]) < 1


def test_a_sketch_with_a_fixed_cost_is_found_where_it_pays_only_far_down():
    """At 0.5 it saves nothing at all: one trial there would call it slow for ever."""
    truth = Problem(REST, (1.0, 1.0), (0.0005,) * 2, fixed=(0.5, 0.5))
    assert truth.time([0.5, 0.5]) == truth.time([1.0, 1.0])
    for kinds in ([0, 0], [0, 1]):
        controller = Controller(kinds, [1.0] * 2)
        for _ in range(8):
            controller.learn(probed(truth, controller))
        assert truth.score(controller.budgets) <= 1.05 * optimum(truth)
        assert max(controller.budgets) <= 0.25


def test_where_nothing_pays_it_ends_exact_and_looks_ever_more_rarely():
    truth = Problem(REST, (0.1,) * 4, (1.5,) * 4)
    controller = Controller([0, 1, 2, 3], [0.25] * 4)
    waits = []
    for _ in range(10):
        controller.learn(probed(truth, controller))
        waits.append(controller.wait(0.03))
    assert controller.budgets == [1.0] * 4
    assert waits[1:8] == [waits[0] * 2**k for k in (1, 2, 3, 4, 5, 6, 6)]
    # A probe costs 1: at every one of them no more than 3 % were spent before it.
    assert waits[0] * truth.time([1.0] * 4) >= 1 / 0.03


def test_noise_that_drowns_the_gradient_sends_back_to_exact_whatever_the_time():
    truth = Problem(0.0, (1.0, 1.0), (0.001, 0.2))
    assert undrowned(truth, [0.1, 0.1]) == [0.1, 1.0]
    assert calmed(truth, [0.1, 0.1], LADDER) == [0.1, 0.7]
    controller = Controller([0, 1], [0.1, 0.1])
    decision = controller.learn(probed(truth, controller, overhead=0.1))
    assert controller.budgets == [0.1, 1.0]
    assert "drowns" in decision["why"]


def test_a_move_needs_a_gain_above_two_percent(monkeypatch):
    truth = Problem(1.0, (1.0,), (0.012,))
    scores = {p: truth.score([p]) for p in LADDER}
    wanted = min(scores, key=scores.get)
    near = LADDER[LADDER.index(wanted) - 1]
    assert 1 < scores[near] / scores[wanted] < 1.02
    for gain, moves in ((0.02, False), (0.0, True)):
        monkeypatch.setattr(controller_file, "GAIN", gain)
        controller = Controller([0], [near])
        assert controller.learn(probed(truth, controller))["moved"] is moves
        assert controller.budgets == [wanted if moves else near]


@pytest.mark.parametrize("first", [True, False])
def test_one_probe_of_a_huge_gradient_hardly_counts(first):
    """Its noise is nothing: in a plain mean all that was known of noise would be gone with it."""
    truth = Problem(REST, SLOPES, NOISE)
    controller = Controller([0, 1, 2, 3], [0.5] * 4)
    usual = probed(truth, controller)
    huge = Probe(**{**vars(usual), "total": 1e6 * usual.total})
    for probe in [huge, usual, usual] if first else [usual, usual, huge]:
        controller.watch(probe)
    assert 1 / 6 < controller.watch(usual)["noise"] / truth.added([0.5] * 4) <= 1


def test_times_of_one_kind_are_pooled_and_frozen_after_three_probes():
    truth = Problem(REST, (0.5,) * 6, (0.005,) * 6)
    controller = Controller([0] * 6, [1.0] * 6)
    good = probed(truth, controller)
    outlier = Probe(**{**vars(good), "alone": (good.exact * 3, *good.alone[1:])})
    controller.learn(outlier)
    assert controller.problem().slopes == pytest.approx((0.5,) * 6)
    for _ in range(2):
        controller.learn(probed(truth, controller))
    assert controller.frozen_times
    frozen = controller.problem()
    slow = Problem(9.0, (9.0,) * 6, (0.005,) * 6)
    controller.learn(probed(slow, controller))
    assert controller.problem().slopes == frozen.slopes
    assert controller.problem().rest == frozen.rest


@pytest.mark.parametrize("seed", range(20))
def test_times_that_jitter_never_change_the_time_of_an_exact_step(seed):
    """Units that save nothing, timed with an error of a half: T(1) stays, and with it the wait."""
    truth = Problem(1.0, (0.0,) * 4, NOISE)
    jitter = random.Random(seed)
    controller = Controller([0, 1, 2, 3], [1.0] * 4)
    for _ in range(3):
        good = probed(truth, controller)
        alone = tuple(t * jitter.uniform(0.5, 1.5) for t in good.alone)
        together = good.together * jitter.uniform(0.5, 1.5)
        controller.learn(Probe(**{**vars(good), "alone": alone, "together": together}))
        problem = controller.problem()
        assert problem.time([1.0] * 4) == pytest.approx(1.0)
        assert all(problem.time([p] * 4) >= 0 for p in LADDER)
        assert controller.wait(0.03) * problem.time(controller.budgets) >= 1 / 0.03 - 1e-9


def test_a_controller_goes_on_from_its_state_through_json():
    truth = Problem(REST, SLOPES, NOISE, 1.5)
    jitter = random.Random(1)
    whole = Controller([0, 1, 2, 3], [1.0] * 4)
    for _ in range(4):
        whole.learn(probed(truth, whole, jitter))
    resumed = Controller.from_state(json.loads(json.dumps(whole.state_dict())))
    for _ in range(4):
        probe = probed(truth, whole, jitter)
        assert whole.learn(probe) == resumed.learn(probe)
    assert whole.state_dict() == resumed.state_dict()
