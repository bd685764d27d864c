"""Exact training, a smaller batch and kept tokens, in turns: who gets where in how many seconds?

    make demo                                    two minutes on two cores
    python demo/kept_tokens.py --seconds 300     longer, and less a matter of luck

A small vision transformer is trained three times at once. In the first the backward pass is exact.
In the second the batch is smaller, so that a step takes as long as in the third, where

    sp.sketch_(model, sp.Tokens(0.3))

runs the backward pass of every block on the tokens that carry it. All start from the same weights,
draw pictures in the same order, have the same learning rate and the same seconds: short turns in
one process, each with a clock of its own that stops while the others work and while the loss on
held-out pictures is measured. Where other programs have the cores, one thread works and its own
seconds count.

The pictures are CIFAR-10 if it is on this machine (SKETCHPROP_DATA, or the cache); nothing is
downloaded. Otherwise they are made here: noisy discs with stripes, the label one of ten directions
of these.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sketchprop as sp
from sketchprop.core.allocator import keep_pages
from sketchprop.core.stopwatch import clock_of, unhurried
from sketchprop.meters.advising.curves import levels, value_at
from sketchprop.zoo import ViT

sys.path.append(str(Path(__file__).parents[1]))  # this checkout, which has a reader of CIFAR-10

from experiments.data import DataError, cifar10

TURNS = 18
"""About so many for each way of training, with a measurement of the loss after each."""
LAST = 3
"""Measurements at the end whose mean is shown as a way's loss."""
WARM_UP = 20
"""Steps while the learning rate rises."""
LEARNED = 0.9
"""Of the first loss: above it nothing was learned yet, and nothing is to be told."""
CPU = torch.device("cpu")
COLOURS = ("#455a64", "#ef6c00", "#1565c0")

Pictures = tuple[Tensor, Tensor]


@dataclass
class Way:
    """A way of training: its model, its clock and the loss on held-out pictures so far."""

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
        self.optimizer = torch.optim.AdamW(self.model.parameters(), self.learning_rate, fused=True)
        self.order = torch.Generator().manual_seed(self.seed)

    def train_until(self, seconds: float, pictures: Pictures) -> None:
        """Steps until the way's own clock shows ``seconds``."""
        clock = clock_of(CPU)
        while self.seconds < seconds:
            start = clock()
            risen = min(1.0, (self.steps + 1) / WARM_UP)
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate * risen
            step(self.model, self.optimizer, batch(pictures, self.batch_size, self.order))
            self.steps += 1
            self.seconds += clock() - start

    @torch.no_grad()
    def look(self, held_out: Pictures) -> None:
        """One more measurement; the clock stands."""
        self.model.eval()
        images, labels = held_out
        logits = torch.cat([self.model(part) for part in images.split(100)])
        self.curve.append((self.seconds, float(F.cross_entropy(logits, labels))))
        self.accuracy = float((logits.argmax(1) == labels).float().mean())
        self.model.train()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, pictures: Pictures) -> None:
    images, labels = pictures
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def batch(pictures: Pictures, size: int, order: torch.Generator) -> Pictures:
    images, labels = pictures
    chosen = torch.randint(len(labels), (size,), generator=order)
    return images[chosen].float() / 127.5 - 1, labels[chosen]


# -- pictures --------------------------------------------------------------------------------------


def find_pictures(held_out: int, made: bool) -> tuple[str, Pictures, Pictures]:
    """A name, pictures to train on (bytes) and held-out ones, ready for the model."""
    found = None if made else cifar_here()
    train, test = found or (striped_discs(4000, seed=1), striped_discs(held_out, seed=2))
    name = "CIFAR-10" if found else "striped discs"
    return name, train, (test[0][:held_out].float() / 127.5 - 1, test[1][:held_out])


def cifar_here() -> tuple[Pictures, Pictures] | None:
    """Training and test pictures, if they are on this machine."""
    try:
        return cifar10(train=True, download=False), cifar10(train=False, download=False)
    except DataError:
        return None


def striped_discs(count: int, seed: int) -> Pictures:
    """Striped discs; the label is one of ten directions of the stripes, all else is chance."""
    draw = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, 1, 1, generator=draw)

    labels = torch.randint(10, (count,), generator=draw)
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    angle = labels[:, None, None] * math.pi / 10 + uniform(-0.1, 0.1)
    across = x * angle.cos() + y * angle.sin()
    stripes = (uniform(1.0, 1.5) * across + uniform(0, 2 * math.pi)).sin()
    disc = (x - uniform(10, 22)) ** 2 + (y - uniform(10, 22)) ** 2 < uniform(8, 13) ** 2
    colours, ground = uniform(0.4, 1, 3), uniform(-0.5, 0.5, 3)
    noise = 0.3 * torch.randn(count, 3, 32, 32, generator=draw)
    images = torch.where(disc, stripes, 0.0)[:, None] * colours + ground + noise
    return (images * 64 + 127.5).clamp(0, 255).byte(), labels


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
    cases: Sequence[tuple[nn.Module, int]], pictures: Pictures, rounds: int
) -> list[float]:
    """Median seconds of a step of each model at its batch size, timed in turns."""
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-4, fused=True) for model, _ in cases]
    times: list[list[float]] = [[] for _ in cases]
    clock = clock_of(CPU)
    for _ in range(rounds + 1):
        for (model, size), optimizer, taken in zip(cases, optimizers, times, strict=True):
            some = batch(pictures, size, torch.Generator().manual_seed(0))
            start = clock()
            step(model, optimizer, some)
            taken.append(clock() - start)
    return [statistics.median(taken[1:]) for taken in times]


def as_cheap_batch(
    model: nn.Module, kept: nn.Module, size: int, pictures: Pictures, rounds: int
) -> int:
    """The batch whose exact step takes as long as a step on kept tokens; the models stay."""
    exact, kept = copy.deepcopy(model), copy.deepcopy(kept)
    whole, wanted = step_seconds([(exact, size), (kept, size)], pictures, rounds)
    smaller = max(1, round(size * min(1.0, wanted / whole)))
    # A step is not quite proportional to its batch: look where that guess has led, and correct it.
    wanted, taken = step_seconds([(kept, size), (exact, smaller)], pictures, rounds)
    return max(1, min(size, round(smaller * wanted / taken)))


def train_in_turns(
    ways: Sequence[Way], pictures: Pictures, held_out: Pictures, turn: float, line: Line
) -> None:
    """Turns of ``turn`` seconds until the time is up; all ways end with the same number of them."""
    for way in ways:
        way.look(held_out)
    turns = 0
    while line.left > 0 or turns < LAST:
        turns += 1
        # Another one begins each time, so that none always follows the same neighbour.
        for place in range(len(ways)):
            way = ways[(turns + place) % len(ways)]
            way.train_until(turn * turns, pictures)
            way.look(held_out)
            losses = "   ".join(f"{w.name} {w.curve[-1][1]:.3f}" for w in ways)
            line.say(f"loss after {way.seconds:.0f} s of each:   {losses}")


# -- the answer ------------------------------------------------------------------------------------


def answer(exact: Way, smaller: Way, kept: Way) -> str:
    """Time at equal loss: the lowest that all three have reached."""
    curves = [levels(way.curve) for way in (exact, smaller, kept)]
    goal = max(curve[-1][1] for curve in curves)
    if goal > LEARNED * exact.curve[0][1]:
        return (
            f"Nothing to tell yet: {exact.steps} exact steps have hardly moved the loss, "
            f"{exact.curve[0][1]:.2f} to {goal:.2f}; give more --seconds."
        )
    whole, batch, tokens = (
        value_at(-goal, [(-loss, seconds) for seconds, loss in curve]) for curve in curves
    )

    def saved(seconds: float) -> str:
        share = 1 - seconds / max(whole, 1e-9)
        return f"{abs(share):.0%} {'less' if share >= 0 else 'more'}"

    return (
        f"To the same loss of {goal:.3f}, on the lines of the picture, exact training took "
        f"{whole:.1f} s, {kept.name} {tokens:.1f} s ({saved(tokens)}) and a smaller batch "
        f"{batch:.1f} s ({saved(batch)}); one run, so try --seed 1 and more --seconds."
    )


def table(ways: Sequence[Way]) -> str:
    head = f"{'':<16}{'batch':>7}{'a step':>9}{'steps':>7}{'loss':>8}{'accuracy':>10}"
    lines = [
        f"{way.name:<16}{way.batch_size:>7}{1000 * way.seconds / way.steps:>6.0f} ms{way.steps:>7}"
        f"{statistics.fmean(loss for _, loss in way.curve[-LAST:]):>8.3f}{way.accuracy:>9.0%}"
        for way in ways
    ]
    return "\n".join([head, *lines])


def plot(ways: Sequence[Way], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for way, colour in zip(ways, COLOURS, strict=True):
        axes.plot(*zip(*way.curve, strict=True), "o", ms=2.5, color=colour, alpha=0.5)
        axes.plot(*zip(*levels(way.curve), strict=True), color=colour, label=way.name)
    axes.set(xlabel="seconds of training", ylabel="loss on held-out pictures", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=95, help="all together (default: 95)")
    parser.add_argument("--budget", type=float, default=0.3, help="kept tokens (default: 0.3)")
    parser.add_argument("--batch-size", type=int, default=32, help="default: 32")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="default: 0.001")
    parser.add_argument("--dim", type=int, default=128, help="width of the tokens (default: 128)")
    parser.add_argument("--depth", type=int, default=4, help="blocks (default: 4)")
    parser.add_argument("--held-out", type=int, default=300, help="pictures (default: 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--made", action="store_true", help="made pictures even where CIFAR-10 is")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".png"))
    return parser.parse_args()


def main() -> None:
    args = options()
    keep_pages()
    with unhurried(CPU) as busy:
        race(args, busy)


def race(args: argparse.Namespace, busy: str) -> None:
    line = Line(args.seconds)
    line.say("looking for pictures")
    source, pictures, held_out = find_pictures(args.held_out, args.made)
    torch.manual_seed(args.seed)
    model = ViT(dim=args.dim, depth=args.depth, heads=4, hidden=4 * args.dim)
    tokens = sp.Tokens(args.budget)
    kept = sp.sketch_(copy.deepcopy(model), tokens)
    line.say("timing steps")
    rounds = 6 if args.seconds > 10 else 1
    smaller = as_cheap_batch(model, kept, args.batch_size, pictures, rounds)

    shared = (args.seed, args.learning_rate)
    ways = [
        Way("exact", model, args.batch_size, *shared),
        Way("smaller batch", copy.deepcopy(model), smaller, *shared),
        Way(repr(tokens), kept, args.batch_size, *shared),
    ]
    turn = max(line.left, 0.3 * args.seconds) / len(ways) / TURNS  # a slow start leaves some time
    train_in_turns(ways, pictures, held_out, turn, line)
    line.close()

    title = f"A ViT (width {args.dim}, depth {args.depth}) on {source}"
    print(f"{title}, {torch.get_num_threads()} CPU thread(s), seed {args.seed}\n")
    print(table(ways))
    print("\nSmaller batch: one whose exact step takes as long as a step on kept tokens.")
    if busy:
        print(f"Note: {busy}.")
    plot(ways, title, args.output)
    print(f"\npicture: {args.output}\n{answer(*ways)}")


if __name__ == "__main__":
    main()
