"""``SampledTrainer``: exact evaluation, every way to a loss, budget 1.0, and what it refuses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

from sketchprop.core.enumeration import expectation
from sketchprop.core.sampling import Uniforms
from sketchprop.integrations import transformers as integration
from sketchprop.integrations.transformers import SampledTrainer
from sketchprop.sampled import sampled_loss

VOCABULARY, LENGTH = 40, 8


def bert(kind: Any = BertForSequenceClassification, dropout: float = 0.1, **options: Any) -> Any:
    set_seed(0)
    return kind(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=LENGTH, hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout, **options,
        )
    )  # fmt: skip


def gpt2() -> PreTrainedModel:
    set_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2)
    return GPT2LMHeadModel(config)


def examples(per_token: bool = False, count: int = 48) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row % 2 if per_token else row[0] % 2} for row in ids]


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "max_steps": 4, "per_device_train_batch_size": 8, "report_to": [], "use_cpu": True,
        "learning_rate": 1e-2, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1,
    }  # fmt: skip
    return TrainingArguments(folder, **{**given, **options})


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_evaluation_and_prediction_are_exact_and_training_learns(tmp_path: Path) -> None:
    model = bert()
    data = examples()
    trainer = SampledTrainer(
        model,
        arguments(tmp_path, max_steps=60, eval_strategy="steps", eval_steps=20),
        train_dataset=data,
        eval_dataset=data,
        budget=0.5,
    )
    seen: list[int] = []
    model.bert.register_forward_hook(lambda m, a, out: seen.append(out[0].shape[0]))
    before = trainer.evaluate()["eval_loss"]
    seen.clear()
    trainer.train()
    assert 4 in seen
    after = trainer.evaluate()["eval_loss"]
    assert after < 0.8 * before
    plain = Trainer(model, arguments(tmp_path), eval_dataset=data)
    assert plain.evaluate()["eval_loss"] == after
    assert trainer.predict(data).predictions.shape == (48, 2)
    assert sum("eval_loss" in entry for entry in trainer.state.log_history) >= 3


@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}])
def test_budget_one_is_bitwise_the_plain_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    trained = []
    for kind, more in ((Trainer, {}), (SampledTrainer, {"budget": 1.0})):
        model = bert()
        given = arguments(tmp_path, max_steps=100, **options)
        kind(model, given, train_dataset=examples(), **more).train()
        trained.append(weights(model))
    assert torch.equal(*trained)


def custom(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    total = F.cross_entropy(outputs.logits, labels, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


@pytest.mark.parametrize(
    ("make", "per_token", "options"),
    [
        (bert, False, {}),
        (lambda: bert(problem_type="regression", num_labels=1), False, {}),
        (lambda: bert(BertForTokenClassification), True, {}),
        (lambda: bert(BertForMaskedLM), True, {}),
        (gpt2, True, {}),
        (bert, False, {"label_smoothing_factor": 0.2}),
        (gpt2, True, {"label_smoothing_factor": 0.2}),
        (bert, False, {"compute_loss_func": custom}),
    ],
)
def test_the_loss_is_the_trainers_and_its_mean_gradient_too(
    tmp_path: Path, make: Any, per_token: bool, options: dict[str, Any], monkeypatch: Any
) -> None:
    """Exactly, over all draws, with the same dropout masks."""
    model = make().double().train()
    loss_func = {k: v for k, v in options.items() if k == "compute_loss_func"}
    given = arguments(tmp_path, **{k: v for k, v in options.items() if k not in loss_func})
    trainer = SampledTrainer(model, given, budget=3, **loss_func)
    plain = Trainer(model, given, **loss_func)
    rows = examples(per_token, 8)
    batch = {k: torch.stack([row[k] for row in rows]) for k in ("input_ids", "labels")}
    if model.config.problem_type == "regression":
        batch["labels"] = batch["labels"].double()
    items = torch.tensor(20) if trainer.model_accepts_loss_kwargs or loss_func else None
    parameters = [p for p in model.parameters() if p.requires_grad]

    def of(kind: Trainer) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        loss = kind.compute_loss(model, dict(batch), num_items_in_batch=items)
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        return loss.detach(), *(g for g in grads if g is not None)

    def drawn(uniforms: Uniforms) -> tuple[Tensor, ...]:
        monkeypatch.setattr(integration, "sampled_loss", partial(sampled_loss, uniforms=uniforms))
        return of(trainer)

    for mean, wanted in zip(expectation(drawn), of(plain), strict=True):
        # Some losses of transformers are computed in float32, whatever the model is in.
        torch.testing.assert_close(mean.double(), wanted.double(), rtol=1e-5, atol=1e-6)


def test_a_loss_that_outputs_do_not_give_is_refused(tmp_path: Path) -> None:
    model = bert(BertForNextSentencePrediction)
    trainer = SampledTrainer(model, arguments(tmp_path), train_dataset=examples(), budget=0.5)
    with pytest.raises(ValueError, match="compute_loss_func=lambda outputs, labels"):
        trainer.train()


def test_accumulation_and_bfloat16(tmp_path: Path) -> None:
    model = bert()
    before = weights(model)
    SampledTrainer(
        model,
        arguments(tmp_path, gradient_accumulation_steps=2, bf16=True),
        train_dataset=examples(),
        budget=0.25,
        by="uniform",
    ).train()
    assert weights(model).isfinite().all()
    assert (weights(model) != before).any()
