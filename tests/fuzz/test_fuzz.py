"""A fixed number of random cases, what the fuzzer has found so far, and the fuzzer itself.

``make soak MINUTES=10`` goes on for as long as one likes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sketchprop as sp
from fuzz_base import error_of, number, run
from fuzz_functions import Function
from fuzz_layers import Layer
from fuzz_models import Model
from fuzz_run import FAMILIES
from sketchprop.core import compact

SEED = 2026
CASES: dict[type[Any], int] = {Layer: 480, Function: 480, Model: 160}
CHUNK = 40


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("family", "first"),
    [(family, first) for family in FAMILIES for first in range(0, CASES[family], CHUNK)],
    ids=lambda value: value if isinstance(value, int) else value.__name__,
)
def test_no_random_case_fails(family: type[Any], first: int) -> None:
    failures = list(run(family, SEED, range(first, first + CHUNK)))
    assert not failures, "\n\n".join(map(str, failures))


FOUND: dict[str, Any] = {
    "a pair of which one side has the new budget already": Layer(
        seed=35,
        kind="linear",
        sketch=sp.Split(input=sp.Rows(0.95, sampling="independent"), weight=sp.L1(1)),
        steps=("budget 1",),
    ),
    "queries and keys whose numbers do not lie side by side": Function(
        seed=397, kind="attention", budget=1, layout="strided"
    ),
    "a mask that lies so": Function(
        seed=642, kind="attention", budget=1, layout="transposed", mask="added"
    ),
    "a product that is changed in place": Function(
        seed=332, kind="branch", budget=1, parts=("gated", "in place")
    ),
    "attention under autocast": Function(
        seed=28, kind="attention", budget=1, dtype=torch.float32, autocast=True
    ),
    "attention with dropout under autocast": Function(
        seed=380, kind="attention", budget=1, dropout=0.4, dtype=torch.float32, autocast=True
    ),
    "a Conv1D that keeps all": Layer(
        seed=755,
        kind="Conv1D",
        sketch=sp.L2(1),
        rows=(5, 1),
        widths=(2, 5),
        layout="transposed",
        frozen="weight",
    ),
    "coins on the meta device": Layer(
        seed=254, kind="linear", sketch=sp.Diagonal(1, sampling="independent"), device="meta"
    ),
    "directions on the meta device": Function(
        seed=146, kind="stack", sketch=sp.RankConstrained(1), sizes=(2, 2, 1), device="meta"
    ),
    "a branch on the meta device": Function(seed=1, kind="branch", budget=1, device="meta"),
    "attention on the meta device": Function(seed=1, kind="attention", budget=1, device="meta"),
    "float64 under autocast in a model of transformers": Model(
        seed=967, kind="GPT-2", sketch=sp.Tokens(1), autocast=True
    ),
}
"""Cases that failed once, shrunk."""


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_stays_right(name: str) -> None:
    FOUND[name].check()


def test_the_fuzzer_sees_a_defect_and_shrinks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that are not divided by their probabilities: biased, and nothing else is wrong."""
    monkeypatch.setattr(compact, "scaled", lambda values, scale: values + 0 * scale.to(values))
    failure = next(run(Layer, SEED, range(100)))
    assert "mean: " in failure.error
    again = eval(repr(failure.smallest), {**vars(sp), "Layer": Layer, "torch": torch})
    assert again == failure.smallest
    assert error_of(again) is not None
    assert again.steps == ()
    assert again.planner is None
    assert again.layout == "contiguous"
    monkeypatch.undo()
    assert error_of(again) is None


def test_a_number_is_a_case() -> None:
    for family in FAMILIES:
        assert number(family, 3, 5) == number(family, 3, 5)
        assert number(family, 3, 5) != number(family, 3, 6)
