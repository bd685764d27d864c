"""The experiments on rows: closed forms against enumeration, runs that resume, smoke runs."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from experiments import problems
from experiments.__main__ import main
from experiments.lab import ExperimentError
from experiments.lab.checkpoints import Checkpoint
from experiments.lab.engine import in_rotation, run_sweep
from experiments.lab.noise import exact_gradient
from experiments.lab.pictures import Parts
from experiments.lab.problem import Problem, ProblemCell, Track, contest_of, step_ratio, way_of
from experiments.lab.selection import Results
from experiments.lab.store import Store
from experiments.lab.sweep import Point, Protocol, Run
from experiments.methods import METHODS
from experiments.mnist import stack as mnist
from experiments.mnist.study import MNIST
from experiments.pay.study import PAY, reached
from experiments.peers import wta_probabilities
from experiments.variance import study as variance
from experiments.weight_variance import study as weight_variance
from sketchprop import Vjp, data, every_draw
from sketchprop.core.probabilities import water_fill
from sketchprop.data import Labelled
from sketchprop.sketches import Rows


@pytest.fixture
def real_data():
    try:
        data.mnist(train=False, download=False)
        data.cifar10(train=False, download=False)
    except data.DataError as error:
        pytest.skip(f"MNIST or CIFAR-10 is not on this machine: {error}")


def rows(count, seed=0):
    source = torch.Generator().manual_seed(seed)
    scale = torch.rand(count, 1, generator=source, dtype=torch.float64) ** 3
    G = torch.randn(count, 4, generator=source, dtype=torch.float64) * scale
    X = torch.randn(count, 5, generator=source, dtype=torch.float64) + 1
    return G, X


def square(x):
    return float(x.square().sum())


@pytest.mark.parametrize("budget", [0.1, 0.3, 0.7])
def test_systematic_variance_is_the_sum_over_breakpoints(budget, monkeypatch):
    monkeypatch.setattr(weight_variance, "CHUNK", 7)
    G, X = rows(30)
    sketch, vjp = Rows(budget, by="gradient_input"), Vjp(G, X=X)
    p = sketch.atoms(vjp).probabilities
    expected = sum(
        chance * square(drawn.weight_grad(X) - G.T @ X)
        for chance, drawn in every_draw(lambda uniforms: sketch(vjp, uniforms))
    )
    found = weight_variance.systematic_variance(G, X, p)
    assert found == pytest.approx(expected, rel=1e-9)


def test_independent_variance_is_the_sum_over_all_subsets():
    G, X = rows(8)
    p = water_fill((G.norm(dim=1) * X.norm(dim=1)), 3)
    expected = 0.0
    for kept in itertools.product((0.0, 1.0), repeat=8):
        mask = torch.tensor(kept, dtype=torch.float64)
        chance = float((p * mask + (1 - p) * (1 - mask)).prod())
        expected += chance * square((G * (mask / p)[:, None]).T @ X - G.T @ X)
    assert weight_variance.independent_variance(G, X, p) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("heavy", "sure"), [(False, 0), (True, 1)])
def test_variance_of_wta_is_the_sum_over_all_draws(heavy, sure):
    G, X = rows(6, seed=3)
    G = G / (G.norm(dim=1) * X.norm(dim=1))[:, None]  # flat norms: nothing is sure
    if heavy:
        G[2] *= 30
    q = wta_probabilities(G, X)
    first = q.argsort(descending=True)[:sure].tolist()
    others = [i for i in range(6) if i not in first]
    left = float(q[others].sum())
    draws = 3 - sure
    atoms = [torch.outer(g, x) for g, x in zip(G, X, strict=True)]
    expected = 0.0
    for drawn in itertools.product(others, repeat=draws):
        chance = float(torch.stack([q[i] / left for i in drawn]).prod())
        mean = sum(atoms[i] * left / q[i] for i in drawn) / draws
        expected += chance * square(sum((atoms[i] for i in first), mean) - G.T @ X)
    found = weight_variance.replacement_variance(G, X, 3)
    assert found == pytest.approx(expected, rel=1e-9)


def test_as_many_rows_as_are_not_zero_have_no_variance():
    G, X = rows(20)
    G[3:] = 0
    found = weight_variance.layer_variances(G, X, 0.2, shuffles=1)
    for kind in ("systematic", "shuffled", "vcas"):
        assert found[kind] == pytest.approx(0.0, abs=1e-9 * found["exact"])
    assert found["uniform"] > 0.1 * found["exact"]


def digits(count=64):
    """A task without files: is the sum of the first half larger than that of the second?"""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(count, 12, generator=source)
    y = (x[:, :6].sum(1) > x[:, 6:].sum(1)).long()

    def draw(generator, size):
        index = torch.randint(count, (size,), generator=generator)
        return x[index], y[index]

    return Problem(
        name="halves",
        title="halves",
        model=lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 2)),
        draw=draw,
        loss=nn.functional.cross_entropy,
        validation=lambda: [(x, y)],
        test=lambda: [(x, y)],
        batch_size=20,
        inner=lambda module, name: name == "0",
    )


HALVES = digits()
WAYS = (("exact", 1.0), ("batch", 0.3), ("samples-one", 0.3), ("sampled", 0.3), ("default-l1", 0.3))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(way, tmp_path):
    method, budget = METHODS[way[0]], way[1]
    call = (0.01, 0, [13, 27, 40], method.expression(budget), method.layers("all"))
    whole = digits().trainer(*call)
    for point, _ in enumerate(whole.stretches()):
        torch.manual_seed(point)  # what others draw in between changes nothing
    file = tmp_path / "run.pt"
    for _ in range(3):
        again = digits().trainer(*call)
        next(again.stretches(Checkpoint(file, 0.0)))
    assert again.steps == 40
    for name in ("loss", "test", "validation"):
        assert again.curves[name] == whole.curves[name]
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert a.equal(b)


@dataclass(frozen=True, kw_only=True)
class HalvesCell(ProblemCell):
    def make(self, folder):
        return HALVES


def test_ways_spend_the_same_cost_and_keep_their_best_rate(tmp_path):
    cell = HalvesCell(task="halves", length=60, points=4, rates=(0.03, 1e-9))
    protocol = Protocol(cell, learning_rates=(0, 1), seeds=(0, 1), tuning_seeds=1, widen=0)
    points = [Point(name, "all", budget, protocol) for name, budget in WAYS]
    with Store(tmp_path, replace(PAY, protocol=protocol).schema) as store:
        assert run_sweep(points, store, in_rotation, 1) == 3 * len(WAYS)
        results = Results(store.rows())
    contest = contest_of(results, results.of_all(points))
    assert [way.word for way in contest.ways] == [
        "exact",
        "batch-0.53",
        "sample-0.3",
        "sampled-0.3",
        "l1-0.3",
    ]
    for track in contest.tracks:
        assert track.chosen == (track.row["learning_rate"] == 0.03)
        assert len(track.moments) == 4
        assert track.row["steps"] * track.row["cost"] == pytest.approx(60, abs=1)
        assert not track.chosen or 0 < reached(track, 60.0, "cost") <= 60
    costs = {track.way.word: track.row["cost"] for track in contest.tracks}
    assert costs["exact"] == 1
    assert costs["batch-0.53"] == pytest.approx(11 / 20)
    assert costs["sampled-0.3"] == step_ratio(HALVES, "sampled_backward(0.3)", "all")
    assert 0.3 < costs["sampled-0.3"] < 0.9
    assert max(m["test"] for track in contest.tracks for m in track.moments) > 80
    assert len(contest.table("halves")) == 4 * len(contest.tracks)


def test_a_learning_rate_that_is_not_listed_is_refused_before_anything_runs(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[[extra]]\ntask = "mlp"\nrates = [0.1]\nmethods = ["exact"]')
    with pytest.raises(ExperimentError, match=r"rates = \[0.1\] has no such place; use .* \[0\]"):
        PAY.load(str(path))


def test_where_an_accuracy_was_reached():
    row = {"steps": 20, "cost": 1.0, "test_curve": [50.0, 70.0]}
    row |= {key: [1.0, 1.0] for key in ("seconds_curve", "loss_curve", "validation_curve")}
    track = Track(way_of(Point("exact", "all", 1.0, PAY.protocol)), row, True)
    assert reached(track, 60.0, "cost") == 15.0
    assert reached(track, 40.0, "cost") == 10.0
    assert reached(track, 71.0, "cost") == float("inf")
    assert track.step_seconds == 0.1


@pytest.mark.parametrize("name", ["l1", "tokens", "tokens-shuffled", "sampled"])
def test_one_forward_pass_serves_several_draws_whose_mean_is_the_gradient(name):
    """Mean of 2000 draws within 5 standard errors, seed fixed."""
    task = digits()
    torch.manual_seed(0)
    model = task.model()
    batch = task.draw(torch.Generator().manual_seed(1), 20)
    exact = torch.cat([g.flatten() for g in exact_gradient(model, task, batch)])
    of = variance.ESTIMATORS[name]
    drawn = torch.stack(
        [
            torch.cat([g.flatten() for g in grads])
            for grads in variance.gradients(model, task, batch, of, 0.3, 2000)
        ]
    )
    assert not drawn[0].equal(drawn[1])
    error = drawn.std(0) / 2000**0.5
    assert ((drawn.mean(0) - exact).abs() <= 5 * error + 1e-6).all()
    assert type(model[0]) is nn.Linear


def test_a_replica_of_sampled_backward_does_not_depend_on_its_stack(monkeypatch):
    source = torch.Generator().manual_seed(0)
    x, y = torch.rand(96, 784, generator=source), torch.randint(0, 10, (96,), generator=source)
    split = Labelled(x, y)
    monkeypatch.setattr(mnist, "load", lambda *sizes: Parts(split, split, split))
    cell = MNIST.load("smoke").extras[0].protocol.cell(METHODS["sampled"], 0.1, "all")
    runs = [Run(cell, rate, seed) for rate, seed in ((0, 0), (2, 1), (1, 2))]
    together = mnist.train_stack(runs)
    for run, found in zip(runs, together, strict=True):
        alone = mnist.train_stack([run])[0]
        assert alone["loss_curve"] == found["loss_curve"]
        assert found["ranks"] == [6.0] * (len(cell.widths) - 1)


SMOKE = {
    "rows-mnist": ("rows-mnist.png", "points it may lose", "sampled_backward"),
    "variance": ("variance.svg", "break-even", "tokens ‖g‖‖x‖, shuffled"),
    "weight-variance": ("weight-variance.png", "WTA-CRS / ours", "| bytes | 0.3 | 4 |"),
    "pay": ("vit.svg", "Net loss", "FLOPs to"),
    "finetune": ("digits.png", "Tails", "against exact", "An easy second task"),
}


@pytest.mark.usefixtures("real_data")
def test_the_second_task_starts_from_the_first_with_a_new_head():
    first = problems.low_digits(True).model()
    second = problems.high_digits(True, first.state_dict())
    model = second.model()
    for name, value in first.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]) != name.startswith("head."), name
    batch = second.draw(torch.Generator().manual_seed(0), 64)
    assert set(batch[1].tolist()) == set(range(5))
    train = mnist.load(1024, 400, 400, "normalised").train
    shown = [y for x, y in zip(*train, strict=True) if torch.equal(x, batch[0][0].flatten())]
    assert int(batch[1][0]) + 5 in map(int, shown)


@pytest.mark.usefixtures("real_data")
@pytest.mark.parametrize("command", SMOKE)
def test_smoke(command, tmp_path, capsys):
    threads = torch.get_num_threads()
    more = ["--workers", "0"] if command == "rows-mnist" else []
    call = [command, "--preset", "smoke", "--out", str(tmp_path), "--quiet", *more]
    try:
        assert main(call) == 0
        picture, *texts = SMOKE[command]
        assert (tmp_path / picture).stat().st_size > 1000
        page = (tmp_path / "README.md").read_text()
        for text in texts:
            assert text in page
        kept = ("README.md", picture.replace(".png", ".svg"))
        before = [(tmp_path / name).read_bytes() for name in kept]
        assert main([*call, "--stored"]) == 0
        assert [(tmp_path / name).read_bytes() for name in kept] == before
    finally:
        torch.set_num_threads(threads)
        capsys.readouterr()
