"""torch.compile(fullgraph=True) with inductor, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn

import sketchprop as sp
from sketchprop.sketches import ForwardRows
from stack_helpers import SKETCHES, Z_LIMIT, batch, equal, gradients, largest_z, net


@pytest.fixture(autouse=True)
def eager_random_numbers() -> Iterator[None]:
    """Inductor draws as eager does, so that both make the same sketch from one seed."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(fallback_random=True):
        yield


def compiled(
    model: nn.Module, backend: str = "inductor"
) -> tuple[nn.Module, torch._dynamo.testing.CompileCounterWithBackend]:
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(model, fullgraph=True, backend=counter), counter  # type: ignore[return-value]


def close(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("sketch", SKETCHES, ids=repr)
def test_one_graph_and_the_eager_sketch(sketch: sp.Sketch) -> None:
    """Seed for seed the eager gradient, compiled once; by kernels for columns and for rows."""
    by_kernels = isinstance(sketch, sp.L1 | sp.SampleMask)
    model = net()
    x, y = batch()
    truth = gradients(model.parameters(), lambda: F.cross_entropy(model(x), y), 0)
    sp.sketch_(model, sketch)
    fast, counter = compiled(model, "inductor" if by_kernels else "aot_eager")

    def draw(k: int) -> list[Tensor]:
        return gradients(model.parameters(), lambda: F.cross_entropy(fast(x), y), k)

    for seed in range(3):
        eager = gradients(model.parameters(), lambda: F.cross_entropy(model(x), y), seed)
        assert close(draw(seed), eager)
        assert not close(eager, truth)
    assert counter.frame_count == 1


def test_each_layer_draws_its_own_uniform() -> None:
    """With inductor's own random numbers too: two layers, two draws; z ≤ 5 over 300 draws."""
    model = net()
    x, y = batch()
    truth = gradients(model.parameters(), lambda: F.cross_entropy(model(x), y), 0)
    fast, _ = compiled(sp.sketch_(model, sp.ColumnMask(2), filter_fn=lambda module, name: True))

    def draw(k: int) -> list[Tensor]:
        with torch._inductor.config.patch(fallback_random=False):
            return gradients(model.parameters(), lambda: F.cross_entropy(fast(x), y), k)

    assert largest_z(truth, draw, 300) <= Z_LIMIT
    rows = torch.stack(
        [torch.stack([g.abs().sum(1).argmax() for g in draw(k)[::2]]) for k in range(40)]
    )
    # One uniform for all would make the kept row of one layer a function of another's.
    firsts = {int(r[0]): set() for r in rows}
    for first, second, _ in rows.tolist():
        firsts[first].add(second)
    assert max(len(seen) for seen in firsts.values()) > 1


def test_budget_one_is_the_compiled_plain_model() -> None:
    """Bitwise: the graphs are the same."""
    x, y = batch()
    results = []
    for model in (net(), sp.sketch_(net(), sp.L1(1.0))):
        fast, counter = compiled(model)
        results.append(
            gradients(model.parameters(), lambda fast=fast: F.cross_entropy(fast(x), y), 0)
        )
        assert counter.frame_count == 1
    assert equal(*results)


def test_autocast_inside() -> None:
    model = sp.sketch_(net(), sp.L1(0.3))
    x, y = batch()

    def loss(module: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(module(x).float(), y)

    fast, _ = compiled(model, "aot_eager")
    got = gradients(model.parameters(), lambda: loss(fast), 3)
    eager = gradients(model.parameters(), lambda: loss(model), 3)
    for a, b in zip(got, eager, strict=True):  # bfloat16 rounds differently when fused
        assert float((a - b).norm()) <= 0.03 * float(b.norm())


def test_a_ladder_compiles_each_rung_and_no_more() -> None:
    """Graphs are counted, so a backend that compiles fast will do."""
    model = sp.sketch_(net(), sp.L1(1.0))
    x, y = batch()
    fast, counter = compiled(model, "aot_eager")
    for rung, budget in enumerate([1.0, 8, 4]):
        sp.set_budget_(model, budget)
        for step in range(2):
            got = gradients(model.parameters(), lambda: F.cross_entropy(fast(x), y), step)
            eager = gradients(model.parameters(), lambda: F.cross_entropy(model(x), y), step)
            assert close(got, eager)
            if step == 0:
                count = counter.frame_count
        assert counter.frame_count == count, f"recompiled within rung {rung}"
    count = counter.frame_count
    for budget in (8, 4, 8):
        sp.set_budget_(model, budget)
        gradients(model.parameters(), lambda: F.cross_entropy(fast(x), y), 0)
    assert counter.frame_count == count, "a rung that was compiled before compiled again"


@pytest.mark.parametrize(
    "sketch",
    [sp.Split(input=sp.L1(0.5), weight=ForwardRows(0.5)), sp.Rows(0.5)],
    ids=repr,
)
def test_fractions_change_on_a_ladder(sketch: sp.Sketch | sp.Split) -> None:
    """Shares, not ranks: a changed float must not become a symbol that sizes depend on."""
    model = sp.sketch_(net(), sketch)
    x, y = batch()
    fast, _ = compiled(model, "aot_eager")
    for budget in (0.5, 0.25):
        sp.set_budget_(model, budget)
        got = gradients(model.parameters(), lambda: F.cross_entropy(fast(x), y), 3)
        eager = gradients(model.parameters(), lambda: F.cross_entropy(model(x), y), 3)
        assert close(got, eager)


@pytest.mark.parametrize(
    "sketch",
    [sp.Split(input=sp.L1(0.5), weight=ForwardRows(0.5)), sp.Rows(0.5)],
    ids=repr,
)
def test_dynamic_shapes(sketch: sp.Sketch | sp.Split) -> None:
    """Two sketched layers of one size; batches of several sizes."""
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 4))
    sp.sketch_(model, sketch)
    fast = torch.compile(model, dynamic=True, fullgraph=True, backend="aot_eager")
    for rows in (16, 24, 40):
        x = torch.randn(rows, 16)
        got = gradients(model.parameters(), lambda x=x: fast(x).square().sum(), 3)
        eager = gradients(model.parameters(), lambda x=x: model(x).square().sum(), 3)
        assert close(got, eager)


def test_eval_is_the_parent() -> None:
    model = sp.sketch_(net(), sp.L1(0.3)).eval()
    x, _ = batch()
    fast, _ = compiled(model, "aot_eager")
    before = torch.get_rng_state()
    with torch.no_grad():
        assert torch.equal(fast(x), compiled(net().eval(), "aot_eager")[0](x))
    assert torch.equal(torch.get_rng_state(), before)
