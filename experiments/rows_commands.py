"""The commands about rows of the gradient."""

from __future__ import annotations

import argparse
from typing import Any

from . import finetune, pay, rows_mnist, variance, weight_variance

COMMANDS = {
    "rows-mnist": (rows_mnist, "rows by importance beside the paper's methods, on MNIST"),
    "variance": (variance, "V/σ² of every sketch over training"),
    "weight-variance": (weight_variance, "the variance of dW against VCAS and WTA-CRS"),
    "pay": (pay, "accuracy against wall-clock and FLOPs"),
    "finetune": (finetune, "a second task with few of the rows"),
}


def add_commands(commands: Any) -> None:
    """Adds them to the subparsers of the command line; ``options.run(options)`` runs one."""
    for name, (module, text) in COMMANDS.items():
        parser: argparse.ArgumentParser = commands.add_parser(name, help=text)
        add = parser.add_argument
        add("--preset", default="smoke", choices=("smoke", "cpu"))
        add("--out", help=f"folder for figures, tables and page ({module.FOLDER})")
        add("--stored", action="store_true", help="measure nothing: page from stored results")
        add("--quiet", action="store_true", help="no progress on the screen")
        if module in (pay, finetune):
            tasks = pay.TASKS if module is pay else finetune.TRANSFERS
            add("--task", choices=tuple(tasks), help="only this one")
        if module is weight_variance:
            add("--trajectory", help="folder with the checkpoints of the ViT")
        if module is rows_mnist:
            add("--workers", type=int, default=2, help="processes; 0: in this one")
        parser.set_defaults(run=module.run)
