"""Where a step on kept tokens spends what it takes above forward + budget × backward.

torch's profiler counts the time of each operation by itself; operations are grouped by what they
do. Exact and sketched steps run in turns. The profiler makes small operations dearer than they
are, so that this says where time goes, and ``python -m benchmarks tokens`` how much it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from .tokens import MODELS, TARGETS, Budgets, loss_of, prepared

GROUPS = {
    "products": ("mm", "addmm", "bmm", "baddbmm"),
    "attention": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "norms": ("native_layer_norm", "native_layer_norm_backward"),
    "activations": ("gelu", "gelu_backward"),
    "rows moved": ("index_select", "index_add_", "scatter_add_", "index_copy_", "gather", "cat"),
    "sums and copies": ("add", "add_", "copy_", "mul", "mul_", "sum", "fill_", "zero_"),
}
REST = "draws, Python, the rest"
ALL = "all"
Times = dict[str, float]


class Pass(NamedTuple):
    """Seconds of forward and of backward, by group."""

    forward: Times
    backward: Times


def profiles(names: list[str], steps: int) -> list[dict[str, Any]]:
    """A row for each group of operations of each model and budgets, in shares of the exact step."""
    rows: list[dict[str, Any]] = []
    for name in names:
        for budgets in TARGETS[name]:
            rows += _rows(name, budgets, steps)
    return rows


def _rows(name: str, budgets: Budgets, steps: int) -> Iterator[dict[str, Any]]:
    exact, kept = Pass({}, {}), Pass({}, {})
    work = [(exact, *prepared(name)), (kept, *prepared(name, budgets.sketch()))]
    for _, model, inputs in work:
        _add(Pass({}, {}), model, inputs)
    for _ in range(steps):
        for found, model, inputs in work:
            _add(found, model, inputs)
    whole = exact.forward[ALL] + exact.backward[ALL]
    share = MODELS[name].left(budgets)
    for group in (*GROUPS, REST, ALL):
        before, after = (t.get(group, 0.0) / whole for t in exact)
        now, back = (t.get(group, 0.0) / whole for t in kept)
        yield {
            "model": name,
            "budgets": str(budgets),
            "operations": group,
            "exact forward": before,
            "exact backward": after,
            "kept forward": now,
            "kept backward": back,
            "above the floor": now + back - before - share * after,
        }


def _add(found: Pass, model: nn.Module, inputs: Tensor) -> None:
    """One step, forward and backward each by itself."""
    labels = torch.zeros(inputs.shape[0], dtype=torch.int64)
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as forward:
        loss = loss_of(model(inputs), labels)
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    for times, run in zip(found, (forward, backward), strict=True):
        for event in run.key_averages():
            seconds = event.self_cpu_time_total / 1e6
            for group in (_group(event.key), ALL):
                times[group] = times.get(group, 0.0) + seconds


def _group(operation: str) -> str:
    name = operation.removeprefix("aten::")
    return next((group for group, names in GROUPS.items() if name in names), REST)
