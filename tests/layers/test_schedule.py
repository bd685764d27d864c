"""Schedules and budgets."""

from __future__ import annotations

import pytest
from torch import nn

import sketchprop as sp
from sketchprop.layers.schedule import budget_at, check_schedule
from stack_helpers import net


def test_a_budget_holds_from_its_step_on() -> None:
    schedule = check_schedule({2000: 0.1, 0: 1.0, 500: 16})
    steps = (0, 499, 500, 1999, 2000, 10**9)
    assert [budget_at(schedule, s) for s in steps] == [1.0, 1.0, 16, 16, 0.1, 0.1]
    assert list(schedule) == [0, 500, 2000]
    given = {0: 1.0}
    kept = check_schedule(given)
    given[5] = 2.0
    assert kept == {0: 1.0}


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        *((bad, "no budget for step 0") for bad in ({500: 0.1}, {})),
        ({0: 1.0, -5: 0.1}, "the step -5, int; steps are integers"),
        ({0: 1.0, 2.5: 0.1}, "the step 2.5, float; steps are integers"),
        ({"0": 1.0}, "the step '0', str; steps are integers"),
        ({0: 1.5}, "not a kept fraction"),
        ({0: 0}, "keeps nothing"),
    ],
)
def test_a_bad_schedule_is_refused(schedule, says) -> None:
    with pytest.raises(ValueError, match=says):
        check_schedule(schedule)


def test_a_function_is_no_schedule() -> None:
    with pytest.raises(TypeError, match="give budgets by their first step"):
        check_schedule(lambda step: 0.5)


def test_set_budget_keeps_the_rest_of_each_sketch() -> None:
    model = sp.sketch_(net(), {"0": sp.L1(0.3, root=True), "3": sp.Variance(0.2, exact_bias=False)})
    assert sp.set_budget_(model, 0.5) is model
    assert model[0].sketch == sp.L1(0.5, root=True)
    assert model[3].sketch == sp.Variance(0.5, exact_bias=False)
    assert type(model[5]) is nn.Linear
    same = model[0].sketch
    sp.set_budget_(model, 0.5)
    assert model[0].sketch is same


def test_one_is_a_rank_and_one_point_zero_everything() -> None:
    model = sp.sketch_(net(), sp.L1(1.0))
    sp.set_budget_(model, 1)
    assert model[0].sketch.rank(24) == 1
    sp.set_budget_(model, 1.0)
    assert model[0].sketch.rank(24) == 24


def test_nothing_to_set_and_bad_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match="no sketched layer"):
        sp.set_budget_(net(), 0.5)
    with pytest.raises(ValueError, match="not a kept fraction"):
        sp.set_budget_(sp.sketch_(net(), sp.L1(0.3)), 1.5)
