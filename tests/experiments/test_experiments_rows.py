"""The experiments on rows: closed forms against enumeration, runs that resume, smoke runs."""

import itertools

import pytest
import torch
from torch import nn

from experiments.__main__ import main
from experiments.data import Labelled
from experiments.lab.checkpoints import Checkpoint
from experiments.lab.noise import exact_gradient
from experiments.lab.pictures import Parts
from experiments.lab.problem import Problem
from experiments.lab.sweep import Run
from experiments.methods import METHODS
from experiments.mnist import stack as mnist
from experiments.mnist.study import MNIST
from experiments.peers import wta_probabilities
from experiments.variance import study as variance
from experiments.weight_variance import study as weight_variance
from sketchprop import Vjp, data, every_draw
from sketchprop.core.probabilities import water_fill
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
}


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
