"""The command line: what it prints, what it writes, how it ends."""

import json
import sys

import pytest
import torch
from torch import nn

import sketchprop as sp
from sketchprop import zoo
from sketchprop.cli import main
from sketchprop.cli.expressions import UsageError, parse_sketch, parse_sketches
from sketchprop.cli.tasks import MODELS, load_task
from sketchprop.core import stopwatch

MLP = ("--model", "mlp")

# --- check -----------------------------------------------------------------------------------


def test_check_takes_sketches_of_ones_own(run, mine):
    for text in ("Half(0.3)", "mine"):  # a class, and a sketch that is made already
        assert run("check", f"{mine}:{text}")[0] == 0
    assert "made already" in run("check", f"{mine}:mine(0.3)")[2]
    code, out, _ = run("check", f"{mine}:Wrong(0.3)", "--json")
    assert code == 1
    (report,) = json.loads(out)
    assert report["ok"] is False


def test_check_on_a_model(run, mine):
    code, out, _ = run("check", "L1(0.5)", "--model", f"{mine}:make", "--draws", "60")
    assert code == 0
    assert "Monte Carlo, 60 draws" in out
    assert run("check", f"{mine}:Wrong(0.5)", "--model", f"{mine}:make", "--draws", "60")[0] == 1


def test_check_shows_the_verdict_first_and_only_what_fails(run):
    code, out, _ = run("check", "Diagonal(0.3, paper=True)", "L1(0.3)")
    assert code == 1
    assert out.startswith("Diagonal(0.3, paper=True): BIASED in 2 of")
    assert out.count("zero rows of W") == 2
    assert "one column" not in out
    assert "L1(0.3): unbiased" in out
    code, out, _ = run("check", "L1(0.3)")
    assert code == 0
    assert out.strip().count("\n") == 0
    _, out, _ = run("check", "L1(0.3)", "--verbose")
    assert out.startswith("L1(0.3): unbiased")
    assert "one column" in out


# --- measure ---------------------------------------------------------------------------------


def test_measure_shows_and_writes(run, mine, tmp_path):
    code, out, _ = run(
        *("measure", "--model", f"{mine}:make", "--sketch", "L1(0.5)", "--draws", "4"),
        *("--batches", "3", "--rounds", "1", "--json", "r.json"),
    )
    assert code in (0, 1)
    for word in ("σ²", "V/σ²", "by time", "in FLOPs", "V by the layer"):
        assert word in out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["pays"] is (code == 0)
    assert [line["layer"] for line in report["variance"]["layers"]] == ["0"]


def test_measure_answers_by_exit_code(run, mine):
    common = ("measure", "--model", f"{mine}:make", "--draws", "4", "--rounds", "0", "--json")
    # Everything kept costs nothing and adds nothing; one column of 32 adds far too much.
    code, out, _ = run(*common, "--sketch", "L1(1.0)")
    assert code == 0
    assert json.loads(out)["variance"]["added"]["value"] == 0
    code, out, _ = run(*common, "--sketch", "ColumnMask(1)", "--no-split")
    assert code == 1
    assert json.loads(out)["variance"]["relative"]["value"] > 1
    assert json.loads(out)["variance"]["layers"] == []


def test_measure_by_patterns_and_after_training(run):
    code, out, _ = run(
        *("measure", "--model", "mlp", "--sketch", "0=L1(0.5)", "2=L2(0.5)", "4=exact"),
        *("--draws", "2", "--batches", "2", "--batch-size", "16", "--rounds", "0", "--json"),
        *("--steps", "3"),
    )
    assert code in (0, 1)
    layers = json.loads(out)["variance"]["layers"]
    assert [(line["layer"], line["sketch"]) for line in layers] == [
        ("0", "L1(0.5)"),
        ("2", "L2(0.5)"),
    ]


def measured(run, *arguments):
    common = ("--sketch", "L1(0.5)", "--draws", "4", "--rounds", "0", "--json")
    code, out, err = run("measure", *arguments, *common)
    return json.loads(out) if code in (0, 1) else code, err


def test_batches_are_never_repeated_silently(run, mine):
    report, err = measured(run, "--model", f"{mine}:make")
    assert report["variance"]["batches"] == 3
    assert "3 batches are different, --batches asked for 8" in err
    repeated, err = measured(run, "--model", f"{mine}:repeated")
    assert "2 batches are different" in err
    twice, _ = measured(run, "--model", f"{mine}:make", "--batches", "2")
    assert repeated["variance"]["sigma2"] == twice["variance"]["sigma2"]
    code, err = measured(run, "--model", f"{mine}:one")
    assert code == 2
    assert "give at least two" in err


def test_an_endless_loader_is_not_drained(run, mine):
    report, err = measured(run, "--model", f"{mine}:endless", "--batches", "5", "--steps", "2")
    assert report["variance"]["batches"] == 5
    assert err == ""


def test_batches_that_training_uses_up(run, mine):
    for steps in ("3", "4"):
        code, err = measured(run, "--model", f"{mine}:used_up", "--steps", steps)
        assert code == 2
        assert "the factory's batches" in err
    report, _ = measured(run, "--model", f"{mine}:used_up", "--steps", "1")
    assert report["variance"]["batches"] == 2


def test_measuring_within_minutes(run, mine):
    report, _ = measured(run, "--model", f"{mine}:make", "--minutes", "1")
    assert report["variance"]["draws"] == 4
    code, err = measured(run, "--model", f"{mine}:make", "--minutes", "0.000001")
    assert code == 2
    assert "minutes=1e-06 is too short" in err


# --- plan ------------------------------------------------------------------------------------


def test_plan_lists_layers(run, mine, tmp_path):
    code, out, _ = run("plan", "--model", f"{mine}:make", "--rounds", "1")
    assert code in (0, 1)
    assert "32 × 6" in out
    assert "layers are worth Tokens(0.3)" in out
    code, out, _ = run("plan", "--model", f"{mine}:make", "--rounds", "1", "--json")
    report = json.loads(out)
    assert code == (0 if report["worthwhile"] else 1)
    assert [line["layer"] for line in report["layers"]] == ["0", "2"]


@pytest.mark.parametrize("command", ["plan", "measure", "report"])
def test_on_a_busy_machine_it_times_on_one_thread_and_says_so(
    run, mine, monkeypatch, command, two_threads
):
    seen = []
    monkeypatch.setattr(stopwatch, "_threads_help", seen.append)
    code, _, err = run(command, "--model", f"{mine}:make", "--rounds", "1")
    assert torch.get_num_threads() == 2
    assert code in (0, 1)
    assert err.count("other programs have the cores, 2 threads are no faster") == 1
    assert seen == [2], "asked once"


# --- help and mistakes -----------------------------------------------------------------------


@pytest.mark.parametrize("command", ["advise", "check", "measure", "plan", "report"])
def test_help_teaches(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "examples:" in out
    assert f"sketchprop {command}" in out
    assert "exit codes: 0 fine" in out
    code, out, _ = run("--help")
    assert code == 0
    assert command in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "L7(0.1)"], "'L7' is unknown in 'L7(0.1)'; built-in sketches are L1, L2"),
        (["check", "L1"], "'L1' has no budget; type for example L1(0.1)"),
        (["check", "L1(1.5)"], "not a kept fraction"),
        (["check", "L1(0.1, roots=True)"], "roots"),
        (["check", "__import__('os')"], "unknown in"),
        (["check", "1 + 1"], "is not a sketch, for example Rows(0.3)"),
        (["check", "nowhere_at_all:X(0.1)"], "no module 'nowhere_at_all'"),
        (["check", "os:system('echo RAN > ran')"], "not a sketch"),
        (["check", "os:mkdir('ran')"], "not a sketch"),
        (["check", "os:getcwd()"], "not a sketch"),
        (["measure", "--model", "resnet"], "use one of mlp, vit, bert, or module:factory"),
        (["report"], "no model to look at; give --model mine:factory"),
        (["measure", *MLP, "--sketch", "0=L1(0.1)", "L1(0.2)"], "each needs a pattern"),
        (["measure", *MLP, "--sketch", "fc9=L1(0.1)"], "the pattern 'fc9' matches no layer"),
        (["measure", *MLP, "--batches", "1", "--rounds", "0"], "give at least two"),
        (["measure", "--draws", "none"], "'none' is not a number from 1 on"),
        (["check", "L1(0.3)", "--json", "no/where.json"], "there is no folder 'no'"),
        (["plan", "--json", "no/where.json"], "there is no folder 'no'"),
        (["report", "--output", "nowhere/r.html"], "there is no folder 'nowhere'"),
        (["report", *MLP, "--sketch", "fc9=L1(0.1)", "--rounds", "0"], "matches no layer"),
        (["check"], "required"),
        (["bench"], "invalid choice"),
        ([], "required"),
    ],
)
def test_mistakes_end_with_two_and_a_way_out_and_write_nothing(run, tmp_path, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_mistakes_in_ones_own_factory(run, mine):
    for name, message in [
        (f"{mine}:missing", "has no function 'missing'; it has"),
        (f"{mine}:number", "has no function 'number'"),
        (f"{mine}:only_a_model", "return (model, loss_fn, batches)"),
    ]:
        code, _, err = run("plan", "--model", name)
        assert code == 2
        assert message in err
    with pytest.raises(UsageError):
        main(["plan", "--model", f"{mine}:missing", "--traceback"])


def test_a_failure_has_a_code_of_its_own(run, mine):
    """1 means 'does not pay', and a script must be able to tell."""
    code, out, err = run("plan", "--model", f"{mine}:breaks")
    assert code == 3
    assert out == ""
    assert "failed with RuntimeError: out of cheese; --traceback shows where" in err
    assert "Traceback" not in err
    with pytest.raises(RuntimeError, match="out of cheese"):
        main(["plan", "--model", f"{mine}:breaks", "--traceback"])


def test_ctrl_c_ends_as_shells_expect(run, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("sketchprop.cli.commands.check_unbiased", interrupted)
    assert run("check", "L1(0.3)")[0] == 130


def test_without_matplotlib_a_page_is_refused_before_minutes_are_spent(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run("report")
    assert code == 2
    assert "pip install 'sketchprop[cli]'" in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


# --- expressions and the zoo -----------------------------------------------------------------


def test_sketches_are_parsed_without_evaluating_code():
    assert parse_sketch("L1(0.1)") == sp.L1(0.1)
    assert parse_sketch("L2(16, sampling='independent')") == sp.L2(16, sampling="independent")
    assert parse_sketches(["a.*=L1(0.1)", "b=exact"]) == {"a.*": sp.L1(0.1), "b": None}
    nested = "Split(input=None, weight=L1(0.5, root=True))"
    assert parse_sketch(nested) == sp.Split(input=None, weight=sp.L1(0.5, root=True))
    for text in ("L1(open('x'))", "L1(0.1)(0.2)", "L1.budget(0.1)", "L1(0.1).budget", "L1(x)"):
        with pytest.raises(UsageError):
            parse_sketch(text)


@pytest.mark.parametrize("name", list(MODELS))
def test_built_in_models_can_be_sketched_and_trained(name):
    task = load_task(name, 4, seed=0)
    sp.sketch_(task.model, sp.L1(0.25))
    loss = task.loss_fn(task.model, *task.take(1))
    loss.backward()
    assert all(p.grad is not None for p in task.model.parameters())
    again = load_task(name, 4, seed=0)
    for a, b in zip(task.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_papers_mlp():
    widths = [m.weight.shape for m in zoo.mlp() if isinstance(m, nn.Linear)]
    assert widths == [(64, 784), (64, 64), (10, 64)]


def test_attention_of_the_zoo_is_torchs():
    torch.manual_seed(0)
    ours, theirs = zoo.Attention(12, 3), nn.MultiheadAttention(12, 3, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(ours.qkv.bias)
        theirs.out_proj.weight.copy_(ours.out.weight)
        theirs.out_proj.bias.copy_(ours.out.bias)
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0], rtol=1e-4, atol=1e-5)
