"""The trainer of the larger studies: schedule, crops, curves, and a state that survives a kill."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from experiment_helpers import pictures, without
from torch import nn

import sketchprop as sp
from experiments.lab import ExperimentError, checkpoints
from experiments.lab.checkpoints import Checkpoint, Checkpoints
from experiments.lab.pictures import PictureFeed, cropped
from experiments.lab.problem import Problem
from experiments.lab.trainer import Recipe, Trainer, accuracy, initialised, outputs, seed_of
from sketchprop import zoo

RECIPE = Recipe("adamw", 3e-3, steps=12, weight_decay=0.05, warmup=2)


def train(model, parts, recipe, seed, checkpoint=None, augment=True):
    """One evaluation for each epoch of batches of 16."""
    device = torch.device("cpu")
    feed = PictureFeed(parts, (0.5,) * 3, (0.25,) * 3, 16, seed, device, augment)

    def evaluate(model):
        return tuple(accuracy(*outputs(model, feed.batches(part))) for part in feed.parts[1:])

    marks = range(feed.steps_per_epoch, recipe.steps + 1, feed.steps_per_epoch)
    return Trainer(model, feed, recipe, evaluate, seed, marks).train(checkpoint)


def small_vit():
    return zoo.ViT(patch=8, dim=16, depth=1, heads=2, hidden=32, dropout=0.1)


def test_the_rate_rises_in_a_line_and_falls_in_a_cosine():
    recipe = Recipe("sgd", 0.4, steps=50, warmup=10, final_rate=1e-3)
    rates = [recipe.rate(step) for step in range(50)]
    assert rates[:10] == pytest.approx([0.4 * (i + 1) / 11 for i in range(10)])
    assert rates[10] == 0.4
    assert rates[-1] == pytest.approx(1e-3)
    expected = [1e-3 + 0.399 * (1 + math.cos(math.pi * i / 39)) / 2 for i in range(40)]
    assert rates[10:] == pytest.approx(expected)
    flat = replace(recipe, warmup=0, learning_rate=1e-4)  # below its own end
    assert {flat.rate(step) for step in range(50)} == {1e-4}
    constant = replace(recipe, decay=False)
    assert [constant.rate(step) for step in range(50)] == pytest.approx(rates[:10] + [0.4] * 40)


def test_crops_are_cut_from_the_padded_picture_and_half_are_mirrored():
    padded = F.pad(torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8), (4,) * 4)
    windows = padded[0].unfold(1, 32, 1).unfold(2, 32, 1).movedim(0, 2)
    places = torch.stack([windows, windows.flip(-1)])  # mirrored, top, left
    seen = []
    for crop in cropped(padded, torch.zeros(240, dtype=torch.long), torch.Generator()):
        ((flip, top, left),) = (places == crop).flatten(3).all(3).nonzero().tolist()
        seen.append((flip, top, left))
    flips, tops, lefts = (set(values) for values in zip(*seen, strict=True))
    assert (flips, tops, lefts) == ({0, 1}, set(range(9)), set(range(9)))


def test_a_step_is_that_of_plain_torch():
    """SGD of torch on the same batches, without crops and dropout."""
    changes = {"optimizer": "sgd", "learning_rate": 0.1, "steps": 4}
    data, recipe = pictures(), replace(RECIPE, clip=0.5, **changes)
    model = initialised(lambda: zoo.ViT(patch=8, dim=16, depth=1, heads=2, hidden=32), 5)
    plain = copy.deepcopy(model)
    found = train(model, data, recipe, seed=5, augment=False)
    optimizer = torch.optim.SGD(plain.parameters(), momentum=0.9, weight_decay=0.05)
    order = torch.Generator().manual_seed(seed_of("order", 5))
    clipped, losses = 0, []
    for step, index in enumerate(torch.randperm(64, generator=order).view(4, 16)):
        optimizer.param_groups[0]["lr"] = recipe.rate(step)
        x = (data.train.images[index] / 255 - 0.5) / 0.25
        loss = F.cross_entropy(plain(x), data.train.labels[index])
        optimizer.zero_grad()
        loss.backward()
        clipped += int(nn.utils.clip_grad_norm_(plain.parameters(), 0.5) > 0.5)
        optimizer.step()
        losses.append(loss.item())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert found["loss_curve"][0] == pytest.approx(sum(losses) / 4, abs=1e-4)
    assert found["clipped_fraction"] == clipped / 4
    assert isinstance(RECIPE.make(plain), torch.optim.AdamW)


def test_training_learns_and_records():
    recipe = replace(RECIPE, steps=80, warmup=5)
    exact = train(initialised(small_vit, 0), pictures(160), recipe, 0)
    assert exact["test_curve"][-1] > 60  # of ten classes
    assert exact["loss_curve"][-1] < exact["loss_curve"][0]
    for name in ("validation", "test", "loss", "seconds"):
        assert len(exact[f"{name}_curve"]) == 8
    assert all(seconds > 0 for seconds in exact["seconds_curve"])
    assert sum(exact["seconds_curve"]) < exact["wall_seconds"]
    assert exact["diverged_epoch"] == 0
    model = initialised(small_vit, 0)
    sp.sketch_(model, sp.L1(0.2))
    short = train(model, pictures(), replace(recipe, steps=4), 0)
    assert 0.3 < short["flops_step"] / exact["flops_step"] < 0.9


def test_one_seed_means_one_start_and_the_same_pictures():
    whole = initialised(small_vit, 1)
    sp.sketch_(whole, sp.L1(1.0))  # keeps all: draws nothing
    models = ((1, whole), (1, initialised(small_vit, 1)), (2, initialised(small_vit, 2)))
    rows = [train(model, pictures(), RECIPE, seed) for seed, model in models]
    one, same, other = without(rows, "wall_seconds", "seconds_curve")
    assert one == same
    assert one["loss_curve"] != other["loss_curve"]


def test_a_run_that_is_lost_ends_and_says_so():
    recipe = replace(RECIPE, optimizer="sgd", learning_rate=1e30, warmup=0)
    found = train(initialised(small_vit, 0), pictures(), recipe, 0)
    assert found["diverged_epoch"] == 1
    assert found["test_curve"] == found["validation_curve"] == [0.0] * 3
    assert found["loss_curve"] == [None] * 3


def test_too_few_pictures():
    with pytest.raises(ValueError, match="10 pictures make no batch of 16"):
        train(small_vit(), pictures(train=10), RECIPE, 0)


def test_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch):
    kept = Checkpoint(tmp_path / "a.pt", 0.0)
    assert kept.load() is None
    kept.offer(lambda: {"x": torch.ones(2)})
    assert torch.equal(kept.load()["x"], torch.ones(2))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("experiments.lab.store.os.fsync", full)
        with pytest.raises(ExperimentError, match="no space left"):
            kept.offer(lambda: {"x": torch.zeros(2)})
    assert torch.equal(kept.load()["x"], torch.ones(2))
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]
    monkeypatch.setattr(checkpoints.torch, "__version__", "0.0")
    assert kept.load() is None  # another version may round differently
    (tmp_path / "a.pt").write_bytes(b"half a file")
    assert kept.load() is None


def test_checkpoints_wait_and_go_with_their_runs(tmp_path):
    folder = Checkpoints(tmp_path / "kept", every=1e6)
    folder.of("run").offer(lambda: {})
    assert not folder.folder.exists()
    eager = replace(folder, every=0.0)
    for name in ("run", "other"):
        eager.of(name).offer(lambda: {})
    (folder.folder / ".run.pt.123.part").touch()  # killed while it wrote
    folder.remove({"run", "never saved"})
    assert [p.name for p in folder.folder.iterdir()] == ["other.pt"]
    folder.remove({"other"})
    assert not folder.folder.exists()


def halves(count=64):
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


@pytest.mark.parametrize("sketch", ["", "L1(0.3)"])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(sketch, tmp_path):
    call = (0.01, 0, [13, 27, 40], sketch)
    whole = halves().trainer(*call)
    for point, _ in enumerate(whole.stretches()):
        torch.manual_seed(point)  # what others draw in between changes nothing
    file = tmp_path / "run.pt"
    for _ in range(3):
        again = halves().trainer(*call)
        next(again.stretches(Checkpoint(file, 0.0)))
    assert again.steps == 40
    for name in ("loss", "test", "validation"):
        assert again.curves[name] == whole.curves[name]
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert a.equal(b)
