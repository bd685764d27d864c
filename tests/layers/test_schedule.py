"""Ladders and budgets."""

from __future__ import annotations

import pickle

import pytest
from torch import nn

import sketchprop as sp
from sketchprop.layers.schedule import Ladder
from stack_helpers import net


def test_a_ladder_is_a_function_of_the_step() -> None:
    ladder = Ladder({2000: 0.1, 0: 1.0, 500: 16})
    assert [ladder(s) for s in (0, 499, 500, 1999, 2000, 10**9)] == [1.0, 1.0, 16, 16, 0.1, 0.1]
    assert repr(ladder) == "Ladder({0: 1.0, 500: 16, 2000: 0.1})"
    again = pickle.loads(pickle.dumps(ladder))
    assert again == ladder
    assert hash(again) == hash(ladder)
    assert again(600) == 16
    assert ladder != Ladder({0: 1.0})


@pytest.mark.parametrize(
    ("rungs", "error", "says"),
    [
        ({500: 0.1}, ValueError, "no budget for step 0"),
        ({}, ValueError, "no budget for step 0"),
        ({0: 1.0, -5: 0.1}, ValueError, "-5 is not a step"),
        ({0: 1.0, 2.5: 0.1}, ValueError, "2.5 is not a step"),
        ({0: 1.5}, ValueError, "not a kept fraction"),
        ({0: 0}, ValueError, "keeps nothing"),
        ([(0, 1.0)], TypeError, "give a mapping"),
    ],
)
def test_a_bad_ladder_is_refused(rungs, error, says) -> None:
    with pytest.raises(error, match=says):
        Ladder(rungs)


def test_a_step_before_the_start_is_refused() -> None:
    with pytest.raises(ValueError, match="before the start"):
        Ladder({0: 0.5})(-1)


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
