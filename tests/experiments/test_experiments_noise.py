"""The noise of kept tokens: smoke runs on made-up data, resumed and redrawn; V/σ² as defined."""

import json

import pytest
import torch

from experiments.__main__ import main
from experiments.lab.noise import added_noise, exact_gradient, minibatch_noise, noise_batches
from experiments.lab.problem import Problem
from experiments.noise import study
from experiments.noise.study import ALL, Budgets, Plain, sketched_gradients
from experiments.tasks.table import TASKS
from sketchprop.layers import SketchedModule

pytestmark = pytest.mark.usefixtures("no_files")


def call(task, folder, *more):
    return main(
        ["noise", "--task", task, "--preset", "smoke", "--out", str(folder), "--quiet", *more]
    )


def test_a_killed_run_goes_on_with_what_is_missing(tmp_path, capsys, monkeypatch):
    assert call("vit", tmp_path / "whole") == 0
    assert "| - |" not in (tmp_path / "whole" / "README.md").read_text()
    measured, plain = [], study.added_noise

    def counted(noise, draw):
        if len(measured) == 4:
            raise KeyboardInterrupt
        measured.append(str(draw.keywords["point"]))
        return plain(noise, draw)

    monkeypatch.setattr(study, "added_noise", counted)
    assert call("vit", tmp_path / "killed") == 130
    assert call("vit", tmp_path / "killed", "--stored") == 0
    assert "| - |" in (tmp_path / "killed" / "README.md").read_text()
    first = list(measured)
    monkeypatch.setattr(study, "added_noise", plain)
    assert call("vit", tmp_path / "killed") == 0
    whole, resumed = (
        json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "killed")
    )
    assert len(first) == 4
    assert whole["noise"] == resumed["noise"]
    capsys.readouterr()


def test_defaults_at_other_budgets_are_measured_alone_when_asked_for(tmp_path, capsys):
    assert call("vit", tmp_path, "--rows", "0.25,0.2") == 0
    stored = json.loads((tmp_path / "results.json").read_text())["noise"]
    assert {key.partition("/")[2] for key in stored} == {"0.25/0.35/0.65", "0.2/0.3/0.6"}
    capsys.readouterr()


def test_without_results_the_page_says_what_to_run(tmp_path, capsys):
    assert call("gpt", tmp_path, "--stored") == 1
    assert "without --stored" in capsys.readouterr().err


def test_added_noise_is_the_mean_square_over_the_variance_of_batches():
    problem = TASKS["vit"].problem(small=True)
    torch.manual_seed(0)
    model = problem.model()
    noise = minibatch_noise(model, problem, 5, 2)
    rows = [
        torch.cat([g.flatten() for g in exact_gradient(model, problem, batch)])
        for batch in noise_batches(problem, 5)
    ]
    sigma2 = float(torch.stack(rows).double().var(0).sum())
    assert noise.sigma2.value == pytest.approx(sigma2, rel=1e-4)
    found = iter(noise.exact)

    def draw(batch):
        exact = next(found)
        for size in (0.1, -0.3):
            yield [exact[0] + size, *exact[1:]]

    expected = noise.exact[0][0].numel() * (0.1**2 + 0.3**2) / 2 / sigma2
    assert added_noise(noise, draw)["ratio"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("task", "point"),
    [("vit", Budgets(0.3, 0.4, 0.7)), ("yields", Budgets(ALL, 0.4, ALL)), ("gpt", Plain(0.3))],
)
def test_drawn_gradients_are_unbiased_and_leave_the_model_exact(task, point):
    problem = TASKS[task].problem(small=True)
    torch.manual_seed(0)
    model = problem.model()
    with torch.no_grad():  # as large as pretrained ones: at first all tokens would be alike
        for p in model.parameters():
            p.mul_(4 if p.dim() > 1 and task != "vit" else 1)
    (batch,) = noise_batches(problem, 1)
    exact = exact_gradient(model, problem, batch)
    draws = [
        torch.cat([g.flatten() for g in drawn])
        for drawn in sketched_gradients(model, problem, batch, point, 400)
    ]
    drawn, wanted = torch.stack(draws).double(), torch.cat([g.flatten() for g in exact]).double()
    assert float(drawn.std(0).sum()) > 0
    # One direction for all parameters: |z| < 4 by chance in all but one of 16,000 seeds.
    direction = torch.randn(len(wanted), dtype=torch.float64) * (drawn.std(0) > 0)
    values = (drawn - wanted) @ direction
    assert abs(float(values.mean())) < 4 * float(values.std()) / 400**0.5
    assert not any(isinstance(module, SketchedModule) for module in model.modules())


def test_shares_are_measured_trained_and_resumed(tmp_path, monkeypatch):
    call = ["depth", "--task", "documents", "--preset", "smoke", "--train", "--workers", "0"]
    call += ["--out", str(tmp_path)]
    assert main([*call, "--quiet"]) == 0
    stored = (tmp_path / "results.json").read_text()
    found = json.loads(stored)["documents"]
    assert set(found["runs"]) == {"exact/0", "even/0", "shared out/0"}
    ways = found["3"]["ways"]
    assert max(ways["shared out"]["noise"]) < max(ways["even"]["noise"])
    monkeypatch.setattr(Problem, "trainer", None)  # nothing is trained again
    assert main([*call, "--quiet"]) == 0
    assert (tmp_path / "results.json").read_text() == stored


def test_redundancy_is_measured_size_by_size_and_drawn_again(tmp_path, monkeypatch, capsys):
    call = ["redundancy", "--preset", "smoke", "--out", str(tmp_path), "--quiet"]
    assert main(call) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    sizes = {"pictures/16", "pictures/64", "documents/64", "documents/128"}
    assert set(found) == {"machine", *sizes}
    assert all(min(found[size]["ways"]["0.2"]["noise"]) > 0 for size in sizes)
    page = (tmp_path / "README.md").read_text()
    assert page.count("| 0.2 |") == len(sizes)
    monkeypatch.setattr(Problem, "trainer", None)
    assert main(call) == 0
    assert (tmp_path / "README.md").read_text() == page
    capsys.readouterr()
