"""Blocks on kept tokens under DDP and FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import sketchprop as sp
from distributed_helpers import run_once
from sketchprop import Tokens
from sketchprop.layers.depth import shares_of
from sketchprop.zoo import ViT
from stack_helpers import Z_LIMIT, blocks, equal, gradients, largest_z

WORLD, DRAWS = 2, 60


def vit() -> ViT:
    torch.manual_seed(0)
    return ViT(16, 4, 3, 16, depth=2, heads=2, hidden=24, classes=3)


def pictures(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 16, 16, generator=generator), torch.tensor([0, 1, 2, 0])


def step_gradients(model: nn.Module, seed: int) -> list[Tensor]:
    """One backward pass on this rank's own batch and draw."""
    x, labels = pictures(dist.get_rank() + 1)
    loss = lambda: F.cross_entropy(model(x), labels)  # noqa: E731
    grads = gradients(model.parameters(), loss, seed * WORLD + dist.get_rank())
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]


def shard(model: Any) -> nn.Module:
    """A group for each block: its weights are freed after forward and gathered in backward."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)


def compare(wrap: Any) -> dict[str, Any]:
    model = wrap(sp.sketch_(vit(), Tokens(0.4)))
    with sp.exact(model):
        truth = step_gradients(model, 0)
    return {
        "blocks": len(blocks(model)),
        "truth": truth,
        "one draw": step_gradients(model, 0),
        "z": largest_z(truth, lambda k: step_gradients(model, k), DRAWS),
        "shares": shares_of(model),
    }


def ddp() -> dict[str, Any]:
    return compare(DistributedDataParallel)


def fsdp() -> dict[str, Any]:
    return compare(shard)


def dropped() -> dict[str, list[float]]:
    """Each rank leaves out a block of its own, as layer drop does."""
    model = sp.sketch_(vit(), Tokens(0.4))
    model.blocks[dist.get_rank()].forward = lambda x: x
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    step_gradients(wrapped, 0)
    return shares_of(model)


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, Any]]:
    return run_once(tmp_path_factory, request, "blocks", WORLD, (ddp, fsdp, dropped))


@pytest.mark.parametrize("case", ["ddp", "fsdp"])
def test_data_parallelism_sees_the_gradients_of_blocks(
    results: list[dict[str, Any]], case: str
) -> None:
    for rank in results:
        found = rank[case]
        assert isinstance(found, dict), found
        assert found["blocks"] == 2
        assert not equal(found["truth"], found["one draw"])
        assert found["z"] < Z_LIMIT
    assert equal(results[0][case]["one draw"], results[1][case]["one draw"])
    shares = [rank[case]["shares"] for rank in results]
    assert shares[0] == shares[1]
    assert bool(shares[0]) == (case == "ddp")  # sharded weights cannot be measured: even


def test_processes_that_ran_different_blocks_have_the_same_budgets(
    results: list[dict[str, Any]],
) -> None:
    first, second = (rank["dropped"] for rank in results)
    assert first == second
    assert set(first) == {"blocks.0", "blocks.1"}
