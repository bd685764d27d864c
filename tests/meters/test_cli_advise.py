"""sketchprop advise: the answer first, an optimizer, a trial."""

import json

import pytest


def test_advise_answers_first_and_with_its_exit_code(run, mine):
    code, out, err = run("advise", "--model", f"{mine}:make", "--minutes", "0.1")
    assert code == 1
    assert out.startswith("Stay exact: no sketch pays here.")
    assert "half of the batch" in out
    assert "3 batches are different" in err
    code, out, _ = run("advise", "--model", f"{mine}:make", "--minutes", "0.1", "--json")
    assert json.loads(out)["pays"] is False


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        ("one", [], "at least two"),
        ("make", ["--minutes", "1e-9"], "too short"),
        ("with_optimizer", ["--optimizer", "sgd"], "leave out --optimizer"),
        ("with_nonsense", [], "give a torch optimizer"),
        ("make", ["--steps", "9", "--learning-rate", "1e30"], "give a lower --learning-rate"),
        ("twice", ["--steps", "9"], "loss_fn returned a tuple"),
    ],
)
def test_bad_input_ends_with_two_and_a_way_out(run, mine, factory, options, message):
    code, out, err = run("advise", "--model", f"{mine}:{factory}", *options)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""


def test_the_optimizer_of_the_factory_or_one_by_name_gives_the_metric(run, mine):
    asked = ("advise", "--minutes", "0.05", "--steps", "3", "--json")
    for options in (["--model", f"{mine}:with_optimizer"], ["--optimizer", "adam"]):
        given = ["--model", f"{mine}:make", *options]
        _, out, _ = run(*asked, *given)
        assert "not made a step yet" not in out
    _, out, _ = run("advise", "--minutes", "0.05", "--model", f"{mine}:with_optimizer")
    assert "not made a step yet" in out


def test_a_trial_says_who_is_ahead(run, mine):
    options = ("--minutes", "0.05", "--trial", "0.05")
    code, out, _ = run("advise", "--model", f"{mine}:with_optimizer", *options)
    assert code in (0, 1)
    assert "Tried: half of the batch is" in out
    assert "The trial" in out
