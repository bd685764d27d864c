"""transformers' Trainer with the callback: budget 1.0, resume, schedule, logs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import sketchprop as sp
from sketchprop.integrations.transformers import SketchCallback
from sketchprop.layers import SketchedLinear
from stack_helpers import BudgetClock, equal

VOCABULARY, LENGTH = 40, 8


def bert() -> PreTrainedModel:
    set_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
        )
    )


def examples(count: int = 48) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row[0] % 2} for row in ids]


def trainer(
    model: PreTrainedModel, folder: Path, callbacks: list[TrainerCallback], **options: Any
) -> Trainer:
    settings: dict[str, Any] = {
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 4,
        "logging_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 11,
    }
    args = TrainingArguments(output_dir=str(folder), **{**settings, **options})
    return Trainer(model, args, train_dataset=examples(), callbacks=callbacks)


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


def test_stopped_and_resumed_it_is_the_run_that_was_not(tmp_path: Path) -> None:
    """Dropout, accumulation, a shuffled sampler and a schedule that steps around the stop."""

    def callbacks() -> list[TrainerCallback]:
        return [SketchCallback(sp.L1(0.9), schedule={0: 1.0, 2: 0.5, 5: 0.25})]

    options = {"gradient_accumulation_steps": 2, "logging_steps": 1}
    whole, first, second = bert(), bert(), bert()
    uninterrupted = trainer(whole, tmp_path / "whole", callbacks(), **options)
    uninterrupted.train()

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 4

    trainer(first, tmp_path / "part", [*callbacks(), Stop()], **options).train()
    assert not equal(parameters(whole), parameters(first))
    set_seed(999)  # a new process would not have the old random state
    resumed = trainer(second, tmp_path / "part", callbacks(), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "part" / "checkpoint-4"))
    assert equal(parameters(whole), parameters(second))

    def history(run: Trainer) -> list[dict[str, float]]:
        return [
            {k: v for k, v in entry.items() if "runtime" not in k and "per_second" not in k}
            for entry in run.state.log_history
            if "loss" in entry
        ]

    assert history(uninterrupted) == history(resumed)
    assert [e["sketch_budget"] for e in history(resumed)] == [1.0, 1.0, 0.5, 0.5, 0.5, *[0.25] * 3]


def test_a_tuner_moves_budgets_and_resumes_bitwise(tmp_path: Path) -> None:
    def callback() -> SketchCallback:
        def tuner(model: nn.Module, optimizer: Any) -> sp.Tuner:
            return sp.Tuner(
                model,
                lambda model, batch: model(**batch).loss,
                optimizer=optimizer,
                share=1.0,
                start=0.5,
                groups=1,
                clock=BudgetClock(model),
            )

        return SketchCallback(sp.Rows(0.9), tuner=tuner)

    options = {"max_steps": 64, "save_steps": 32}
    whole, resumed = bert(), bert()
    first, second = callback(), callback()
    trainer(whole, tmp_path, [first], **options).train()
    assert first.tuner.steps == 64
    assert len(first.tuner.log) >= 3
    assert first.tuner.log[-1]["step"] > 32
    assert any(entry["moved"] for entry in first.tuner.log)
    assert not whole._forward_pre_hooks
    set_seed(999)
    run = trainer(resumed, tmp_path, [second], **options)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-32"))
    assert equal(parameters(whole), parameters(resumed))
    assert [e["budgets"] for e in first.tuner.log] == [e["budgets"] for e in second.tuner.log]


def test_logs_hold_budget_and_kept_flops(tmp_path: Path) -> None:
    callback = SketchCallback(sp.L1(0.25), schedule={0: 1.0, 4: 0.25}, rows=4 * LENGTH)
    run = trainer(bert(), tmp_path, [callback])
    run.train()
    logs = [e for e in run.state.log_history if "loss" in e]
    assert [e["step"] for e in logs] == [2, 4, 6, 8]
    assert [e["sketch_budget"] for e in logs] == [1.0, 1.0, 0.25, 0.25]
    assert logs[0]["sketch_kept_flops"] == 1.0
    # The classifier stays exact and scoring costs something: more than the budget, less than 1.
    assert 0.25 < logs[-1]["sketch_kept_flops"] < 0.6


def test_the_values_reach_tensorboard(tmp_path: Path, monkeypatch) -> None:
    """``Trainer`` puts its reporters before the callbacks that it is given."""
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    other = trainer(bert(), tmp_path / "other", [SketchCallback(sp.L1(0.25))])
    run = trainer(
        bert(), tmp_path, [SketchCallback(sp.L1(0.5))], report_to=["tensorboard"], max_steps=4
    )
    run.train()
    assert "SketchCallback" in run.callback_handler.callback_list.splitlines()[0]
    assert "SketchCallback" not in other.callback_handler.callback_list.splitlines()[0]
    written = events.EventAccumulator(str(tmp_path / "events"))
    written.Reload()
    budgets = written.Scalars("train/sketch_budget")
    assert [(event.step, event.value) for event in budgets] == [(2, 0.5), (4, 0.5)]
    assert [event.step for event in written.Scalars("train/loss")] == [2, 4]


def test_unsketched_and_saved_keys(tmp_path: Path) -> None:
    model = bert()
    trainer(model, tmp_path, [SketchCallback(sp.L1(0.5))]).train()
    sp.unsketch_(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in bert().modules()]
    loaded = BertForSequenceClassification.from_pretrained(tmp_path / "checkpoint-8")
    assert equal(parameters(loaded), parameters(model))


def test_a_filter_and_a_model_sketched_by_hand(tmp_path: Path) -> None:
    model = bert()
    callback = SketchCallback(sp.L1(0.5), lambda module, name: name.endswith("intermediate.dense"))
    trainer(model, tmp_path / "filter", [callback], max_steps=1).train()
    names = [name for name, m in model.named_modules() if isinstance(m, SketchedLinear)]
    assert names == [f"bert.encoder.layer.{i}.intermediate.dense" for i in range(2)]
    by_hand = SketchCallback(None, schedule={0: 0.125})
    trainer(model, tmp_path / "hand", [by_hand], max_steps=1).train()
    assert model.get_submodule(names[0]).sketch == sp.L1(0.125)


def test_mistakes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no budget for step 0"):
        SketchCallback(sp.L1(0.5), schedule={500: 0.1})
    with pytest.raises(TypeError, match="give a sketch with it"):
        SketchCallback(None, filter_fn=lambda module, name: True)
    with pytest.raises(ValueError, match="no sketched layer"):
        trainer(bert(), tmp_path, [SketchCallback(None, schedule={0: 0.5})]).train()


def test_nothing_optional_is_imported_and_a_missing_package_is_named() -> None:
    code = """
import importlib, sys
for name in ("transformers", "lightning", "pytorch_lightning"):
    sys.modules[name] = None  # as if it were not installed
import sketchprop
for package in ("transformers", "lightning"):
    try:
        importlib.import_module(f"sketchprop.integrations.{package}")
    except ImportError as error:
        assert "pip install" in str(error) and package in str(error).split("install")[1], error
    else:
        raise SystemExit("imported without its package")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
