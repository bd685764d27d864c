"""The studies on CIFAR-10: what is trained, what is sketched, and the figure."""

from pathlib import Path

import pytest
import torch
from experiment_helpers import changed, pictures
from torch import nn

import sketchprop as sp
from experiments import data
from experiments.__main__ import main
from experiments.cifar import model as cifar
from experiments.cifar.bagnet import BagNet
from experiments.cifar.study import STUDIES
from experiments.lab import ExperimentError
from experiments.lab.engine import Job
from experiments.lab.store import DATABASE, read_rows
from experiments.lab.sweep import planned_runs
from experiments.methods import METHODS
from sketchprop.core.vjp import Vjp
from sketchprop.layers import SketchedModule

ROOT = Path(cifar.__file__).parents[2]
VIT, BAGNET = STUDIES["vit"], STUDIES["bagnet17"]
SMALL = {"vit": "patch=8 dim=16 depth=1 heads=2 hidden=32", "bagnet17": "width=4 blocks=1-1-1-1"}
SERIES = {"element", "sample", "l1", "ds", "gsv", "rcs", "control-columns", "control-samples"}


@pytest.fixture
def small_data(monkeypatch):
    monkeypatch.setattr(cifar, "load", lambda *rows: pictures())


def cell_of(model, name="l1", budget=0.25, **changes):
    protocol = changed(STUDIES[model].protocol, size=SMALL[model], batch_size=16, **changes)
    return protocol.cell(METHODS[name], budget, "all")


def test_the_layers_of_a_transformer_that_are_sketched():
    cell = cell_of("vit")
    model = cifar.sketch_model(cifar.model_of(cell), cell)
    taken = [name for name, m in model.named_modules() if isinstance(m, SketchedModule)]
    assert taken == ["embed", "blocks.0.attn.qkv", "blocks.0.attn.out", "blocks.0.mlp.0",
                     "blocks.0.mlp.3"]  # fmt: skip
    assert taken == list(cifar.layer_shapes(cell))
    assert cifar.layer_ranks(cell) == [4, 12, 4, 8, 4]
    # Rows are tokens: 16 pictures of 16.
    assert cifar.layer_ranks(cell_of("vit", "sample")) == [64] * 5


def test_the_layers_of_bagnet_that_are_sketched():
    cell = cell_of("bagnet17")
    model = cifar.sketch_model(cifar.model_of(cell), cell)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            assert isinstance(module, SketchedModule) == (
                module.kernel_size == (1, 1) and name != "project"
            )
    assert not isinstance(model.head, SketchedModule)
    shapes = cifar.layer_shapes(cell)
    assert shapes["stages.0.0.conv1"].B == 16 * 30 * 30
    assert shapes["stages.3.0.conv2"].n == 32


def test_the_sample_control_is_a_smaller_minibatch():
    """One draw at the classifier: every gradient is that of the kept samples alone."""
    cell = cell_of("vit", "control-samples", dropout=0.0)
    model = cifar.sketch_model(cifar.model_of(cell), cell)
    x, y = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    loss = nn.functional.cross_entropy
    torch.manual_seed(1)
    loss(model(x), y).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    torch.manual_seed(1)
    kept = model.head.sketch(Vjp(torch.ones(16, 10), model.head.weight)).index
    model.zero_grad()
    with sp.exact(model):
        loss(model(x[kept]), y[kept]).backward()
    for ours, parameter in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_split_keeps_validation_apart(monkeypatch):
    numbers = torch.arange(200)
    images = numbers.view(-1, 1, 1, 1).expand(-1, 3, 4, 4).to(torch.uint8)
    monkeypatch.setattr(cifar, "cifar10", lambda train: data.Labelled(images, numbers))
    cifar.load.cache_clear()
    try:
        found = cifar.load(100, 40, 30)
    finally:
        cifar.load.cache_clear()
    parts = [set(split.labels.tolist()) for split in found[:3]]
    assert [len(part) for part in parts] == [100, 40, 30]
    assert not parts[0] & parts[1]
    assert found.train.images[:, 0, 0, 0].tolist() == found.train.labels.tolist()


@pytest.mark.parametrize("study", [VIT, BAGNET], ids=lambda s: s.name)
def test_presets(study):
    for preset in ("smoke", "cpu", "paper"):
        sweep = study.load(preset)
        (figure,) = sweep.figures
        shown = {p.method for p in sweep.points(figure)}
        assert shown == SERIES | {"exact"}
        for claim in study.claims:
            for comparison in claim.comparisons:
                assert {comparison.better[0], comparison.worse[0]} <= shown
        runs = [run for p in sweep.select(sweep.figures, True) for run in planned_runs(p, {})]
        assert len({run.identity for run in runs}) == len(runs)
        assert all(Job((run,)).cost > 0 for run in runs)
    few = {p.method for p in study.load("gpu").points("cifar")}
    assert few == {"exact", "l1", "ds", "rcs", "sample"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model = 'resnet'", "model = 'resnet'; use bagnet17 or vit"),
        ("optimizer = 'adam'", "optimizer = 'adam'; use adamw or sgd"),
        ("size = 'width=8'", "vit has no width; use patch, dim"),
        ("size = 'dim=big'", "write names and numbers"),
        ("model = 'bagnet17'\nsize = 'blocks=1-1'", "blocks takes 4 numbers"),
    ],
)
def test_a_wrong_sweep_is_refused(tmp_path, content, message):
    path = tmp_path / "mine.toml"
    path.write_text(f"[protocol]\n{content}")
    with pytest.raises(ExperimentError, match=message):
        VIT.load(str(path))


@pytest.mark.parametrize("model", STUDIES)
def test_smoke_makes_the_figure_from_nothing(tmp_path, capsys, model, small_data):
    out = tmp_path / "out"
    command = ["cifar", "--model", model, "--preset", "smoke", "--out", str(out), "--workers", "0"]
    assert main([*command, "--plan"]) == 0
    assert "17 runs in 17 stacks are missing" in capsys.readouterr().out
    assert main([*command, "--quiet"]) == 0
    rows = read_rows(out, VIT.schema)
    exact = next(row for row in rows if not row["sketch"])
    l1 = next(row for row in rows if row["sketch"].startswith("L1(0.1"))
    assert l1["flops_step"] < exact["flops_step"]
    assert all(row["seconds_curve"][0] > 0 for row in rows)
    page = (out / "README.md").read_text()
    (out / DATABASE).unlink()
    assert main([*command, "--stored"]) == 0
    assert (out / "README.md").read_text() == page


def test_noise_along_the_depth_is_measured_once_and_drawn_again(tmp_path, monkeypatch):
    parts = pictures().train
    monkeypatch.setattr(data, "cifar10", lambda: parts)
    monkeypatch.setattr(data, "mnist", lambda: (parts.images[:, 0, :28, :28], parts.labels))
    call = ["amplification", "--preset", "smoke", "--out", str(tmp_path)]
    with pytest.warns(UserWarning, match="BatchNorm"):
        assert main(call) == 0
    page = (tmp_path / "README.md").read_text()
    assert {"## MLP", "## ViT", "## BagNet"} <= set(page.splitlines())
    assert "kept tokens | blocks.0 |" in page
    assert main(call) == 0  # BatchNorm would warn again
    assert (tmp_path / "README.md").read_text() == page


def test_bagnet_is_the_published_one():
    """Its parameters, and 16 blocks of three convolutions, 4 shortcuts and two in the stem."""
    with torch.device("meta"):
        model = BagNet(classes=1000)
    assert sum(p.numel() for p in model.parameters()) == 16_213_032
    kernels = [m.kernel_size[0] for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert (kernels.count(1), kernels.count(3), kernels[:2]) == (50, 4, [1, 3])
