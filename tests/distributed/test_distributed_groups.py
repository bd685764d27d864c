"""Pipeline × DDP on four processes, and what happens when a rank dies or leaves a layer out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import sketchprop as sp
from distributed_helpers import block, data, of, outcome, run_once
from sketchprop.distributed import settings, share_draws_, sketch_stage_
from stack_helpers import equal

CPU = torch.device("cpu")
SECONDS = 8


def two_by_two(wrap: Callable[[nn.Module, Any], nn.Module], sketch: sp.Sketch | None) -> Any:
    """This rank's stage of one of two replicas, its schedule, and a step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    index = mesh["pp"].get_local_rank()
    module = block(index, last=index == 1)
    if sketch is not None:
        sp.sketch_(module, sketch, sp.select.everything)
    wrapped = wrap(module, mesh["dp"])
    group = mesh["pp"].get_group()
    stage: Any = PipelineStage(wrapped, index, 2, CPU, group=group)
    if sketch is not None:
        sketch_stage_(stage, sketch)
    schedule = Schedule1F1B(stage, 4, loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    for step in range(3):
        x, y = data(seed=step * 2 + mesh["dp"].get_local_rank())
        optimizer.zero_grad()
        schedule.step(*((x,) if index == 0 else ()), target=y if index == 1 else None)
        optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in wrapped.parameters()]
    return [p.detach().clone() for p in whole]


def ddp(module: nn.Module, mesh: Any) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group())


def fsdp(module: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(module, mesh=mesh)


def pipeline_times_data() -> dict[str, Any]:
    return {
        name: [two_by_two(wrap, sketch) for sketch in (None, sp.L1(1.0), sp.L1(0.25))]
        for name, wrap in (("ddp", ddp), ("fsdp", fsdp))
    }


@pytest.fixture(scope="module")
def four(tmp_path_factory, request) -> list[dict[str, Any]]:
    cases = (pipeline_times_data,)
    return run_once(tmp_path_factory, request, "four", 4, cases, seconds=120)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_two_by_two_at_budget_one_is_bitwise_plain(four, name) -> None:
    records = of(four, pipeline_times_data)
    for record in records:
        plain, one, sketched = record[name]
        assert equal(plain, one)
        assert not equal(plain, sketched)
        assert all(bool(p.isfinite().all()) for p in sketched)
    # Replicas of a stage agree: ranks 0 and 2, 1 and 3.
    for a, b in ((0, 2), (1, 3)):
        assert equal(records[a][name][2], records[b][name][2])


def pipeline_step(sketches: Callable[[int], sp.Sketch | None], die: int | None = None) -> None:
    rank = dist.get_rank()
    stage: Any = PipelineStage(block(rank, last=rank == 1), rank, 2, CPU)
    sketch = sketches(rank)
    if sketch is not None:
        sketch_stage_(stage, sketch)
    schedule = Schedule1F1B(stage, 2, loss_fn=F.cross_entropy)
    x, y = data()
    for step in range(2):
        if step == 1 and rank == die:
            os._exit(3)
        schedule.step(*((x,) if rank == 0 else ()), target=y if rank == 1 else None)


def timed(act: Callable[[], Any]) -> dict[str, Any]:
    started = time.monotonic()
    return {"error": outcome(act), "seconds": time.monotonic() - started}


class MaySkip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x if skip and i == 1 else layer(x)
        return x


def skipped_layer() -> dict[str, Any]:
    """Rank 1 leaves a layer out, and DDP was not told that it might."""

    def act() -> None:
        model = sp.sketch_(MaySkip(), sp.L1(0.25), sp.select.everything)
        wrapped = DistributedDataParallel(model)
        share_draws_(wrapped)
        for step in range(4):
            wrapped.zero_grad()
            skip = step == 2 and dist.get_rank() == 1
            wrapped(torch.randn(16, 8), skip).square().mean().backward()

    return timed(act)


def plain_neighbour() -> dict[str, Any]:
    """Only the sending stage is sketched; it need not be patient here."""
    settings.PATIENCE = timedelta(seconds=5)
    return timed(lambda: pipeline_step(lambda rank: sp.L1(0.25) if rank == 1 else None))


def dead_rank() -> dict[str, Any]:
    """Rank 1 dies before its second step."""
    return timed(lambda: pipeline_step(lambda rank: sp.L1(0.25), die=1))


@pytest.fixture(scope="module")
def faults(tmp_path_factory, request) -> dict[str, list[dict[str, Any]]]:
    """A group that has failed is of no use for the next case: each has its own processes."""
    return {
        case.__name__: run_once(
            tmp_path_factory, request, case.__name__, 2, (case,), seconds=SECONDS
        )
        for case in (skipped_layer, plain_neighbour, dead_rank)
    }


def test_a_layer_left_out_on_one_rank_is_an_error_within_the_timeout(faults) -> None:
    """DDP names the cause where the layer was left out; the other rank gives up waiting."""
    first, second = of(faults["skipped_layer"], skipped_layer)
    assert first["error"]
    assert "Expected to have finished reduction in the prior iteration" in second["error"]
    assert max(first["seconds"], second["seconds"]) < 4 * SECONDS


def test_a_neighbour_that_is_not_sketched_is_named(faults) -> None:
    first, second = of(faults["plain_neighbour"], plain_neighbour)
    assert second["error"].startswith("TimeoutError: stage 0 has not announced a sketch")
    assert first["error"]
    assert max(first["seconds"], second["seconds"]) < 6 * SECONDS


def test_a_rank_that_dies_is_an_error_on_the_other(faults) -> None:
    first, second = faults["dead_rank"]
    assert second == {}
    assert first["dead_rank"]["error"]
    assert first["dead_rank"]["seconds"] < 4 * SECONDS
