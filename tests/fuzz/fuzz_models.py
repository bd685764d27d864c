"""Small models, whole: random blocks, masks, budgets, precision, and what is done to them."""

from __future__ import annotations

import copy
import functools
import random
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fuzz_sketches
import sketchprop as sp
from fuzz_base import Nothing, by_shape, drawing, holds, pick, same
from fuzz_layers import (
    TOLERANCE,
    Sketched,
    draws_in_forward,
    forget,
    gradient_like,
    leaves_of,
    same_kinds,
)
from fuzz_mutations import MUTATIONS, mutate
from sketchprop.layers.blocks import SketchedBlock
from sketchprop.zoo import Block

WORDS = 11
STEPS = ("eval", "exact", "budget 0.5", "budget 2", "deepcopy", "pickle", "state", "unsketch",
         "step")  # fmt: skip
HF = ("BERT", "GPT-2", "ViT", "Llama")
KINDS = ("zoo", "encoder", "decoder", "mlp", "conv", *HF)


class Tower(nn.Module):
    """Blocks under a head, and what they are called with."""

    def __init__(self, blocks: list[nn.Module], width: int, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 2)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, **self.options)
        y: Tensor = self.head(x)
        return y


class OfTransformers(nn.Module):
    """A model of transformers as a function of its embedded input."""

    def __init__(self, model: nn.Module, name: str, mask: Tensor | None) -> None:
        super().__init__()
        self.model, self.name, self.mask = model, name, mask

    def forward(self, x: Tensor) -> Tensor:
        if self.name == "ViT":
            return self.model(pixel_values=x).last_hidden_state  # type: ignore[no-any-return]
        options = {} if self.mask is None else {"attention_mask": self.mask}
        return self.model(inputs_embeds=x, **options).last_hidden_state  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Model(Sketched):
    """A small model, its sketch, and what is done to it."""

    seed: int
    kind: str
    sketch: Any
    depth: int = 1
    samples: int = 2
    tokens: int = 3
    dropout: float = 0.0
    padded: bool = False
    norm_first: bool = True
    batch_first: bool = True
    kv_heads: int = 2
    """1: several heads of queries share keys."""
    dtype: torch.dtype = torch.float64
    direction: str = "normal"
    frozen: bool = False
    autocast: bool = False
    device: str = "cpu"
    everything: bool = False
    """Whether the last layer is taken as well."""
    steps: tuple[str, ...] = ()
    mutation: str = ""

    simplest: ClassVar[dict[str, Any]] = {
        "kind": "zoo", "depth": 1, "samples": 1, "tokens": 2, "dropout": 0.0, "kv_heads": 2,
        "dtype": torch.float64, "direction": "normal", "device": "cpu", "norm_first": True,
        "batch_first": True, "mutation": "",
    }  # fmt: skip

    @classmethod
    def random(cls, rng: random.Random) -> Self:
        kind = pick(rng, *KINDS)
        blocks = kind not in ("mlp", "conv")
        sketch = fuzz_sketches.of_layer(rng)
        if blocks and rng.random() < 0.75:
            sketch = fuzz_sketches.tokens(rng)
        return cls(
            seed=rng.randrange(1000),
            kind=kind,
            sketch=sketch,
            depth=pick(rng, 1, 1, 1, 2),
            samples=pick(rng, 0, 1, 1, 2, 2, 3) if rng.random() < 0.9 else 5,
            tokens=pick(rng, 1, 2, 2, 3, 3, 4, 6),
            dropout=pick(rng, 0.0, 0.0, 0.3),
            padded=rng.random() < 0.3,
            norm_first=rng.random() < 0.5,
            batch_first=rng.random() < 0.5,
            kv_heads=pick(rng, 1, 2),
            dtype=pick(rng, *[torch.float64] * 4, torch.float32, torch.bfloat16),
            direction=pick(rng, "normal", "normal", "one token", "zero", "expanded", "padding"),
            frozen=rng.random() < 0.2,
            autocast=rng.random() < 0.1,
            device="meta" if rng.random() < 0.05 else "cpu",
            everything=rng.random() < 0.3,
            steps=tuple(pick(rng, *STEPS) for _ in range(rng.randint(0, 2))),
            mutation=pick(rng, *MUTATIONS) if blocks and rng.random() < 0.4 else "",
        )

    # --- what is tried ---

    @property
    def drops(self) -> float:
        """Rows that are drawn in forward come from the generator that dropout asks."""
        forward = not isinstance(self.sketch, sp.Tokens) and draws_in_forward(self.sketch)
        return 0.0 if forward else self.dropout

    def plain(self) -> nn.Module:
        torch.manual_seed(self.seed)
        model: nn.Module
        if self.kind == "mlp":
            layers: list[nn.Module] = [nn.Linear(4, 6), nn.ReLU(), nn.Dropout(self.drops)]
            model = nn.Sequential(*layers, nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        elif self.kind == "conv":
            model = nn.Sequential(
                nn.Conv1d(4, 5, 3, padding=1), nn.ReLU(), nn.Dropout(self.drops),
                nn.Conv1d(5, 4, 1), nn.GELU(), nn.Conv1d(4, 2, 2, padding=1),
            )  # fmt: skip
        elif self.kind in HF:
            model = OfTransformers(self._of_transformers(), self.kind, self._mask())
        else:
            model = self._tower()
        if self.mutation:
            mutate(model, self.mutation, self.seed)
        model.to(self.dtype).train()
        if self.frozen:
            rng = random.Random(self.seed)
            for p in model.parameters():
                p.requires_grad_(rng.random() < 0.5)
        for name, p in model.named_parameters():
            if "bias" in name:  # where all are zero a mistake in them is not seen
                nn.init.normal_(p)
        return model

    def _tower(self) -> nn.Module:
        if self.kind == "zoo":
            return Tower([Block(4, 2, 5, self.drops) for _ in range(self.depth)], 4)
        kind: Any = nn.TransformerEncoderLayer
        options: dict[str, Any] = {}
        mask = self._mask()
        padding = None if mask is None else mask == 0
        if self.kind == "decoder":
            kind = nn.TransformerDecoderLayer
            size = (self.samples, 2, 4) if self.batch_first else (2, self.samples, 4)
            options = {"memory": torch.randn(size).to(self.dtype), "tgt_key_padding_mask": padding}
        else:
            options = {"src_key_padding_mask": padding}
        layers = [
            kind(4, 2, 5, self.drops, batch_first=self.batch_first, norm_first=self.norm_first)
            for _ in range(self.depth)
        ]
        return Tower(layers, 4, **options)

    def _of_transformers(self) -> nn.Module:
        p = self.drops
        sizes = {"hidden_size": 4, "num_hidden_layers": self.depth, "num_attention_heads": 2,
                 "intermediate_size": 5}  # fmt: skip
        text = {**sizes, "vocab_size": WORDS, "max_position_embeddings": 8, "pad_token_id": 0}
        both = {"hidden_dropout_prob": p, "attention_probs_dropout_prob": p}
        if self.kind == "BERT":
            return hf.BertModel(hf.BertConfig(**text, **both), add_pooling_layer=False)
        if self.kind == "ViT":
            config = hf.ViTConfig(**sizes, **both, image_size=4, patch_size=2)
            return hf.ViTModel(config, add_pooling_layer=False)
        if self.kind == "GPT-2":
            return hf.GPT2Model(
                hf.GPT2Config(
                    vocab_size=WORDS, n_embd=4, n_layer=self.depth, n_head=2, n_inner=5,
                    n_positions=8, resid_pdrop=p, attn_pdrop=p, embd_pdrop=p, bos_token_id=1,
                    eos_token_id=2,
                    use_cache=self.norm_first,
                )
            )  # fmt: skip
        return hf.LlamaModel(
            hf.LlamaConfig(
                **text, num_key_value_heads=self.kv_heads, attention_dropout=p,
                use_cache=self.norm_first,
            )
        )  # fmt: skip

    def _mask(self) -> Tensor | None:
        if not self.padded or self.tokens < 2 or not self.samples:
            return None
        mask = torch.ones(self.samples, self.tokens, dtype=torch.long)
        mask[0, self.tokens - 1 :] = 0
        return mask

    def input(self) -> Tensor:
        torch.manual_seed(self.seed + 1)
        shape: tuple[int, ...] = (self.samples, self.tokens, 4)
        if self.kind == "conv":
            shape = (self.samples, 4, self.tokens)
        elif self.kind == "ViT":
            shape = (self.samples, 3, 4, 4)
        elif self.kind in ("encoder", "decoder") and not self.batch_first:
            shape = (self.tokens, self.samples, 4)
        return torch.randn(shape).to(self.dtype).requires_grad_()

    def sketched(self, plain: nn.Module, sketch: Any = None) -> nn.Module:
        chosen = sp.select.everything if self.everything else None
        sketch = self.sketch if sketch is None else sketch
        return sp.sketch_(copy.deepcopy(plain), sketch, chosen)

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(self.seed + 3)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return model(x)  # type: ignore[no-any-return]

    # --- the laws ---

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        narrow = self.kind == "Llama" or self.mutation == "eager"  # norms or weights in float32
        if narrow and self.dtype == torch.float64:
            return 1e-5
        return 0.3 if self.autocast else 5 * TOLERANCE[self.dtype]

    def check(self) -> None:
        try:
            self._check()
        except ValueError as error:  # refused, by name
            if "mixes rows" in str(error) or "random numbers" in str(error):
                raise Nothing(str(error)) from None
            raise
        except AttributeError as error:  # torch's own, in eval mode
            if "'Wrapped' object" in str(error):
                raise Nothing(str(error)) from None
            raise

    def _check(self) -> None:
        plain, x = self.plain(), self.input()
        try:
            model = self.sketched(plain)
        except ValueError as error:
            if "no layer can take" in str(error) or "has no layer" in str(error):
                raise Nothing(str(error)) from None
            raise
        try:
            y = self.forward(plain, x)
        except Exception as error:  # no samples, for example, which some models do not take
            raise Nothing(str(error)) from None
        if self.device == "meta":
            self._meta(plain, model, x)
            return
        z = self.forward(model, x)
        failed = [m.sketching.proof for m in model.modules() if isinstance(m, SketchedBlock)]
        holds("proof", bool(self.mutation) or not any(failed), *failed)
        same("forward", [z.detach()], [y.detach()], self.tolerance)
        G = gradient_like(y, self.direction, self.seed + 2)
        truth = self.gradients(plain, x, G)
        self.budget_one(plain, x, G, truth)
        self._values(model, plain, x, G)
        self._passes(plain, x, G)
        self.history(plain, x, G)
        self.mean(model, x, G, truth)

    def _meta(self, plain: nn.Module, model: nn.Module, x: Tensor) -> None:
        """Shapes without numbers, as pipelines infer them."""
        x = x.detach().to("meta").requires_grad_()
        try:
            plain.to("meta")(x)
        except RuntimeError as error:  # models that look at their masks
            raise Nothing(str(error)) from None
        y = model.to("meta")(x)
        leaves = leaves_of(model, x)
        same_kinds(torch.autograd.grad(y, leaves, torch.empty_like(y), allow_unused=True), leaves)

    def _values(self, model: nn.Module, plain: nn.Module, x: Tensor, G: Tensor) -> None:
        for grad in self.gradients(model, x, torch.zeros_like(G)):
            holds("zeros", grad is None or not grad.any(), grad)
        if not G.numel():
            return
        bad = torch.ones_like(G).contiguous()
        bad.view(-1)[random.Random(self.seed).randrange(bad.numel())] = float("nan")
        with drawing(by_shape(self.seed)):
            found = self.gradients(model, x, bad)
        if any(g is not None and not g.isfinite().all() for g in self.gradients(plain, x, bad)):
            # In some of them: a ReLU behind a dropped row may be dead in the kept ones.
            seen = [g for g in found if g is not None and not g.isfinite().all()]
            holds("not finite", len(seen) > 0)

    def _passes(self, plain: nn.Module, x: Tensor, G: Tensor) -> None:
        model = self.sketched(plain)
        leaves = leaves_of(model, x)
        with drawing(by_shape(self.seed)):
            whole = self.one_pass(plain, x, G)
            if isinstance(self.sketch, sp.Tokens):
                kinds = {"activations": "input", "input": "activations"}
                other = replace(self.sketch, save=kinds[self.sketch.save])
                found = self.gradients(self.sketched(plain, other), x, G)
                same("save", found, whole, self.tolerance)
            kind = self.seed % 2 == 0
            stored = functools.partial(checkpoint, model, use_reentrant=kind)
            forget(leaves)
            torch.manual_seed(self.seed + 3)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                y = stored(x)
            y.backward(G)
            found = [leaf.grad for leaf in leaves]
            forget(leaves)
            same("checkpoint", found, whole, self.tolerance)
