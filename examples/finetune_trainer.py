"""Fine-tune a BERT classifier with transformers' Trainer, exactly and sketched.

    python examples/finetune_trainer.py                         a few minutes on a CPU
    python examples/finetune_trainer.py --budget 0.5
    python examples/finetune_trainer.py --smoke                 seconds

Nothing is downloaded: the model is built from a configuration, and the data are small reviews from
a grammar ("the plot was very dull but the cast was fine and the pace was rather flat"), whose label
is the mood of most clauses. All that sketchprop needs is one line:

    Trainer(model, args, train_dataset=..., callbacks=[SketchCallback(sp.Tokens(0.3))])

The callback lets every block run backward on three tokens of ten when training begins and adds what
is kept to the log. Padding has no gradient and costs nothing. These reviews are short and the model
small: little is to be gained here, and the point is how it is typed.
AdamW is not linear in the gradient, so judge by the accuracy, not by the mean of the gradient.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from itertools import pairwise

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

import sketchprop as sp
from sketchprop.integrations.transformers import SketchCallback

NOUNS = ["plot", "cast", "music", "ending", "script", "pace", "dialogue", "camera"]
GOOD = ["good", "fine", "moving", "witty", "clever", "bright"]
BAD = ["bad", "dull", "poor", "clumsy", "tired", "flat"]
DEGREES = ["very", "quite", "rather", "truly", "simply", "mostly"]
WORDS = ["[pad]", "[cls]", "the", "was", "and", "but", *NOUNS, *GOOD, *BAD, *DEGREES]
NUMBER = {word: i for i, word in enumerate(WORDS)}
LENGTH = 20


def clause(draw: random.Random, good: bool) -> list[str]:
    """A few words of the wanted mood."""
    return [
        "the",
        draw.choice(NOUNS),
        "was",
        draw.choice(DEGREES),
        draw.choice(GOOD if good else BAD),
    ]


class Reviews(Dataset[dict[str, torch.Tensor]]):
    """Sentences of one or three clauses; 'and' keeps the mood, 'but' turns it."""

    def __init__(self, count: int, seed: int) -> None:
        draw = random.Random(seed)
        self.rows = [self._review(draw) for _ in range(count)]

    @staticmethod
    def _review(draw: random.Random) -> dict[str, torch.Tensor]:
        moods = [draw.random() < 0.5 for _ in range(draw.choice([1, 3]))]
        words = ["[cls]", *clause(draw, moods[0])]
        for before, good in pairwise(moods):
            words += ["and" if good == before else "but", *clause(draw, good)]
        ids = torch.tensor([NUMBER[word] for word in words])
        padding = (0, LENGTH - len(ids))
        return {
            "input_ids": torch.nn.functional.pad(ids, padding),
            "attention_mask": torch.nn.functional.pad(torch.ones_like(ids), padding),
            "labels": torch.tensor(int(2 * sum(moods) > len(moods))),
        }

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return self.rows[i]


def build(width: int, depth: int) -> BertForSequenceClassification:
    """A small BERT; for a real one: ``from_pretrained("bert-base-uncased")``."""
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=LENGTH,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def fine_tune(args: argparse.Namespace, sketch: sp.Sketch | None) -> tuple[float, float, float]:
    """Loss of the last steps, accuracy on unseen reviews, seconds of training."""
    set_seed(args.seed)  # the same start and the same order of the data both times
    model = build(args.width, args.depth)
    test = Reviews(args.test, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                max_steps=args.steps,
                per_device_train_batch_size=args.batch_size,
                learning_rate=args.learning_rate,
                warmup_steps=args.steps // 10,
                logging_steps=max(1, args.steps // 10),
                save_strategy="no",
                report_to="none",
                dataloader_pin_memory=torch.cuda.is_available(),
                seed=args.seed,
            ),
            train_dataset=Reviews(args.train, seed=0),
            callbacks=[SketchCallback(sketch, rows=args.batch_size * LENGTH)],
        )
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        logits = torch.as_tensor(trainer.predict(test).predictions)
    labels = torch.stack([row["labels"] for row in test.rows])
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    kept = losses[-1]["sketch_kept_flops"]
    print(f"kept backward FLOPs of linear layers: {kept:.3f}")
    return losses[-1]["loss"], float((logits.argmax(-1) == labels).float().mean()), seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sketch", default="Tokens", help="a class of sketchprop (default: Tokens)"
    )
    parser.add_argument("--budget", type=float, default=0.3, help="kept fraction (default: 0.3)")
    parser.add_argument("--steps", type=int, default=300, help="default: 300")
    parser.add_argument("--batch-size", type=int, default=64, help="default: 64")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="default: 0.0005")
    parser.add_argument("--width", type=int, default=128, help="default: 128")
    parser.add_argument("--depth", type=int, default=2, help="default: 2")
    parser.add_argument("--train", type=int, default=8000, help="reviews (default: 8000)")
    parser.add_argument("--test", type=int, default=1000, help="reviews (default: 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps, to see it run")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.batch_size, args.width, args.train, args.test = 6, 8, 32, 64, 32

    sketch = getattr(sp, args.sketch)(args.budget)
    results = {"exact": fine_tune(args, None), repr(sketch): fine_tune(args, sketch)}
    print(f"\n{'':<14}{'loss':>8}{'accuracy':>10}{'seconds':>9}")
    for name, (loss, accuracy, seconds) in results.items():
        print(f"{name:<14}{loss:>8.3f}{accuracy:>10.3f}{seconds:>9.1f}")


if __name__ == "__main__":
    main()
