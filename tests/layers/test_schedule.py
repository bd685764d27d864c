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


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        *((bad, "of which 0 is one") for bad in ({500: 0.1}, {}, [(0, 1.0)])),
        *((bad, "from each of some steps") for bad in ({0: 1.0, -5: 0.1}, {0: 1.0, 2.5: 0.1})),
        ({0: 1.5}, "not a kept fraction"),
        ({0: 0}, "keeps nothing"),
    ],
)
def test_a_bad_schedule_is_refused(schedule, says) -> None:
    with pytest.raises(ValueError, match=says):
        check_schedule(schedule)


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
