"""Sketched stage boundaries on torch's own schedules: two gloo processes run every case once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)

import sketchprop as sp
from distributed_helpers import block, data, of, outcome, run_once
from sketchprop.distributed import sketch_stage_
from sketchprop.sketches import Every, Planner
from stack_helpers import Z_LIMIT, equal, largest_z

CPU = torch.device("cpu")
CHUNKS = 4
STEPS = 3
DRAWS = 100
SCHEDULES: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBV": ScheduleZBVZeroBubble,
}
Build = Callable[[nn.Module, int, int], Any]


def plain(module: nn.Module, index: int, count: int) -> PipelineStage:
    return PipelineStage(module, index, count, CPU)


def sketched(sketch: sp.Sketch) -> Build:
    return lambda *place: sketch_stage_(plain(*place), sketch)


class Pipe:
    """This rank's stages of one pipeline, and its schedule."""

    def __init__(
        self,
        name: str,
        build: Build,
        layers: sp.Sketch | None = None,
        dropout: float = 0.0,
        chunks: int = CHUNKS,
        planner: Planner | None = None,
    ) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        single = name in ("GPipe", "1F1B")
        count = world if single else 2 * world
        mine = [rank] if single else [rank, rank + world]
        if name == "ZBV":
            mine = [rank, count - 1 - rank]
        self.modules = [block(i, last=i == count - 1) for i in mine]
        if layers is not None:
            for module in self.modules:
                sp.sketch_(module, layers, sp.select.everything, planner=planner)
        if dropout:
            self.modules = [nn.Sequential(m, nn.Dropout(dropout)) for m in self.modules]
        self.stages = [build(m, i, count) for m, i in zip(self.modules, mine, strict=True)]
        self.first, self.last = 0 in mine, count - 1 in mine
        given = self.stages[0] if single else self.stages
        self.schedule = SCHEDULES[name](given, chunks, loss_fn=F.cross_entropy)

    def parameters(self) -> list[nn.Parameter]:
        return [p for m in self.modules for p in m.parameters()]

    def step(self, seed: int = 0) -> list[Tensor]:
        """One step on a fixed batch; the gradients of this rank's parameters."""
        x, y = data()
        for p in self.parameters():
            p.grad = None
        torch.manual_seed(seed)
        inputs = (x,) if self.first else ()
        self.schedule.step(*inputs, target=y if self.last else None)
        return [p.grad.clone() for p in self.parameters()]

    def trained(self) -> list[Tensor]:
        """A hundred steps of one schedule, a few of the others."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        for seed in range(100 if isinstance(self.schedule, Schedule1F1B) else STEPS):
            self.step(seed)
            optimizer.step()
        return [p.detach().clone() for p in self.parameters()]


def budget_one() -> dict[str, Any]:
    """Every schedule: plain stages against sketched ones that keep everything, with dropout."""
    out: dict[str, Any] = {"start": [p.detach() for p in Pipe("ZBV", plain).parameters()]}
    for name in SCHEDULES:
        one = sp.L1(1.0)
        out[name] = (
            Pipe(name, plain, dropout=0.1).trained(),
            Pipe(name, sketched(one), one, dropout=0.1).trained(),
        )
    return out


def traced_stages(change: Callable[[Any], Any]) -> list[Tensor]:
    """A model cut by torch's tracing front end, each stage changed in place."""
    torch.manual_seed(0)
    model = nn.Sequential(*block(0), *block(1, last=True))
    x, y = data()
    pipe = pipeline(model, mb_args=(x[: len(x) // CHUNKS],), split_spec={"3": SplitPoint.BEGINNING})
    stage = change(pipe.build_stage(dist.get_rank(), CPU))
    schedule = Schedule1F1B(stage, CHUNKS, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        schedule.step(*((x,) if stage.is_first else ()), target=y if stage.is_last else None)
        optimizer.step()
    return [p.detach().clone() for p in stage.submod.parameters()]


def in_place() -> dict[str, Any]:
    """Plain stages changed afterwards, and once more with another sketch."""

    def changed(module: nn.Module, index: int, count: int) -> Any:
        return sketch_stage_(plain(module, index, count), sp.L1(0.25))

    pipe = Pipe("1F1B", changed)
    sent = []
    for sketch in (None, sp.Rows(0.5), sp.L1(1.0)):
        if sketch is not None:
            sketch_stage_(pipe.stages[0], sketch)
        pipe.step()
        sent.append(pipe.stages[0].counter.take().total.ratio)
    return {"class": type(pipe.stages[0]).__name__, "sent": sent}


def traced() -> dict[str, Any]:
    return {
        "plain": traced_stages(lambda stage: stage),
        "one": traced_stages(lambda stage: sketch_stage_(stage, sp.L1(1.0))),
        "sketched": traced_stages(lambda stage: sketch_stage_(stage, sp.L1(0.25))),
    }


def unbiased() -> dict[str, Any]:
    """Largest z over all of this rank's gradients, boundary sketched."""
    out: dict[str, Any] = {}
    for name, more in (("GPipe", sp.GradientSVD(0.25)), ("1F1B", sp.Rows(0.1))):
        truth = Pipe(name, plain, chunks=2).step()
        for sketch in (sp.L1(0.1), more):
            pipe = Pipe(name, sketched(sketch), chunks=2)
            out[f"{name} {sketch!r}"] = largest_z(truth, pipe.step, DRAWS)
    # Layers and boundary together, in schedules that call a layer's backward twice; all ranks
    # have the same seed.
    for name in ("ZBV", "InterleavedZeroBubble"):
        pipe = Pipe(name, sketched(sp.L1(0.3)), sp.L1(0.3), chunks=2)
        out[f"{name} layers"] = largest_z(Pipe(name, plain, chunks=2).step(), pipe.step, DRAWS)
    return out


def fresh_draws() -> dict[str, Any]:
    exact, noisy = Pipe("1F1B", plain), Pipe("1F1B", sketched(sp.L1(0.25)))
    return {"plain": exact.step(), "sketched": noisy.step(), "again": noisy.step()}


def wire_bytes() -> dict[str, Any]:
    """Batch 32, 128 tokens, width 256, float32: bytes of a step's backward messages."""
    rank = dist.get_rank()
    out: dict[str, Any] = {}
    for sketch in (sp.L1(0.1), sp.Rows(0.05), sp.L1(1.0)):
        stage = sketched(sketch)(nn.Linear(256, 256), rank, 2)
        schedule = ScheduleGPipe(stage, 4, loss_fn=F.mse_loss)
        x = torch.zeros(32, 128, 256)
        schedule.step(*((x,) if rank == 0 else ()), target=x if rank == 1 else None)
        out[repr(sketch)] = stage.counter.take()
        out["after"] = stage.counter.take()
    return out


class Unused(nn.Module):
    """Ignores its input: its gradient is None."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.own + x.detach()[:, :4].sum() * 0


def no_gradient() -> dict[str, Any]:
    """The second stage does not use its input: zeros are sent, and nothing hangs."""
    rank = dist.get_rank()
    module = block(0) if rank == 0 else Unused()
    stage = sketched(sp.L1(0.25))(module, rank, 2)
    schedule = ScheduleGPipe(stage, CHUNKS, loss_fn=F.cross_entropy)
    x, y = data()
    schedule.step(*((x,) if rank == 0 else ()), target=y if rank == 1 else None)
    return {"grads": [p.grad for p in module.parameters()]}


def inference() -> dict[str, Any]:
    """Shapes are inferred on uninitialised memory: layers remember no atoms from it."""
    pipe = Pipe("1F1B", sketched(sp.L1(0.25)), sp.L1(0.25), planner=Every(1000))
    planner = pipe.modules[0][0].sketching.planner
    uses = lambda: sum(times for _, times, _ in planner._known.values())  # noqa: E731
    seen: list[int] = []
    forget = planner.forget
    planner.forget = lambda: (seen.append(uses()), forget())
    pipe.step()
    pipe.step()
    ((_, _, atoms),) = planner._known.values()
    finite = bool(atoms.probabilities.isfinite().all())
    return {"forgot": seen, "uses": uses(), "finite": finite}


def other_budget() -> dict[str, Any]:
    """Rank 1 has another budget; both ends say so."""
    budget = (0.25, 0.5)[dist.get_rank()]
    return {"error": outcome(Pipe("GPipe", sketched(sp.L1(budget))).step)}


CASES = (
    budget_one, in_place, traced, unbiased, fresh_draws, wire_bytes, no_gradient, inference,
    other_budget,
)  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory, request) -> list[dict[str, Any]]:
    return run_once(tmp_path_factory, request, "pipeline", 2, CASES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_budget_one_trains_bitwise_like_plain_stages(results, name) -> None:
    for record in of(results, budget_one):
        exact, one = record[name]
        assert equal(exact, one)
    if name == "ZBV":
        assert not equal(record["start"], exact)


def test_stages_are_changed_in_place_and_changed_again(results) -> None:
    _, last = of(results, in_place)
    assert last["class"] == "SketchedPipelineStage"
    assert last["sent"] == pytest.approx([0.3125, 0.53125, 1.0], abs=0.04)


def test_stages_of_the_tracing_front_end(results) -> None:
    first, last = of(results, traced)
    for record in (first, last):
        assert equal(record["plain"], record["one"])
    assert not equal(first["plain"], first["sketched"])


def test_the_mean_of_all_gradients_is_the_exact_one(results) -> None:
    """z ≤ 5 over 100 seeded draws; the last stage alone gets exact gradients."""
    for record in of(results, unbiased):
        assert len(record) == 6
        for case, z in record.items():
            assert z <= Z_LIMIT, case


def test_the_boundary_is_noisy_and_draws_anew(results) -> None:
    first, last = of(results, fresh_draws)
    assert not equal(first["plain"], first["sketched"])
    assert not equal(first["sketched"], first["again"])
    assert equal(last["plain"], last["sketched"])


def test_bytes_on_the_wire(results) -> None:
    first, last = of(results, wire_bytes)
    exact = 32 * 128 * 256 * 4
    for sketch, limit in ((sp.L1(0.1), 0.105), (sp.Rows(0.05), 0.055)):
        total = last[repr(sketch)].total
        assert total.exact == exact
        assert 0.9 * sketch.budget * exact <= total.sent <= limit * exact
        assert total.messages == 4
        assert first[repr(sketch)].total.sent == 0
    assert last[repr(sp.L1(1.0))].total.sent == exact
    assert last["after"].total.messages == 0


def test_no_gradient_is_sent_as_zeros(results) -> None:
    first, last = of(results, no_gradient)
    assert all(torch.equal(g, torch.zeros_like(g)) for g in first["grads"])
    assert last["grads"][0].abs().sum() > 0


def test_layers_learn_nothing_from_the_inference_of_shapes(results) -> None:
    first, last = of(results, inference)
    assert first == {"forgot": [0], "uses": 2 * CHUNKS, "finite": True}
    assert last == {"forgot": [1], "uses": 2 * CHUNKS, "finite": True}


def test_another_budget_is_an_error_on_both_ends(results) -> None:
    for record in of(results, other_budget):
        assert record["error"].startswith("ValueError")
        assert "L1(0.25)" in record["error"]
        assert "L1(0.5)" in record["error"]


@pytest.mark.parametrize(
    ("sketch", "hint"),
    [
        (sp.L1(0.1, sampling="independent"), "sampling='fixed'"),
        (sp.ElementMask(0.1), "gradient alone"),
        (sp.Diagonal(0.1), "gradient alone"),
    ],
    ids=repr,
)
def test_sketches_that_make_no_message_are_refused(sketch, hint) -> None:
    class Stage:
        get_bwd_send_ops = get_bwd_recv_ops = None

    with pytest.raises(ValueError, match=hint):
        sketch_stage_(Stage(), sketch)


def test_what_is_no_stage_is_refused() -> None:
    with pytest.raises(TypeError, match="no pipeline stage"):
        sketch_stage_(nn.Linear(2, 2), sp.L1(0.1))
