"""Lightning's Trainer with the callback: budget 1.0, resume, schedule, logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as new_name
import pytest
import pytorch_lightning as old_name
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sketchprop as sp
from sketchprop.integrations.lightning import SketchCallback
from sketchprop.layers import SketchedLinear
from stack_helpers import BudgetClock, batch, equal, net


def module(pl: Any = new_name, dropout: float = 0.2) -> nn.Module:
    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(dropout)
            self.budgets: list[float | int | None] = []

        def training_step(self, data: list[Tensor], index: int) -> Tensor:
            self.budgets.append(getattr(getattr(self.net[0], "sketch", None), "budget", None))
            x, y = data
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Classifier()


def fit(
    model: nn.Module,
    folder: Path,
    callbacks: list[Any],
    pl: Any = new_name,
    seed: int = 5,
    ckpt_path: Path | None = None,
    **options: Any,
) -> Any:
    settings: dict[str, Any] = {
        "max_epochs": 4,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "default_root_dir": str(folder),
    }
    trainer = pl.Trainer(callbacks=callbacks, **{**settings, **options})
    loader = DataLoader(TensorDataset(*batch(rows=24)), batch_size=8, shuffle=True)
    torch.manual_seed(seed)
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


def test_under_its_old_name_budget_one_trains_bitwise_like_the_plain_trainer(tmp_path) -> None:
    pl = old_name
    plain, sketched = module(pl), module(pl)
    fit(plain, tmp_path, [], pl, precision="bf16-mixed")
    fit(sketched, tmp_path, [SketchCallback(sp.L1(1.0))], pl, precision="bf16-mixed")
    assert isinstance(sketched.net[0], SketchedLinear)
    assert type(sketched.net[5]) is nn.Linear
    assert equal(parameters(plain), parameters(sketched))
    assert not equal(parameters(plain), parameters(module(pl)))


def test_stopped_and_resumed_it_is_the_run_that_was_not(tmp_path: Path) -> None:
    """Shuffled data and dropout: the callback keeps the random state, which Lightning does not."""

    def callbacks() -> list[Any]:
        return [
            SketchCallback(sp.L1(0.9), schedule={0: 1.0, 4: 0.5, 8: 0.25}),
            ModelCheckpoint(tmp_path / "saved", filename="{epoch}", save_top_k=-1),
        ]

    whole, resumed, without = module(), module(), module()
    fit(whole, tmp_path, callbacks())
    saved = tmp_path / "saved" / "epoch=1.ckpt"
    fit(resumed, tmp_path, callbacks(), seed=999, ckpt_path=saved)
    assert equal(parameters(whole), parameters(resumed))
    assert resumed.budgets == whole.budgets[6:] == [0.5, 0.5, *[0.25] * 4]
    # The random state is what does it: another one gives another run.
    checkpoint = torch.load(saved, weights_only=True)
    (key,) = [k for k in checkpoint["callbacks"] if "SketchCallback" in k]
    generator = torch.Generator().manual_seed(77)
    checkpoint["callbacks"][key]["random"]["cpu"] = generator.get_state()
    torch.save(checkpoint, tmp_path / "other.ckpt")
    fit(without, tmp_path, callbacks(), ckpt_path=tmp_path / "other.ckpt")
    assert not equal(parameters(whole), parameters(without))


def test_another_sketch_on_resume_is_said(tmp_path: Path) -> None:
    saving = [SketchCallback(sp.L1(0.5)), ModelCheckpoint(tmp_path, filename="{epoch}")]
    fit(module(), tmp_path, saving, max_epochs=1)
    with pytest.warns(UserWarning, match=r"trained with sketch=L1\(0.5\).*sketch=L2\(0.5\)"):
        fit(module(), tmp_path, [SketchCallback(sp.L2(0.5))], ckpt_path=tmp_path / "epoch=0.ckpt")


def test_the_schedule_counts_optimizer_steps(tmp_path: Path) -> None:
    model = module()
    callback = SketchCallback(sp.L1(0.5), schedule={0: 1.0, 2: 8, 4: 0.25})
    fit(model, tmp_path, [callback], accumulate_grad_batches=2, max_epochs=3)
    # Three batches an epoch: two steps of two and one batches.
    assert model.budgets == [1.0, 1.0, 1.0, 8, 8, 8, 0.25, 0.25, 0.25]


def test_logs_hold_budget_and_kept_flops(tmp_path: Path) -> None:
    callback = SketchCallback(sp.L1(0.25), schedule={0: 1.0, 7: 0.25}, rows=8)
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    trainer = fit(module(), tmp_path, [callback], logger=logger, log_every_n_steps=3)
    logger.save()
    logged = _read(logger)
    assert [float(m["sketch_budget"]) for m in logged] == [1.0, 1.0, 0.25, 0.25]
    assert [int(m["step"]) for m in logged] == [2, 5, 8, 11]  # Lightning counts from 0
    assert float(logged[0]["sketch_kept_flops"]) == 1.0
    assert 0.25 < float(logged[-1]["sketch_kept_flops"]) < 0.9
    assert float(trainer.callback_metrics["sketch_budget"]) == 0.25


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_values_have_the_step_of_the_loss(accumulated: int, tmp_path: Path) -> None:
    class LogLoss(new_name.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, *_: Any) -> None:
            pl_module.log("loss", outputs["loss"])

    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    options = {"accumulate_grad_batches": accumulated, "log_every_n_steps": 2}
    fit(module(), tmp_path, [SketchCallback(sp.L1(0.5)), LogLoss()], logger=logger, **options)
    logger.save()
    steps, of_loss = (
        [int(row["step"]) for row in _read(logger, name)] for name in ("sketch_budget", "loss")
    )
    # Twelve steps, or with three batches an epoch two of two and one batches: eight.
    assert steps == of_loss == [1, 3, 5, 7, 9, 11][: 6 if accumulated == 1 else 4]


def _read(logger: CSVLogger, name: str = "sketch_budget") -> list[dict[str, str]]:
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    return [row for row in rows if row.get(name)]


def test_a_tuner_moves_budgets_and_resumes_bitwise(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        loss = lambda model, data: F.cross_entropy(model.net(data[0]), data[1])  # noqa: E731

        def tuner(model: nn.Module, optimizer: Any) -> sp.Tuner:
            clock = BudgetClock(model)
            options = {"share": 1.0, "start": 0.5, "groups": 1, "clock": clock}
            return sp.Tuner(model, loss, optimizer=optimizer, **options)

        return [
            SketchCallback(sp.Rows(0.5), tuner=tuner),
            ModelCheckpoint(tmp_path / "saved", filename="{epoch}", save_top_k=-1),
        ]

    whole, resumed = module(), module()
    first, second = callbacks(), callbacks()
    trainer = fit(whole, tmp_path, first, max_epochs=12, log_every_n_steps=1)
    assert first[0].tuner.steps == 12 * 3
    assert len(set(whole.budgets)) > 1
    assert float(trainer.callback_metrics["sketch_change"]) <= 1.0
    saved = tmp_path / "saved" / "epoch=8.ckpt"
    fit(resumed, tmp_path, second, seed=999, ckpt_path=saved, max_epochs=12)
    assert equal(parameters(whole), parameters(resumed))
    assert resumed.budgets == whole.budgets[27:]
    assert [e["budgets"] for e in first[0].tuner.log] == [e["budgets"] for e in second[0].tuner.log]


@pytest.mark.parametrize(
    ("limits", "calls"),
    [
        ({"max_epochs": 3}, 9),
        ({"max_epochs": 3, "max_steps": 2}, 2),
        ({"max_epochs": -1, "max_steps": 4, "accumulate_grad_batches": 2}, 8),
    ],
)
def test_a_tuner_is_told_how_many_batches_there_will_be(tmp_path: Path, limits, calls) -> None:
    loss = lambda model, data: F.cross_entropy(model.net(data[0]), data[1])  # noqa: E731
    callback = SketchCallback(sp.Rows(0.5), tuner=lambda model, _: sp.Tuner(model, loss))
    fit(module(), tmp_path, [callback], **limits)
    assert callback.tuner.steps == calls
    # Where accumulation changes, Lightning cannot tell, and training goes on all the same.
    changing = GradientAccumulationScheduler(scheduling={0: 1, 1: 2})
    again = SketchCallback(sp.Rows(0.5), tuner=lambda model, _: sp.Tuner(model, loss))
    fit(module(), tmp_path, [again, changing], max_epochs=2)
    assert again.tuner.steps == 6


def test_a_schedule_and_a_tuner_are_not_given_together() -> None:
    with pytest.raises(TypeError, match="give one of them"):
        SketchCallback(sp.L1(0.5), sp.select.everything, {0: 1.0}, tuner=sp.Tuner)
    with pytest.raises(TypeError, match="cannot be called"):
        SketchCallback(sp.L1(0.5), tuner=0.5)
