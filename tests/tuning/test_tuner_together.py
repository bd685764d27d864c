"""Tuner in two processes and beside torch.compile: all decide alike, or it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sketchprop as sp
from distributed_helpers import of, run_once
from measure_helpers import loss_fn, make_batches
from stack_helpers import BudgetClock, wide


def tuned() -> dict[str, Any]:
    """Each rank has its own batches, and its own clock: on one of them nothing is faster."""
    model, rank = wide(), dist.get_rank()
    slope = 32.0 if rank == 0 else 0.0
    tuner = sp.Tuner(model, loss_fn, share=1.0, clock=BudgetClock(model, rest=1, slope=slope))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(10 + rank)
    for batch in make_batches(40, rows=128):
        tuner(batch)
        optimizer.zero_grad()
        loss_fn(parallel, batch).backward()
        optimizer.step()
    log = [{k: v for k, v in entry.items() if k != "spent"} for entry in tuner.log]
    return {
        "budgets": tuner.budgets,
        "log": log,
        "weights": [p.detach() for p in model.parameters()],
    }


def lost() -> dict[str, Any]:
    """A probe that is not finite on one rank is ignored on all."""
    model = wide()

    def broken(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_fn(model, batch) * (float("nan") if dist.get_rank() else 1.0)

    tuner = sp.Tuner(model, broken, share=1.0, clock=BudgetClock(model))
    entries = [tuner(batch) for batch in make_batches(12)]
    return {"why": [entry["why"] for entry in entries if entry]}


@pytest.fixture(scope="module")
def results(tmp_path_factory, request) -> list[dict[str, Any]]:
    return run_once(tmp_path_factory, request, "tuned", 2, (tuned, lost))


def test_all_processes_decide_alike_from_what_each_has_seen(results) -> None:
    first, second = of(results, tuned)
    assert first["log"] == second["log"]
    assert len(first["log"]) >= 2
    assert min(first["budgets"].values()) < 1  # the mean of the two clocks is faster
    for a, b in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(a, b)


def test_a_probe_that_is_lost_anywhere_is_ignored_everywhere(results) -> None:
    for record in of(results, lost):
        assert record["why"]
        assert all("not finite" in why for why in record["why"])


def test_compiled_models_are_refused_with_a_way_out() -> None:
    compiled = torch.compile(wide(), backend="eager")
    with pytest.raises(ValueError, match=r"torch.compile\(plain\)"):
        sp.Tuner(compiled, loss_fn)
    model = wide()
    model[2].compile(backend="eager")
    with pytest.raises(ValueError, match=r"torch.compile\(plain\)"):
        sp.Tuner(model, loss_fn)


def test_the_plain_model_is_tuned_while_its_compiled_form_trains() -> None:
    torch._dynamo.reset()
    plain = wide()
    compiled = torch.compile(plain, backend="aot_eager")
    clock = BudgetClock(plain, rest=1, slope=16)
    tuner = sp.Tuner(plain, loss_fn, share=1.0, clock=clock)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    kept = []
    for x, y in make_batches(30, rows=256):
        tuner((x, y))
        optimizer.zero_grad()
        F.cross_entropy(compiled(x), y).backward()
        optimizer.step()
        kept.append(plain[0].sketch.budget)
    assert kept[0] == 1.0
    assert min(kept) < 0.5
    assert len(set(kept)) == len({entry["budgets"]["0"] for entry in tuner.log} | {1.0})
    # The graph follows: at its budget the compiled gradient is not the exact one.
    x, y = make_batches(1, rows=256)[0]

    def gradient(model: nn.Module) -> torch.Tensor:
        return torch.autograd.grad(F.cross_entropy(model(x), y), plain[0].weight)[0]

    with sp.exact(plain):
        exact = gradient(plain)
    assert not torch.allclose(gradient(compiled), exact)
