"""Training steps of transformers whose backward runs on kept tokens, against exact ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sketchprop as sp
from sketchprop.layers.blocks import SketchedBlock
from sketchprop.zoo import ViT

from .peak import checkpoint_
from .results import Line
from .timing import CPU, interleave

Step = Callable[[], object]


class Budgets(NamedTuple):
    """Kept shares: rows of the MLPs, queries of attention, rows of keys and values."""

    rows: float
    queries: float
    keys: float

    def __str__(self) -> str:
        return " / ".join(f"{share:g}" for share in self)

    def sketch(self, save: str = "activations") -> sp.Tokens:
        return sp.Tokens(self.rows, queries=self.queries, keys=self.keys, save=save, share="even")


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

    def prepared(
        self, sketch: sp.Tokens | None, device: torch.device, *, checkpointed: bool = False
    ) -> tuple[nn.Module, Tensor]:
        """The same weights and the same batch each time, in training mode."""
        torch.manual_seed(0)
        with device:
            model, inputs = self.model()
        model.train()
        if sketch is not None:
            sp.sketch_(model, sketch)
        if checkpointed:
            checkpoint_(model)
        return model, inputs

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
    "ViT 96 × 4, 64 × 64 tokens": Size(96, 4, 4, 384, 64, 64),
    "ViT 96 × 4, 16 × 64 tokens": Size(96, 4, 4, 384, 16, 64),
    "ViT 96 × 4, 8 × 64 tokens": Size(96, 4, 4, 384, 8, 64),
    "rxnBERT, 16 × 223 tokens": Size(256, 12, 4, 512, 16, 223, 591),
    "MiniLM-L6, 32 × 128 tokens": Size(384, 6, 12, 1536, 32, 128, 30522),
    "MiniLM-L6, 2 × 512 tokens": Size(384, 6, 12, 1536, 2, 512, 30522),
}
SMALL = Budgets(0.2, 0.3, 0.6)
"""What ``Tokens(0.2)`` keeps."""
TARGETS = {
    "ViT 192 × 9, 128 × 64 tokens": {Budgets(0.3, 0.3, 0.3): 0.60, Budgets(0.1, 0.1, 0.1): 0.50},
    "ViT 96 × 4, 128 × 64 tokens": {Budgets(0.3, 0.3, 0.3): 0.68},
    "ViT 96 × 4, 64 × 64 tokens": {SMALL: 0.64},
    "ViT 96 × 4, 16 × 64 tokens": {SMALL: 0.74},
    "ViT 96 × 4, 8 × 64 tokens": {SMALL: 0.85},
    "rxnBERT, 16 × 223 tokens": {Budgets(0.2, 0.2, 0.2): 0.58, Budgets(0.3, 0.4, 0.7): 0.66},
    "MiniLM-L6, 32 × 128 tokens": {Budgets(0.3, 0.3, 0.3): 0.62},
    "MiniLM-L6, 2 × 512 tokens": {SMALL: 0.55},
}


CHECKPOINTED = {
    "ViT 192 × 9, 128 × 64 tokens": 0.55,
    "MiniLM-L6, 32 × 128 tokens": 0.55,
}
"""Where the memory of checkpointing is compared: the target of ``save="input"`` over it."""
SAVING = Budgets(0.2, 0.2, 0.2)
PROVED = 4.0
"""A first step may cost three more: 3 % of a hundred."""


def tokens(names: list[str], seconds: float) -> Iterator[Line]:
    """Exact step, kept tokens, and a forward pass alone, in turns; then against checkpointing."""
    for name in names:
        work: dict[str, Step] = {"exact": step(name), "forward": forward(name)}
        for budgets in TARGETS[name]:
            work[str(budgets)] = step(name, budgets.sketch())
        ratios = interleave(work, seconds=seconds * len(work))
        share = ratios["forward"].median
        yield Line(name, "exact, forward alone", 1.0, ratios["forward"])
        for budgets, target in TARGETS[name].items():
            # What is left where backward costs its kept products and nothing else does.
            floor = share + (1 - share) * MODELS[name].left(budgets)
            ratio = ratios[str(budgets)]
            yield Line(name, f"kept tokens {budgets}", budgets.rows, ratio, floor, target)
        if name in CHECKPOINTED:
            yield _against_checkpoints(name, seconds)


def compiled(names: list[str], seconds: float) -> Iterator[Line]:
    """Compiled steps on kept tokens, over the same step in eager mode and over compiled exact."""
    for name in names:
        budgets = next(iter(TARGETS[name]))
        kept = step(name, budgets.sketch(), compiled=True)
        for method, baseline, target in (
            ("over eager", step(name, budgets.sketch()), 1.0),
            ("over compiled exact", step(name, compiled=True), None),
        ):
            ratio = interleave({"baseline": baseline, "kept": kept}, seconds=2 * seconds)["kept"]
            yield Line(
                name,
                f"kept tokens {budgets}, compiled, {method}",
                budgets.rows,
                ratio,
                None,
                target,
            )


def proofs(names: list[str], seconds: float) -> Iterator[Line]:
    """A first step, which proves every block, over a later one: what it costs, in steps."""
    for name in names:
        budgets = next(iter(TARGETS[name]))
        work = {
            "later": step(name, budgets.sketch()),
            "first": step(name, budgets.sketch(), proves=True),
        }
        ratio = interleave(work, seconds=2 * seconds)["first"]
        method = f"kept tokens {budgets}, first step over a later one"
        yield Line(name, method, budgets.rows, ratio, None, PROVED)


def _against_checkpoints(name: str, seconds: float) -> Line:
    work = {
        "checkpointed": step(name, checkpointed=True),
        "input": step(name, SAVING.sketch(save="input")),
    }
    ratio = interleave(work, seconds=2 * seconds)["input"]
    method = f'kept tokens {SAVING}, save="input", over checkpointing'
    return Line(name, method, SAVING.rows, ratio, None, CHECKPOINTED[name])


def step(
    name: str,
    sketch: sp.Tokens | None = None,
    *,
    compiled: bool = False,
    checkpointed: bool = False,
    proves: bool = False,
) -> Step:
    """A closure that runs one training step of one of ``MODELS``; ``proves``: as if the first."""
    model, inputs = prepared(name, sketch, checkpointed=checkpointed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    labels = torch.randint(0, 10, (inputs.shape[0],))
    call: Callable[..., Any] = torch.compile(model) if compiled else model

    def once() -> None:
        for module in model.modules() if proves else ():
            if isinstance(module, SketchedBlock):
                module.sketching.proof = None
        optimizer.zero_grad()
        loss_of(call(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return once


def loss_of(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(output if isinstance(output, Tensor) else output.logits, labels)


def forward(name: str) -> Step:
    model, inputs = prepared(name)
    return lambda: model(inputs)


def prepared(
    name: str, sketch: sp.Tokens | None = None, *, checkpointed: bool = False
) -> tuple[nn.Module, Tensor]:
    return MODELS[name].prepared(sketch, CPU, checkpointed=checkpointed)
