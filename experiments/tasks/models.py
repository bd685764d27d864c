"""Pretrained encoders with a head of their own, and a small GPT: transformers' own classes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor, nn

from ..lab import ExperimentError
from . import files

RXN_SIZES = {
    "vocab_size": 591, "hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4,
    "intermediate_size": 512,
}  # fmt: skip
MINILM_SIZES = {
    "vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
    "intermediate_size": 1536,
}  # fmt: skip
TINY_SIZES = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32,
}  # fmt: skip


def _transformers() -> Any:
    """The package, whose types do not know what its configurations take."""
    try:
        return import_module("transformers")
    except ImportError:
        raise ExperimentError(
            "the pretrained models of the tasks need transformers: pip install '.[transformers]'"
        ) from None


class Encoder(nn.Module):
    """BERT with a linear head on [CLS], or on the mean of all tokens; takes padded rows of tokens
    and nothing else.

    No dropout: in a few epochs there is little to overfit, and on a CPU attention with dropout
    leaves the fast kernel.
    """

    def __init__(
        self,
        outputs: int,
        pad: int,
        separator: int,
        sizes: dict[str, int],
        frozen: bool = False,
        mean: bool = False,
    ) -> None:
        super().__init__()
        transformers = _transformers()
        config = transformers.BertConfig(
            **sizes,
            num_labels=outputs,
            pad_token_id=pad,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="sdpa",
        )
        self.bert = transformers.BertForSequenceClassification(config)
        self.pad, self.separator, self.outputs, self.mean = pad, separator, outputs, mean
        # Half of MiniLM's parameters: a dense update of them takes a third of a step.
        self.bert.bert.embeddings.word_embeddings.weight.requires_grad_(not frozen)
        self.bert.bert.pooler.requires_grad_(not mean)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens != self.pad
        ends = (tokens == self.separator).long()
        second = ((ends.cumsum(1) - ends) > 0) & mask
        given = {"attention_mask": mask.long(), "token_type_ids": second.long()}
        if self.mean:
            hidden = self.bert.bert(tokens, **given).last_hidden_state * mask.unsqueeze(2)
            logits: Tensor = self.bert.classifier(hidden.sum(1) / mask.sum(1, keepdim=True))
        else:
            logits = self.bert(tokens, **given).logits
        return logits.squeeze(1) if self.outputs == 1 else logits

    def load_body(self, weights: dict[str, Tensor]) -> Encoder:
        """Pretrained weights, in float32; the head stays as it is."""
        own = {
            name: value.float()
            for name, value in weights.items()
            if not name.startswith("cls.") and not name.endswith("position_ids")
        }
        self.bert.bert.load_state_dict({k.removeprefix("bert."): v for k, v in own.items()})
        return self


def yield_encoder() -> Encoder:
    """rxnfp's BERT: 12 layers of width 256, pretrained on reactions."""
    from safetensors.torch import load

    made = Encoder(1, pad=0, separator=13, sizes=RXN_SIZES)
    return made.load_body(load(files.YIELDS.read("model.fp16.safetensors")))


def minilm(classes: int = 2, mean: bool = False) -> Encoder:
    """all-MiniLM-L6-v2 with frozen word embeddings."""
    from safetensors.torch import load

    made = Encoder(classes, pad=0, separator=102, sizes=MINILM_SIZES, frozen=True, mean=mean)
    return made.load_body(load(files.MINILM.read("model.safetensors")))


def tiny_encoder(outputs: int, frozen: bool = False, mean: bool = False) -> Encoder:
    return Encoder(outputs, pad=0, separator=2, sizes=TINY_SIZES, frozen=frozen, mean=mean)


class CharacterGPT(nn.Module):
    """GPT-2 over characters, the output tied to the input."""

    def __init__(self, alphabet: int, block: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        transformers = _transformers()
        config = transformers.GPT2Config(
            vocab_size=alphabet, n_positions=block, n_embd=width, n_layer=layers, n_head=heads,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            bos_token_id=0, eos_token_id=0, attn_implementation="sdpa",
        )  # fmt: skip
        self.gpt = transformers.GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.gpt(tokens).logits
        return logits


def in_layers(module: nn.Module, name: str) -> bool:
    """Blocks of the encoder or decoder, and what is in them."""
    return ".layer." in name or ".h." in name
