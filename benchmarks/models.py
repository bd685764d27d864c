"""Whole training steps: forward, backward and optimizer, exact and sketched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

import sketchprop as sp
from sketchprop.core.allocator import keep_pages
from sketchprop.zoo import ViT, mlp

from .results import Line
from .timing import PINNED, interleave

Step = Callable[[], object]


def _mlp() -> tuple[nn.Module, torch.Tensor, Callable[[nn.Module], torch.optim.Optimizer]]:
    return mlp(784, 1024, 1024, 1024, 10), torch.randn(256, 784), _sgd


def _small() -> tuple[nn.Module, torch.Tensor, Callable[[nn.Module], torch.optim.Optimizer]]:
    return mlp(784, 64, 64, 10), torch.randn(128, 784), _sgd


def _vit(
    dropout: float,
) -> tuple[nn.Module, torch.Tensor, Callable[[nn.Module], torch.optim.Optimizer]]:
    model = ViT(dim=192, depth=9, heads=12, hidden=1024, dropout=dropout)
    return model, torch.randn(128, 3, 32, 32), _adamw


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05, fused=True)


MODELS = {
    "MLP 784-1024-1024-1024-10": (_mlp, 0.56),
    "ViT 192 × 9": (lambda: _vit(0.0), 0.66),
    "ViT 192 × 9, dropout 0.1": (lambda: _vit(0.1), 0.74),
    "MLP 784-64-64-10": (_small, None),
}


def _training(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor, torch.optim.Optimizer]:
    """The same weights and the same batch each time."""
    torch.manual_seed(0)
    model, x, optimizer_of = MODELS[name][0]()
    return model, x, torch.randint(0, 10, (x.shape[0],)), optimizer_of(model)


def step(name: str, sketch: sp.Sketch | None, compiled: bool = False) -> Step:
    """A closure that runs one training step of one of ``MODELS``."""
    model, x, y, optimizer = _training(name)
    if sketch is not None:
        sp.sketch_(model, sketch)
    run: Callable[[torch.Tensor], torch.Tensor] = torch.compile(model) if compiled else model

    def once() -> None:
        optimizer.zero_grad()
        F.cross_entropy(run(x), y).backward()
        optimizer.step()

    return once


ROW_TARGETS = {"MLP 784-1024-1024-1024-10": 0.60, "ViT 192 × 9": 0.66}
"""What whole samples at budget 0.1 shall reach."""


def rows_step(name: str, budget: float) -> Step:
    """Whole samples by importance in every layer: one draw at the head serves all below."""
    model, x, y, optimizer = _training(name)
    sp.sketch_(model, sp.Rows(budget, unit="sample"), sp.select.everything)

    def once() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return once


def models(
    names: list[str], budgets: list[float], seconds: float, compiled: bool
) -> Iterator[Line]:
    for name in names:
        targets = {"L1": MODELS[name][1], "Rows": ROW_TARGETS.get(name)}
        for budget in budgets:
            work = {"exact": step(name, None), "L1": step(name, sp.L1(budget))}
            work["SampleMask"] = step(name, sp.SampleMask(budget))
            work["Rows"] = rows_step(name, budget)
            if compiled:
                work["exact, compiled"] = step(name, None, True)
                work["L1, compiled"] = step(name, sp.L1(budget), True)
            measured = interleave(work, seconds=seconds * len(work))
            for method in list(work)[1:]:
                goal = targets.get(method) if budget == 0.1 else None
                yield Line(name, method, budget, measured[method], None, goal)


ALLOCATORS = {"default": {}, "environment": PINNED, "keep_pages": {}}


def memory(
    names: list[str], budget: float, seconds: float, threads: int
) -> list[dict[str, object]]:
    """Step times and peak memory under three allocator settings, each in a fresh process."""
    rows = []
    for name in names:
        for allocator, settings in ALLOCATORS.items():
            clean = {k: v for k, v in os.environ.items() if k not in PINNED}
            call = [sys.executable, "-m", "benchmarks.models", name, allocator]
            call += [str(budget), str(seconds), str(threads)]
            done = subprocess.run(
                call, check=False, env={**clean, **settings}, capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(f"{' '.join(call)} failed:\n{done.stderr}")
            rows.append({"model": name, "allocator": allocator, **json.loads(done.stdout)})
    return rows


def _one_process(name: str, allocator: str, budget: float, seconds: float, threads: int) -> None:
    import resource

    if allocator == "keep_pages":
        keep_pages()
    torch.set_num_threads(threads)
    work = {"exact": step(name, None), "L1": step(name, sp.L1(budget))}
    measured = interleave(work, seconds=seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF)
    print(  # noqa: T201
        json.dumps(
            {
                "exact_ms": measured["exact"].milliseconds,
                "sketched_ms": measured["L1"].milliseconds,
                "ratio": measured["L1"].median,
                "page_faults": peak.ru_minflt,
                "peak_mb": peak.ru_maxrss / 1024,
            }
        )
    )


if __name__ == "__main__":
    _one_process(sys.argv[1], sys.argv[2], *map(float, sys.argv[3:5]), int(sys.argv[5]))
