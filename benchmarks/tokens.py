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


class Size(NamedTuple):
    """An encoder; ``words``: the size of its vocabulary, 0 for pictures."""

    dim: int
    depth: int
    heads: int
    hidden: int
    batch: int
    tokens: int
    words: int = 0

    def model(self) -> tuple[nn.Module, Tensor]:
        if not self.words:
            model = ViT(dim=self.dim, depth=self.depth, heads=self.heads, hidden=self.hidden)
            return model, torch.randn(self.batch, 3, 32, 32)
        return self._bert(), torch.randint(0, self.words, (self.batch, self.tokens))

    def _bert(self) -> nn.Module:
        """BERT of transformers with the sizes of a published model, random, without dropout."""
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=self.words, hidden_size=self.dim, num_hidden_layers=self.depth,
            num_attention_heads=self.heads, intermediate_size=self.hidden, num_labels=10,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        model: nn.Module = BertForSequenceClassification(config)
        return model

    def left(self, budgets: Budgets) -> float:
        """The share of backward's products that the budgets leave."""
        rows, queries = 4 * self.dim * self.hidden, 4 * self.dim**2 + 5 * self.tokens * self.dim
        keys = 4 * self.dim**2
        kept = rows * budgets.rows + queries * budgets.queries + keys * budgets.keys
        return kept / (rows + queries + keys)


MODELS = {
    "ViT 192 × 9, 128 × 64 tokens": Size(192, 9, 12, 1024, 128, 64),
    "ViT 96 × 4, 128 × 64 tokens": Size(96, 4, 4, 384, 128, 64),
    "rxnBERT, 16 × 223 tokens": Size(256, 12, 4, 512, 16, 223, 591),
    "MiniLM-L6, 32 × 128 tokens": Size(384, 6, 12, 1536, 32, 128, 30522),
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
            # What is left where backward costs its kept products and nothing else does.
            floor = share + (1 - share) * MODELS[name].left(budgets)
            for word in ("", ", compiled")[: 1 + compiled]:
                method = f"kept tokens {budgets}{word}"
                ratio = ratios[f"{budgets}{word}"]
                yield Line(name, method, budgets.rows, ratio, floor, target)


def step(name: str, budgets: Budgets | None, *, compiled: bool = False) -> Step:
    """A closure that runs one training step of one of ``MODELS``."""
    model, inputs = _model(name, budgets)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    labels = torch.randint(0, 10, (inputs.shape[0],))
    call: Callable[..., Any] = torch.compile(model) if compiled else model

    def once() -> None:
        optimizer.zero_grad()
        output = call(inputs)
        F.cross_entropy(output if isinstance(output, Tensor) else output.logits, labels).backward()
        optimizer.step()

    return once


def forward(name: str) -> Step:
    model, inputs = _model(name, None)
    return lambda: model(inputs)


def _model(name: str, budgets: Budgets | None) -> tuple[nn.Module, Tensor]:
    """The same weights and the same batch each time."""
    torch.manual_seed(0)
    model, inputs = MODELS[name].model()
    if budgets is not None:
        turn_(model, budgets)
    return model, inputs


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
