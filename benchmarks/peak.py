"""Peak memory of a training step, and the largest batch that fits: a fresh process for each.

What a step needs above model, gradients and batch: the high-water mark of the resident memory
over two steps, less what was resident before. Large blocks go back to the system at once
(MALLOC_MMAP_THRESHOLD_), so that the mark is that of living tensors.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import sketchprop as sp
from sketchprop.layers import SketchedModule
from sketchprop.meters.cost.memory import saved_bytes
from sketchprop.sketches import ForwardRows
from sketchprop.zoo import Bert, ViT, mlp

from .timing import PINNED

HERE = "benchmarks.peak"
BUDGET = 0.1
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Under these the C allocator gives large blocks back as soon as they are free."""
METHODS = ("exact", "checkpointing", "ForwardRows", "checkpointing + ForwardRows", "Tokens")
TOKENS = sp.Tokens(0.2, queries=0.2, keys=0.2, save="input", share="even")
GRAIN = 16
"""The largest batch is looked for in sixteenths of the given one."""


def _gelu_mlp() -> nn.Sequential:
    model = mlp(784, 1024, 1024, 1024, 10)
    layers = [nn.GELU() if isinstance(part, nn.ReLU) else part for part in model]
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]], int]] = {
    "MLP 784-1024-1024-1024-10, ReLU": (
        lambda: mlp(784, 1024, 1024, 1024, 10),
        lambda size: (torch.randn(size, 784), torch.randint(0, 10, (size,))),
        4096,
    ),
    "MLP 784-1024-1024-1024-10, GELU": (
        _gelu_mlp,
        lambda size: (torch.randn(size, 784), torch.randint(0, 10, (size,))),
        4096,
    ),
    "ViT 96 × 4": (
        ViT,
        lambda size: (torch.randn(size, 3, 32, 32), torch.randint(0, 10, (size,))),
        128,
    ),
    "ViT 192 × 9": (
        lambda: ViT(dim=192, depth=9, heads=12, hidden=1024),
        lambda size: (torch.randn(size, 3, 32, 32), torch.randint(0, 10, (size,))),
        64,
    ),
    "BERT-like 96 × 4": (
        Bert,
        lambda size: (torch.randint(0, 1000, (size, 64)), torch.randint(0, 1000, (size, 64))),
        128,
    ),
}
SMALL = 16
"""Divides the batch for a quick trial."""


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _batch_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss_of(model(batch[0]), batch[1])


def prepare(name: str, method: str) -> tuple[nn.Module, Callable[[Tensor, Tensor], object]]:
    """A model, and one backward pass of it by ``method``."""
    torch.manual_seed(0)
    model = MODELS[name][0]()
    if "ForwardRows" in method:
        sp.sketch_(model, ForwardRows(BUDGET))
    if method == "Tokens":
        sp.sketch_(model, TOKENS)
    if "checkpointing" in method:
        checkpoint_(model)

    def backward(x: Tensor, y: Tensor) -> object:
        return loss_of(model(x), y).backward()

    return model, backward


def checkpoint_(model: nn.Module) -> None:
    """Each transformer block, or each half of a plain stack, is computed again in backward."""
    if isinstance(model, nn.Sequential):
        model.forward = _on_sequence(list(model))  # type: ignore[method-assign, assignment]
        return
    for module in model.modules():
        if type(module).__name__ in ("Block", "BertLayer"):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]


def _on_sequence(parts: list[nn.Module]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        out: Tensor = checkpoint_sequential(parts, 2, x, use_reentrant=False)
        return out

    return forward


def resident(field: str = "VmRSS") -> int:
    """Bytes, from the kernel; ``VmHWM`` is the high-water mark."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError(f"{field} is not in /proc/self/status; this needs Linux")
    return 1024 * int(found[1])


def step_peak(name: str, method: str, size: int) -> int:
    """Bytes that two steps need above what was there before, in this process."""
    torch.set_num_threads(1)
    model, backward = prepare(name, method)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    make = MODELS[name][1]
    small = make(max(2, round(1 / BUDGET)))
    backward(*small)  # loads code, makes .grad
    optimizer.step()
    batch = make(size)
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the mark starts anew
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        backward(*batch)
        optimizer.step()
    return resident("VmHWM") - before


def in_fresh_process(module: str, *words: object) -> Any:
    """What ``python -m module`` writes as JSON, where freed blocks are returned."""
    call = [sys.executable, "-m", module, *map(str, words)]
    own = {name: value for name, value in os.environ.items() if name not in PINNED} | RETURNED
    done = subprocess.run(call, check=False, env=own, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(call)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def largest_batch(peak: Callable[[int], int], limit: int, size: int, at_size: int) -> int:
    """The largest batch, in steps of ``size / GRAIN``, whose step stays within ``limit`` bytes.

    Memory is nearly linear in the batch: the first guess is close, then one step at a time.
    """
    grain = max(1, size // GRAIN)

    def rounded(wanted: float) -> int:
        return max(grain, int(wanted / grain) * grain)

    known = {size: at_size}

    def measured(batch: int) -> int:
        if batch not in known:
            known[batch] = peak(batch)
        return known[batch]

    guess = rounded(size * limit / max(1, at_size))
    # A second point gives the part that does not depend on the batch.
    if guess != size:
        slope = (measured(guess) - at_size) / (guess - size)
        guess = rounded(size + (limit - at_size) / slope) if slope > 0 else guess
    while guess > grain and measured(guess) > limit:
        guess -= grain
    while measured(guess + grain) <= limit:
        guess += grain
    return guess


def saved_shares(name: str, size: int) -> dict[str, float]:
    """What ForwardRows leaves of the linear inputs, and of all that is saved for backward."""
    model, _ = prepare(name, "ForwardRows")
    batch = MODELS[name][1](size)
    names = [n for n, m in model.named_modules() if isinstance(m, SketchedModule)]
    with sp.exact(model):
        exact = saved_bytes(model, _batch_loss, batch)
    kept = saved_bytes(model, _batch_loss, batch)
    inputs = [sum(x.saved for x in r.layers if x.layer in names) for r in (kept, exact)]
    return {"linear inputs": inputs[0] / inputs[1], "all saved": kept.total / exact.total}


def peaks(
    names: list[str], small: bool, methods: tuple[str, ...] = METHODS
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for each model and method, and what ForwardRows leaves saved in each model."""
    rows, shares = [], []
    for name in names:
        size = max(GRAIN, MODELS[name][2] // (SMALL if small else 1))
        if "ForwardRows" in methods:
            shares.append({"model": name, **saved_shares(name, size)})
        exact = in_fresh_process(HERE, name, "exact", size)
        for method in methods:
            if method == "Tokens" and name.startswith("MLP"):
                continue
            peak = partial(in_fresh_process, HERE, name, method)
            found = exact if method == "exact" else peak(size)
            most = size if method == "exact" else largest_batch(peak, exact, size, found)
            rows.append(
                {
                    "model": name,
                    "method": method,
                    "batch": size,
                    "peak MB": found / 1e6,
                    "of exact": found / exact,
                    "largest batch": most,
                    "times": most / size,
                }
            )
    return rows, shares


TITLE = """# Memory, measured

Written by `python -m benchmarks page` from `peak*.json` and `limits*.json` in `benchmarks/results`.
"""
HEAD = """## What a step needs, and the largest batch

The most that a training step (forward, backward, SGD) needs above model, gradients and batch: the
high-water mark of the resident memory, each in a fresh process, with an allocator that returns
large blocks at once. `ForwardRows` keeps 0.1 of the rows. Checkpointing computes each transformer
block again, of an MLP each half. The largest batch, in sixteenths of the given one, is that whose
step needs no more than the exact step needs at the given batch.
"""


def page(results: Sequence[dict[str, Any]], sections: Sequence[str]) -> str:
    """docs/results/memory.md, what documents need before the rest."""
    rows = [row for stored in results for row in stored["rows"]]
    parts = [TITLE, *sections, HEAD]
    if any(row["method"] == "Tokens" for row in rows):
        parts[-1] += f"`Tokens`: `{TOKENS!r}`.\n"
    for stored in results:
        machine = stored["machine"]
        parts.append(f"- `{stored['command']}` on {machine['cpu']}, torch {machine['torch']}.")
    parts += ["", "| model | method | batch | peak MB | of exact | largest batch | times exact's |"]
    parts += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [row["model"], row["method"], str(row["batch"]), f"{row['peak MB']:.1f}"]
        cells += [f"{row['of exact']:.2f}", str(row["largest batch"])]
        parts.append("| " + " | ".join([*cells, f"{row['times']:.2f}"]) + " |")
    parts += ["", "## What is saved for backward with `ForwardRows(0.1)`, as a share of exact", ""]
    parts += ["| model | inputs of the linear layers | limit | all that is saved |"]
    parts += ["|---|---|---|---|"]
    for share in (share for stored in results for share in stored["shares"]):
        inputs = f"{share['linear inputs']:.3f}"
        inputs = inputs if share["linear inputs"] <= 1.1 * BUDGET else f"**{inputs}**"
        cells = [share["model"], inputs, f"{1.1 * BUDGET:.2f}", f"{share['all saved']:.3f}"]
        parts.append("| " + " | ".join(cells) + " |")
    parts += ["", NOTE]
    return "\n".join(parts)


NOTE = """A ReLU keeps its own output, which is the next layer's input: there the rows that
`ForwardRows` saves come on top, and nothing is freed. Behind GELU, LayerNorm and attention the
input was kept by the linear layer alone. A peak also holds what backward makes.
"""


if __name__ == "__main__":
    sys.stdout.write(json.dumps(step_peak(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
