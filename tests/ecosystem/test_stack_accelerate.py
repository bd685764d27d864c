"""accelerate, unchanged: ``prepare`` a sketched model, or sketch a prepared one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sketchprop as sp
from stack_helpers import batch, equal, net


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Accelerator's settings are global to a process, and other tests make Accelerators too."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def run(model: nn.Module, sketch_after: sp.Sketch | None = None) -> list[Tensor]:
    """Three accumulated, clipped steps in an Accelerator's bfloat16."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    loader = DataLoader(TensorDataset(*batch(rows=48)), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if sketch_after is not None:
        sp.sketch_(model, sketch_after)
    torch.manual_seed(0)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in accelerator.unwrap_model(model).parameters()]


def test_before_and_after_prepare_are_the_same_sketched_run() -> None:
    sketched = run(sp.sketch_(net(dropout=0.2), sp.L1(0.3)))
    assert equal(sketched, run(net(dropout=0.2), sp.L1(0.3)))
    assert not equal(sketched, run(net(dropout=0.2)))
    assert all(bool(p.isfinite().all()) for p in sketched)


@pytest.mark.parametrize("hook_first", [True, False])
def test_layers_behind_hooks_are_sketched(hook_first: bool) -> None:
    """A hook keeps the forward it found: it must be the one of the layer's class now."""
    model = net()
    if hook_first:
        add_hook_to_module(model[0], ModelHook())
    sp.sketch_(model, sp.L1(2))
    if not hook_first:
        add_hook_to_module(model[0], ModelHook())
    x, y = batch()

    def rows() -> int:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        return int((model[0].weight.grad.abs().sum(1) > 0).sum())

    assert rows() == 2
    sp.unsketch_(model)
    assert rows() == len(model[0].weight)
    batches = [(x, y), (x.flip(0), y)]
    sp.measure(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batches, sp.L1(2), draws=2)
    assert rows() == len(model[0].weight)  # the hook has its forward back
