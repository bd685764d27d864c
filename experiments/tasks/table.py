"""The tasks by name: problems to train on, how, and which results others had.

``TASKS["yields"].problem()`` is what studies train; ``problem(small=True)`` is a tiny model on
made-up data, which needs no file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sketchprop.zoo import ViT

from ..lab.problem import Problem
from ..lab.trainer import Batch, generator
from ..problems import cifar_vit, drawer, in_blocks, pieces, pixels, token_loss
from .models import CharacterGPT, in_layers, minilm, tiny_encoder, yield_encoder
from .scores import f1, negative_loss, r_squared
from .texts import (
    LONGEST,
    Texts,
    drawn_at_random,
    drawn_by_length,
    load_mrpc,
    load_reviews,
    load_shakespeare,
    load_sst2,
    load_yields,
    texts,
)  # fmt: skip

EVALUATED = 64
"""Samples at a time when evaluating."""
HELD = 432
"""Training reactions that are kept apart to choose rates on: the data has no part for that."""
PAD = 0
"""Of all encoders here."""
LOST = -1e4
"""The score of a lost run, where scores may be below zero."""
BLOCK = 64
"""Characters that the GPT sees."""


@dataclass(frozen=True)
class Task:
    """A problem, the rate it is trained at, and what exact training is held against."""

    name: str
    label: str
    """For a person."""
    make: Callable[[bool], Problem]
    rate: float
    """Of AdamW, for an exact run at the problem's batch size."""
    moments: tuple[int, ...]
    """Steps of exact training after which noise is measured."""
    quality: str
    published: str
    """What others reached, and how."""
    baseline: str
    """What exact training must reach here before anything is compared with it."""
    samples: int = 0
    """To train on; of characters, blocks of them."""
    pad: int = -1
    """The token that fills short rows; none by default."""
    second: Callable[[Tensor, Tensor], float] | None = None
    """Another score of outputs for targets, to be shown beside the first."""

    def problem(self, small: bool = False) -> Problem:
        return self.make(small)


def _made_up(classes: int, seed: int, rows: int = 96) -> Texts:
    """Rows of 5 to 12 tokens between 1 (first) and 2 (last); the target: how large they are."""
    source = generator("made-up", seed)
    lengths = torch.randint(5, 13, (rows,), generator=source).tolist()
    inner = [torch.randint(3, 32, (length - 2,), generator=source) for length in lengths]
    sizes = torch.stack([tokens.float().mean() for tokens in inner])
    targets = (sizes - sizes.mean()) / sizes.std()
    if classes:
        targets = (targets > 0).long()
    return texts([[1, *tokens.tolist(), 2] for tokens in inner], targets, PAD)


@lru_cache(maxsize=2)
def yields(small: bool) -> Problem:
    """How much a Suzuki coupling yields: the pretrained rxnfp, batches as its authors drew them."""
    if small:
        train = validation = test = _made_up(0, 0)
    else:
        rows, test = load_yields()
        train, validation = rows.part(0, -HELD), rows.part(len(rows.targets) - HELD)
    return Problem(
        name="yields",
        title="rxnfp's BERT (12 layers, width 256) on reaction yields, batch 16, AdamW",
        model=(lambda: tiny_encoder(1)) if small else yield_encoder,
        draw=drawn_at_random(train),
        loss=F.mse_loss,
        validation=lambda: validation.batches(EVALUATED),
        test=lambda: test.batches(EVALUATED),
        batch_size=8 if small else 16,
        inner=in_layers,
        score=r_squared,
        worst=LOST,
    )


def _sentences(
    name: str, title: str, small: bool, load: Callable[[], tuple[Texts, Texts, Texts]]
) -> Problem:
    train, validation, test = (_made_up(2, seed) for seed in range(3)) if small else load()
    return Problem(
        name=name,
        title=f"MiniLM-L6, pretrained, on {title}, batch 32, AdamW",
        model=(lambda: tiny_encoder(2, frozen=True)) if small else minilm,
        draw=drawn_by_length(train),
        loss=F.cross_entropy,
        validation=lambda: validation.batches(EVALUATED),
        test=lambda: test.batches(EVALUATED),
        batch_size=8 if small else 32,
        inner=in_layers,
    )


@lru_cache(maxsize=2)
def mrpc(small: bool) -> Problem:
    """Do two sentences say the same?"""
    return _sentences("mrpc", "MRPC bucketed by length", small, load_mrpc)


@lru_cache(maxsize=2)
def sst2(small: bool) -> Problem:
    """Is a sentence praise?"""
    return _sentences("sst2", "SST-2 bucketed by length", small, load_sst2)


@lru_cache(maxsize=2)
def padded_sst2(small: bool) -> Problem:
    """The same in random batches, most of which is padding."""
    base = _sentences("sst2-padded", "SST-2 in random batches", small, load_sst2)
    train = _made_up(2, 0) if small else load_sst2()[0]
    return replace(base, draw=drawn_at_random(train))


@lru_cache(maxsize=2)
def documents(small: bool, tokens: int = LONGEST) -> Problem:
    """Is a long review praise? Four of them at a time, read from the first token."""
    load = cache(partial(load_reviews, tokens))
    base = _sentences("documents", f"reviews of {tokens} tokens", small, load)
    train = _made_up(2, 0) if small else load()[0]
    title = base.title.replace("batch 32", "batch 4")
    return replace(base, title=title, draw=drawn_at_random(train), batch_size=4)


@lru_cache(maxsize=4)
def reviews(small: bool, tokens: int = LONGEST) -> Problem:
    """The same from the mean of all tokens, as MiniLM was trained: it begins on no plateau."""
    base = documents(small, tokens)
    return replace(
        base,
        name="reviews",
        title=base.title.replace("reviews of", "the mean token of reviews of"),
        model=partial(tiny_encoder, 2, True, True) if small else partial(minilm, mean=True),
    )


@lru_cache(maxsize=2)
def gpt(small: bool) -> Problem:
    """The next character of Shakespeare, at the size of nanoGPT's setting for a CPU."""
    if small:
        train = validation = torch.arange(600) % 7
        block, alphabet, sizes = 8, 7, (16, 2, 2)
    else:
        train, validation = load_shakespeare()
        block, alphabet, sizes = BLOCK, int(train.max()) + 1, (128, 4, 4)

    def draw(source: torch.Generator, size: int) -> Batch:
        starts = torch.randint(len(train) - block, (size, 1), generator=source)
        own = starts + torch.arange(block + 1)
        return train[own[:, :-1]], train[own[:, 1:]]

    def windows() -> list[Batch]:
        """All of the text that is not trained on, in windows that do not overlap."""
        usable = (len(validation) - 1) // block * block
        x, y = (validation[i : i + usable].view(-1, block) for i in (0, 1))
        return list(zip(torch.split(x, EVALUATED), torch.split(y, EVALUATED), strict=True))

    width, layers, heads = sizes
    return Problem(
        name="gpt",
        title="GPT over characters (4 layers, width 128) on tinyshakespeare, batch 12, AdamW",
        model=lambda: CharacterGPT(alphabet, block, width, layers, heads),
        draw=draw,
        loss=token_loss,
        validation=windows,
        test=windows,
        batch_size=4 if small else 12,
        inner=in_layers,
        score=negative_loss(token_loss),
        worst=LOST,
    )


@lru_cache(maxsize=4)
def vit(small: bool, name: str = "vit", batch_size: int = 128, **sizes: int) -> Problem:
    """Pictures from scratch."""
    if not small:
        return cifar_vit(name, batch_size, **sizes)
    source = generator("made-up", 3)
    labels = torch.randint(2, (64,), generator=source)
    images = torch.randint(0, 100, (64, 3, 32, 32), generator=source) + 100 * labels.view(
        -1, 1, 1, 1
    )

    def model() -> nn.Module:
        return ViT(dim=16, depth=2, heads=2, hidden=32, patch=8)

    held = pieces(images, labels, pixels)
    return Problem(
        name=name, title="a tiny ViT on made-up pictures", model=model,
        draw=drawer(images, labels, pixels), loss=F.cross_entropy, validation=held, test=held,
        batch_size=8, inner=in_blocks,
    )  # fmt: skip


_ACCURACY = "test accuracy (%)"
_TASKS = (
    Task("vit", "ViT on CIFAR-10", vit, 1e-3, (0, 150, 600), _ACCURACY,
         "none for this size and number of steps",
         "the best of several batch sizes and rates", samples=20_000),
    Task("vit256", "ViT on CIFAR-10, 256 tokens",
         partial(vit, name="vit256", batch_size=16, dim=128, hidden=512, patch=2), 1e-3,
         (0, 150, 600), _ACCURACY, "none for this size and number of steps",
         "the best of several batch sizes and rates", samples=20_000),
    Task("yields", "BERT on reaction yields", yields, 9.659e-5, (0, 120, 500),
         "R² on the test rows (%)",
         "80.8 on this split after 15 epochs with dropout 0.8 (Yield-BERT, Schwaller et al. 2021); "
         "80-84 over ten splits",
         "80 after 15 epochs", samples=4032 - HELD, pad=PAD),
    Task("mrpc", "MiniLM on MRPC", mrpc, 5e-5, (0, 40, 120),
         "accuracy on the test pairs (%)",
         "BERT-Medium: accuracy 81.6, F1 86.6; MiniLM-L12: F1 89.5",
         "what BERT-Medium has, within the spread of seeds", samples=3668, pad=PAD, second=f1),
    Task("sst2", "MiniLM on SST-2", sst2, 5e-5, (0, 30, 100), _ACCURACY,
         "BERT-Small: 89.7; MiniLMv2-L6 on dev: 86.2, 89.9, 90.5, 92.0 after epochs 1 to 4",
         "86 on dev after an epoch", samples=67_349, pad=PAD),
    Task("sst2-padded", "MiniLM on SST-2, padded", padded_sst2, 5e-5, (0, 30, 100), _ACCURACY,
         "as sst2", "as sst2: only the batches differ", samples=67_349, pad=PAD),
    Task("documents", "MiniLM on reviews", documents, 5e-5, (0, 100, 200), _ACCURACY,
         "none for this model", "to leave the plateau that training begins on", samples=1600,
         pad=PAD),
    Task("reviews", "MiniLM on reviews, mean token", reviews, 5e-5, (0, 40, 120), _ACCURACY,
         "none for this model", "above 80 %", samples=1600, pad=PAD),
    Task("gpt", "GPT over characters", gpt, 1e-3, (0, 300, 1500), "validation loss, negative",
         "1.88 after 2,000 steps (nanoGPT's setting for a CPU)", "1.88 after 2,000 steps",
         samples=1_003_854 // BLOCK),
)  # fmt: skip
TASKS = {task.name: task for task in _TASKS}
# Run anew on the page of `pay`, beside what is on record.
TASKS["yields5"] = replace(TASKS["yields"], name="yields5", label="Reaction yields, five seeds")
