"""DDP, FSDP2 and tensor parallelism on two gloo processes.

The processes start once and run every case; each test reads what its case recorded. A case that
fails or hangs (gloo gives up after a minute) is recorded as its traceback, for its own test only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import sketchprop as sp
from distributed_helpers import of, run_once
from sketchprop.layers import SketchedLinear
from stack_helpers import Z_LIMIT, batch, equal, gradients, largest_z, net

WORLD = 2
DRAWS = 100


def whole(tensors: list[Tensor]) -> list[Tensor]:
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]


def step_gradients(model: nn.Module, seed: int) -> list[Tensor]:
    """One backward pass on this rank's own batch and draw."""
    x, y = batch(seed=dist.get_rank() + 1)
    seed = seed * WORLD + dist.get_rank()
    loss = lambda: F.cross_entropy(model(x).float(), y)  # noqa: E731
    return whole(gradients(model.parameters(), loss, seed))


def trained(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        step_gradients(model, step)
        optimizer.step()
    return whole([p.detach() for p in model.parameters()])


def compare(wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """A wrapped plain model, budget 1.0 and budget 0.3: what data parallelism owes."""
    sketched = wrap(sp.sketch_(net(), sp.L1(0.3)))
    with sp.exact(sketched):
        truth = step_gradients(sketched, 0)
    return {
        "plain": trained(wrap(net(dropout=0.2))),
        "budget 1": trained(wrap(sp.sketch_(net(dropout=0.2), sp.L1(1.0)))),
        "truth": truth,
        "plain truth": step_gradients(wrap(net()), 0),
        "one draw": step_gradients(sketched, 0),
        "z": largest_z(truth, lambda k: step_gradients(sketched, k), DRAWS),
        "keys": list(sketched.state_dict()) == list(wrap(net()).state_dict()),
    }


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Each stage its own group: weights are freed after forward and gathered again in backward."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model:
        if isinstance(layer, nn.Linear) and layer.out_features != 4:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, **options)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True, **options)


def shard_whole(model: nn.Module, **options: Any) -> nn.Module:
    """One group: its layers keep their own class, so they can be sketched afterwards too."""
    return fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)), **options)


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def ddp() -> dict[str, Any]:
    return compare(DistributedDataParallel)


def fsdp_mixed_precision() -> dict[str, Any]:
    """Sketched afterwards here: the layers of one group keep their own class."""
    out = compare(lambda model: shard_whole(model, mp_policy=HALF))
    after = shard_whole(net(dropout=0.2), mp_policy=HALF)
    return {**out, "budget 1": trained(sp.sketch_(after, sp.L1(1.0)))}


def fsdp_layer_by_layer() -> dict[str, Any]:
    return compare(shard)


def tensor_parallel() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (WORLD,))
    plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    x, y = batch()

    def model(sketch: sp.Sketch | None) -> nn.Module:
        new = net()
        if sketch is not None:
            sp.sketch_(new, sketch)
        return parallelize_module(new, mesh, plan)

    def run(m: nn.Module) -> list[Tensor]:
        loss = lambda: F.cross_entropy(m(x), y)  # noqa: E731
        return whole(gradients(m.parameters(), loss, 0))

    def error(sketch: sp.Sketch) -> str:
        try:
            run(model(sketch))
        except Exception as problem:
            return f"{type(problem).__name__}: {problem}"
        return ""

    # What the error advises: the plain layer is sketched (here with budget 1.0), the others not.
    filtered = model(None)
    sp.sketch_(filtered, sp.L1(1.0), lambda module, name: not hasattr(module.weight, "placements"))
    assert [type(m) is SketchedLinear for m in (filtered[0], filtered[3], filtered[5])] == [
        False,
        False,
        True,
    ]
    sketched = model(sp.L1(0.3))
    with sp.exact(sketched):
        exact = run(sketched)
    with torch.no_grad():
        evaluated = sketched.eval()(x)
    return {
        "plain": run(model(None)),
        "budget 1": run(model(sp.L1(1.0))),
        "exact": exact,
        "eval": evaluated,
        "plain eval": model(None).eval()(x).detach(),
        "filtered": run(filtered),
        "errors": [error(s) for s in (sp.L1(0.3), sp.SampleMask(0.3), sp.Diagonal(4))],
    }


CASES = (ddp, fsdp_mixed_precision, fsdp_layer_by_layer, tensor_parallel)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request) -> list[dict[str, Any]]:
    return run_once(tmp_path_factory, request, "ranks", WORLD, CASES)


DATA_PARALLEL = pytest.mark.parametrize(
    "case", [ddp, fsdp_mixed_precision, fsdp_layer_by_layer], ids=lambda c: c.__name__
)


@DATA_PARALLEL
def test_budget_one_trains_bitwise_like_the_plain_model(results, case) -> None:
    first, second = of(results, case)
    for record in (first, second):
        assert equal(record["plain"], record["budget 1"])
        assert equal(record["plain truth"], record["truth"])
    assert equal(first["plain"], second["plain"])
    assert not equal(first["plain"], [p.detach() for p in net().parameters()])


@DATA_PARALLEL
def test_the_mean_is_the_exact_gradient(results, case) -> None:
    """z ≤ 5 over 100 draws, each rank with its own; ranks agree on what they have reduced."""
    for record in of(results, case):
        assert record["z"] <= Z_LIMIT


@DATA_PARALLEL
def test_ranks_agree_and_keys_stay(results, case) -> None:
    first, second = of(results, case)
    assert equal(first["one draw"], second["one draw"])
    assert not equal(first["one draw"], first["truth"])
    assert first["keys"]
    assert second["keys"]


def test_tensor_parallel_is_exact_where_nothing_is_dropped(results) -> None:
    for record in of(results, tensor_parallel):
        assert equal(record["plain"], record["budget 1"])
        assert equal(record["plain"], record["exact"])
        assert equal(record["plain"], record["filtered"])
        assert torch.equal(record["plain eval"], record["eval"])


def test_tensor_parallel_is_refused_where_something_is(results) -> None:
    for record in of(results, tensor_parallel):
        for error in record["errors"]:
            assert error.startswith("NotImplementedError")
            assert "DTensor" in error
            assert "filter_fn" in error
