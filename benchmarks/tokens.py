"""Training steps of transformers whose backward runs on kept tokens, against exact ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sketchprop.ops.branch import RowWise, branch
from sketchprop.ops.postnorm import carried_norm
from sketchprop.ops.rowwise import read
from sketchprop.ops.sublayer import attention_branch
from sketchprop.zoo import ViT

from .results import Line
from .timing import interleave

Step = Callable[[], object]


class Budgets(NamedTuple):
    """Kept shares: rows of the MLPs, queries of attention, rows of keys and values."""

    rows: float
    queries: float
    keys: float

    def __str__(self) -> str:
        return " / ".join(f"{share:g}" for share in self)


def _vit(dim: int, depth: int, heads: int, hidden: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return ViT(dim=dim, depth=depth, heads=heads, hidden=hidden), (torch.randn(128, 3, 32, 32),)


def _bert(
    layers: int, hidden: int, heads: int, wide: int, words: int, batch: int, tokens: int
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """An encoder of transformers with the sizes of a published one, random weights, no dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=words, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=wide, num_labels=10, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config), (torch.randint(0, words, (batch, tokens)),)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "ViT 192 × 9, 128 × 64 tokens": lambda: _vit(192, 9, 12, 1024),
    "ViT 96 × 4, 128 × 64 tokens": lambda: _vit(96, 4, 4, 384),
    "rxnBERT, 16 × 223 tokens": lambda: _bert(12, 256, 4, 512, 591, 16, 223),
    "MiniLM-L6, 32 × 128 tokens": lambda: _bert(6, 384, 12, 1536, 30522, 32, 128),
}
TARGETS = {
    "ViT 192 × 9, 128 × 64 tokens": {Budgets(0.3, 0.3, 0.3): 0.60, Budgets(0.1, 0.1, 0.1): 0.50},
    "ViT 96 × 4, 128 × 64 tokens": {Budgets(0.3, 0.3, 0.3): 0.68},
    "rxnBERT, 16 × 223 tokens": {Budgets(0.2, 0.2, 0.2): 0.58, Budgets(0.3, 0.4, 0.7): 0.64},
    "MiniLM-L6, 32 × 128 tokens": {Budgets(0.3, 0.3, 0.3): 0.62},
}


def tokens(names: list[str], seconds: float, compiled: bool) -> Iterator[Line]:
    """Exact step, kept tokens, and a forward pass alone, in turns."""
    for name in names:
        work: dict[str, Step] = {"exact": step(name, None), "forward": forward(name)}
        for budgets in TARGETS[name]:
            work[str(budgets)] = step(name, budgets)
            if compiled:
                work[f"{budgets}, compiled"] = step(name, budgets, compiled=True)
        ratios = interleave(work, seconds=seconds * len(work))
        share = ratios["forward"].median
        yield Line(name, "exact, forward alone", 1.0, ratios["forward"])
        for budgets, target in TARGETS[name].items():
            # What is left where backward costs its budget and nothing else does.
            floor = share + (1 - share) * sum(budgets) / 3
            for word in ("", ", compiled")[: 1 + compiled]:
                method = f"kept tokens {budgets}{word}"
                ratio = ratios[f"{budgets}{word}"]
                yield Line(name, method, budgets.rows, ratio, floor, target)


def step(name: str, budgets: Budgets | None, *, compiled: bool = False) -> Step:
    """A closure that runs one training step of one of ``MODELS``."""
    run, inputs, optimizer = _training(name, budgets)
    labels = torch.randint(0, 10, (inputs[0].shape[0],))
    call: Callable[..., Any] = torch.compile(run) if compiled else run

    def once() -> None:
        optimizer.zero_grad()
        output = call(*inputs)
        F.cross_entropy(output if isinstance(output, Tensor) else output.logits, labels).backward()
        optimizer.step()

    return once


def forward(name: str) -> Step:
    run, inputs, _ = _training(name, None)
    return lambda: run(*inputs)


def _training(
    name: str, budgets: Budgets | None
) -> tuple[nn.Module, tuple[Tensor, ...], torch.optim.Optimizer]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    if budgets is not None:
        turn_(model, budgets)
    return model, inputs, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def turn_(model: nn.Module, budgets: Budgets) -> None:
    """Gives each block of a model a forward on kept tokens."""
    for module in model.modules():
        if type(module).__name__ == "Block":
            module.forward = _PreNorm(module, budgets)  # type: ignore[method-assign]
        elif type(module).__name__ == "BertLayer":
            module.forward = _PostNorm(module, budgets)  # type: ignore[method-assign]


class _PreNorm:
    """The zoo's block."""

    def __init__(self, block: Any, budgets: Budgets) -> None:
        self.block, self.budgets = block, budgets

    def __call__(self, x: Tensor) -> Tensor:
        block, budgets = self.block, self.budgets
        y, carry = attention_branch(
            x,
            (block.attn.qkv.weight, block.attn.qkv.bias),
            rowwise(block.attn.out, block.drop),
            heads=block.attn.heads,
            norm=rowwise(block.norm1),
            queries=budgets.queries,
            keys=budgets.keys,
            residual=True,
            carry=True,
        )
        f = rowwise(block.norm2, *block.mlp, block.drop)
        return branch(f, y, budgets.rows, residual=True, carry=carry)


class _PostNorm:
    """The encoder layer of BERT in transformers."""

    def __init__(self, layer: Any, budgets: Budgets) -> None:
        self.layer, self.budgets = layer, budgets

    def __call__(self, x: Tensor, mask: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        layer, budgets = self.layer, self.budgets
        attention, last = layer.attention.self, layer.attention.output
        parts = (attention.query, attention.key, attention.value)
        a, carry = attention_branch(
            x,
            tuple((part.weight, part.bias) for part in parts),  # type: ignore[arg-type]
            rowwise(last.dense, last.dropout),
            heads=attention.num_attention_heads,
            attn_mask=mask,
            queries=budgets.queries,
            keys=budgets.keys,
            residual=True,
            carry=True,
        )
        assert carry is not None
        y, carry = carried_norm(a, rowwise(last.LayerNorm), carry)
        f = rowwise(layer.intermediate.dense, nn.GELU(), layer.output.dense, layer.output.dropout)
        z: Tensor = layer.output.LayerNorm(branch(f, y, budgets.rows, residual=True, carry=carry))
        return z


def rowwise(*modules: nn.Module) -> RowWise:
    found = read(nn.Sequential(*modules))
    assert found is not None
    return RowWise(*found)
