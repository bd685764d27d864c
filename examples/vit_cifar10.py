"""A small vision transformer on CIFAR-10 in plain PyTorch, exactly and sketched side by side.

    python examples/vit_cifar10.py                              some minutes on a CPU
    python examples/vit_cifar10.py --sketch Rows                tokens, layer by layer
    python examples/vit_cifar10.py --smoke                      seconds

Two copies of one model see the same batches in turns: one backpropagates exactly, in the other

    sp.sketch_(model, {"blocks.*": sp.Tokens(0.3)})

has replaced the backward pass of every block by one that runs on three tokens of ten, drawn by the
norm of their gradient. Nothing else differs: the training loop is the usual one. At the end both
are tested: what was saved in time, and what it cost in accuracy.

The pictures are looked for in the folder that SKETCHPROP_DATA names, then in the cache, then
downloaded (163 MB) and checked by their sums.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sketchprop as sp
from sketchprop.zoo import ViT

sys.path.append(str(Path(__file__).parents[1]))  # this checkout, which has a reader of CIFAR-10

from experiments.data import cifar10


class Run:
    """A model, its optimizer, and what training it has brought so far."""

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, args.learning_rate, total_steps=args.steps
        )
        self.loss = 0.0
        self.seconds = 0.0

    def step(self, images: Tensor, labels: Tensor) -> None:
        start = time.perf_counter()
        loss = F.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        # A running mean, so that single batches do not decide what is shown.
        self.loss += (loss.item() - self.loss) * (0.05 if self.loss else 1.0)
        self.seconds += time.perf_counter() - start

    @torch.no_grad()
    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        self.model.eval()
        hits = [
            (self.model(part).argmax(1) == truth).float()
            for part, truth in zip(images.split(500), labels.split(500), strict=True)
        ]
        self.model.train()
        return float(torch.cat(hits).mean())


def scaled(images: Tensor) -> Tensor:
    """Bytes as numbers around zero."""
    return images.float() / 127.5 - 1


def progress(step: int, steps: int, runs: dict[str, Run]) -> None:
    """One line that is redrawn on a terminal; ten lines in a file."""
    live = sys.stdout.isatty()
    if not live and step % max(1, steps // 10) and step != steps:
        return
    shown = "   ".join(f"{name} {r.loss:.3f} {r.seconds:.1f} s" for name, r in runs.items())
    line = f"step {step}/{steps}   {shown}"
    print(
        f"\r\x1b[K{line}" if live else line, end="" if live and step < steps else "\n", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sketch", default="Tokens", help="a class of sketchprop (default: Tokens)"
    )
    parser.add_argument("--budget", type=float, default=0.3, help="kept fraction (default: 0.3)")
    parser.add_argument("--steps", type=int, default=400, help="default: 400")
    parser.add_argument("--batch-size", type=int, default=128, help="default: 128")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="default: 0.002")
    parser.add_argument("--width", type=int, default=128, help="of the tokens (default: 128)")
    parser.add_argument("--depth", type=int, default=4, help="blocks (default: 4)")
    parser.add_argument("--threads", type=int, help="limit torch to this many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps, to see it run")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.batch_size, args.width, args.depth = 4, 16, 32, 1
    if args.threads:
        torch.set_num_threads(args.threads)

    images, labels = cifar10(train=True)
    test_images, test_labels = cifar10(train=False)
    if args.smoke:
        test_images, test_labels = test_images[:200], test_labels[:200]

    torch.manual_seed(args.seed)
    model = ViT(dim=args.width, depth=args.depth, heads=4, hidden=4 * args.width)
    sketch = getattr(sp, args.sketch)(args.budget)
    sketched = sp.sketch_(copy.deepcopy(model), {"blocks.*": sketch})
    print(sp.summary(sketched, rows=args.batch_size * 64))
    runs = {"exact": Run(model, args), repr(sketch): Run(sketched, args)}

    for step in range(1, args.steps + 1):
        chosen = torch.randint(len(labels), (args.batch_size,))
        batch, truth = scaled(images[chosen]), labels[chosen]
        if torch.rand(()) < 0.5:
            batch = batch.flip(-1)
        for run in runs.values():
            run.step(batch, truth)
        progress(step, args.steps, runs)

    test = scaled(test_images)
    print(f"\n{'':<14}{'loss':>8}{'accuracy':>10}{'seconds':>9}{'of exact':>10}")
    for name, run in runs.items():
        share = run.seconds / runs["exact"].seconds
        accuracy = run.accuracy(test, test_labels)
        print(f"{name:<14}{run.loss:>8.3f}{accuracy:>10.3f}{run.seconds:>9.1f}{share:>10.2f}")


if __name__ == "__main__":
    main()
