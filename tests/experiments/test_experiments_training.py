"""The trainer of the larger studies: schedule, crops, curves, and a state that survives a kill."""

import copy
import math
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sketchprop as sp
from experiments.cifar.bagnet import BagNet
from experiments.data import Labelled
from experiments.lab import ExperimentError, checkpoints
from experiments.lab.checkpoints import Checkpoint, Checkpoints
from experiments.lab.pictures import Parts, PictureFeed, cropped
from experiments.lab.problem import Problem
from experiments.lab.trainer import Recipe, Trainer, accuracy, initialised, outputs, seed_of
from sketchprop import zoo

ROOT = Path(checkpoints.__file__).parents[2]
RECIPE = Recipe("adamw", 3e-3, steps=12, weight_decay=0.05, warmup=2)


def pictures(train=64, seed=3):
    """Ten classes of a mean colour each, and noise."""
    g = torch.Generator().manual_seed(seed)
    colours = torch.randint(40, 215, (10, 3, 1, 1), generator=g)

    def split(count):
        labels = torch.arange(count) % 10
        noise = torch.randint(-30, 31, (count, 3, 32, 32), generator=g)
        return Labelled((colours[labels] + noise).to(torch.uint8), labels)

    return Parts(split(train), split(40), split(40))


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


def small_bagnet():
    return BagNet(width=4, blocks=(1, 1, 1, 1))


def without_time(found):
    return {k: v for k, v in found.items() if k not in ("wall_seconds", "seconds_curve")}


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
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    padded = F.pad(images, (4,) * 4)
    index = torch.arange(6).repeat(40)
    made = cropped(padded, index, torch.Generator().manual_seed(0))
    assert made.shape == (240, 3, 32, 32)
    seen = set()
    for picture, crop in zip(index.tolist(), made, strict=True):
        places = [
            (top, left, flip)
            for top in range(9)
            for left in range(9)
            for flip in (False, True)
            if torch.equal(
                crop.flip(-1) if flip else crop,
                padded[picture, :, top : top + 32, left : left + 32],
            )
        ]
        assert len(places) == 1
        seen |= set(places)
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == set(range(9))
    assert {flip for _, _, flip in seen} == {False, True}
    again = cropped(padded, index, torch.Generator().manual_seed(0))
    assert torch.equal(made, again)


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


@pytest.mark.parametrize("make", [small_vit, small_bagnet])
def test_training_learns_and_records(make):
    rate, way = (3e-3, "adamw") if make is small_vit else (0.03, "sgd")
    recipe = replace(RECIPE, learning_rate=rate, optimizer=way, steps=80, warmup=5)
    exact = train(initialised(make, 0), pictures(160), recipe, 0)
    assert exact["test_curve"][-1] > 60  # of ten classes
    assert exact["loss_curve"][-1] < exact["loss_curve"][0]
    for name in ("validation", "test", "loss", "seconds"):
        assert len(exact[f"{name}_curve"]) == 8
    assert all(seconds > 0 for seconds in exact["seconds_curve"])
    assert sum(exact["seconds_curve"]) < exact["wall_seconds"]
    assert exact["diverged_epoch"] == 0
    model = initialised(make, 0)
    sp.sketch_(model, sp.L1(0.2))
    short = train(model, pictures(), replace(recipe, steps=4), 0)
    assert 0.3 < short["flops_step"] / exact["flops_step"] < 0.9


def test_one_seed_means_one_start_and_the_same_pictures():
    whole = initialised(small_vit, 1)
    sp.sketch_(whole, sp.L1(1.0))  # keeps all: draws nothing
    assert without_time(train(whole, pictures(), RECIPE, 1)) == without_time(
        train(initialised(small_vit, 1), pictures(), RECIPE, 1)
    )
    other = train(initialised(small_vit, 2), pictures(), RECIPE, 2)
    assert (
        other["loss_curve"] != train(initialised(small_vit, 1), pictures(), RECIPE, 1)["loss_curve"]
    )


def test_training_leaves_the_default_generator_alone():
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    train(initialised(small_vit, 0), pictures(), RECIPE, 0)
    assert torch.equal(torch.rand(3), expected)


def test_a_run_that_is_lost_ends_and_says_so():
    recipe = replace(RECIPE, optimizer="sgd", learning_rate=1e30, warmup=0)
    found = train(initialised(small_bagnet, 0), pictures(), recipe, 0)
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


CHILD = """
import sys, time, torch
from dataclasses import replace
from pathlib import Path
torch.set_num_threads(1)
sys.path[:0] = [{root!r}, {tests!r}]
import sketchprop as sp
from experiments.lab import trainer as training
from experiments.lab.checkpoints import Checkpoint
import test_experiments_training as t

kind, sketch, out, pause = sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])
make, way = dict(vit=(t.small_vit, "adamw"), bagnet=(t.small_bagnet, "sgd"))[kind]
model = training.initialised(make, 0)
sp.sketch_(model, eval(sketch, vars(sp)))
step = training.Trainer.train_step
done = []

def slow(self):
    time.sleep(pause)
    done.append(self.steps)
    return step(self)

training.Trainer.train_step = slow
recipe = replace(t.RECIPE, optimizer=way, steps=16)
found = t.train(model, t.pictures(), recipe, 0, checkpoint=Checkpoint(out / "run.pt", 0.0))
torch.save((t.without_time(found), model.state_dict(), done), out / "end.pt")
"""


@pytest.mark.parametrize(
    ("kind", "sketch"),
    [
        ("vit", "L1(0.2)"),
        ("bagnet", "GradientSVD(0.2)"),
        ("vit", "SampleMask(0.3, sampling='independent')"),
    ],
)
def test_killed_in_the_middle_it_goes_on_bitwise(tmp_path, kind, sketch):
    """kill -9 at a random moment of one run; the resumed run is the undisturbed one, bit by bit."""
    code = CHILD.format(root=str(ROOT), tests=str(Path(__file__).parent))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()

    def start(folder, pause):
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            code,
            kind,
            sketch,
            str(folder),
            str(pause),
        ]
        return subprocess.Popen(command, cwd=ROOT)

    undisturbed = start(whole, 0.0)
    victim = start(broken, 0.05)  # 16 steps
    deadline = time.monotonic() + 120
    while not (broken / "run.pt").is_file() and time.monotonic() < deadline:
        time.sleep(0.005)
    pause = random.random() * 0.3
    time.sleep(pause)
    victim.kill()
    assert victim.wait() == -signal.SIGKILL
    print(f"killed {pause:.3f} s after the first checkpoint")
    assert not (broken / "end.pt").exists()
    assert start(broken, 0.0).wait() == 0
    assert undisturbed.wait() == 0
    (found, state, steps), (ours, resumed, rest) = (
        torch.load(folder / "end.pt") for folder in (whole, broken)
    )
    assert steps == list(range(16))
    assert 0 < len(rest) < 16
    assert rest == steps[-len(rest) :]  # it did go on, and did not begin anew
    assert ours == found
    assert list(resumed) == list(state)
    for name, value in state.items():
        assert torch.equal(resumed[name], value)


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


@pytest.mark.parametrize("sketch", ["", 'Rows(0.3, unit="sample")', "L1(0.3)"])
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
