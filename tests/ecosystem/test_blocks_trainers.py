"""Kept tokens in trainers with one signal for a whole sequence: sentence-transformers and GRPO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from trl import GRPOConfig, GRPOTrainer

import sketchprop as sp
from sketchprop import Tokens
from stack_helpers import blocks, equal

WORDS = [f"w{i}" for i in range(30)]


def tokenizer() -> hf.PreTrainedTokenizerFast:
    special = ["[PAD]", "[UNK]", "[EOS]"]
    words = {word: i for i, word in enumerate(special + WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]"
    )


def text(start: int, length: int) -> str:
    return " ".join(WORDS[(start + 3 * i) % len(WORDS)] for i in range(length))


def sentence_model(folder: Path) -> SentenceTransformer:
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=33, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=32,
    )  # fmt: skip
    hf.BertModel(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return SentenceTransformer(str(folder), device="cpu")


def pairs() -> dict[str, list[Any]]:
    return {
        "sentence1": [text(i, 9 + i) for i in range(4)],
        "sentence2": [text(2 * i, 8) for i in range(4)],
        "score": [0.1, 0.9, 0.4, 0.7],
    }


def test_sentence_transformers_at_budget_one_trains_like_the_plain_run(tmp_path: Path) -> None:
    def trained(sketch: Tokens | None) -> nn.Module:
        model = sentence_model(tmp_path / "model")
        if sketch is not None:
            assert len(blocks(sp.sketch_(model, sketch))) == 2
        arguments = Arguments(
            str(tmp_path / "run"), max_steps=1, per_device_train_batch_size=4, report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True, seed=3, learning_rate=1e-2,
        )  # fmt: skip
        SentenceTransformerTrainer(
            model, arguments, train_dataset=Dataset.from_dict(pairs()),
            loss=CosineSimilarityLoss(model),
        ).train()  # fmt: skip
        return model

    plain, whole, kept = trained(None), trained(Tokens(1.0)), trained(Tokens(0.3))
    assert equal(plain.parameters(), whole.parameters())
    assert not equal(plain.parameters(), kept.parameters())


def test_sentence_transformers_stay_unbiased(tmp_path: Path) -> None:
    model = sp.sketch_(sentence_model(tmp_path).train(), Tokens(0.3))
    data = pairs()
    features = [model.preprocess(data[key]) for key in ("sentence1", "sentence2")]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value: Tensor = CosineSimilarityLoss(model)(
            [dict(part) for part in batch], torch.tensor(data["score"])
        )
        return value

    assert sp.check_unbiased(model, loss, features, draws=60).ok


def language_model() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=33, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=24, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def rewards(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(str(c)) % 7) + i % 3 for i, c in enumerate(completions)]


@pytest.fixture
def grpo(tmp_path: Path) -> Any:
    def trained(sketch: Tokens | None) -> nn.Module:
        model = language_model()
        if sketch is not None:
            assert len(blocks(sp.sketch_(model, sketch))) == 2
        arguments = GRPOConfig(
            str(tmp_path), max_steps=1, per_device_train_batch_size=4, num_generations=4,
            max_completion_length=10, report_to=[], save_strategy="no", use_cpu=True,
            disable_tqdm=True, seed=3, learning_rate=1e-2, bf16=False,
        )  # fmt: skip
        data = Dataset.from_dict({"prompt": [text(i, 5) for i in range(4)]})
        GRPOTrainer(
            model, rewards, arguments, train_dataset=data, processing_class=tokenizer()
        ).train()
        return model

    return trained


def test_grpo_at_budget_one_trains_like_the_plain_run(grpo: Any) -> None:
    plain, whole, kept = grpo(None), grpo(Tokens(1.0)), grpo(Tokens(0.3))
    assert not equal(plain.parameters(), language_model().parameters())
    assert equal(plain.parameters(), whole.parameters())
    assert not equal(plain.parameters(), kept.parameters())


def test_a_reward_for_a_whole_answer_stays_unbiased() -> None:
    """The gradient that GRPO makes: log-probabilities times the advantage of the answer."""
    model = sp.sketch_(language_model().train(), Tokens(0.3))
    ids = torch.randint(3, 33, (4, 12), generator=torch.Generator().manual_seed(1))
    advantages = torch.tensor([1.0, -0.5, 0.3, -0.8])

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(ids, use_cache=False).logits[:, 4:-1]
        chosen = logits.log_softmax(-1).gather(-1, ids[:, 5:, None]).squeeze(-1)
        return -(chosen.mean(1) * advantages).mean()

    assert sp.check_unbiased(model, loss, ids, draws=80).ok
