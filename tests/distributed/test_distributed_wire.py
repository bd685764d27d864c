"""Messages: their size, what comes out at the other end, and bytes that are no message."""

from __future__ import annotations

import pytest
import torch

import sketchprop as sp
from sketchprop.core.vjp import Vjp
from sketchprop.distributed import WireCounter, WireFormat
from sketchprop.distributed.wire import wire_format

SKETCHES = (
    sp.L1(0.25),
    sp.ColumnMask(3),
    sp.SampleMask(0.25),
    sp.Rows(0.25),
    sp.Rows(0.5, unit="sample"),
    sp.GradientSVD(0.25),
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def made(sketch: sp.Sketch, grad: torch.Tensor) -> WireFormat:
    form = wire_format(sketch, grad)
    assert form is not None
    return form


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sketch", SKETCHES, ids=repr)
def test_the_other_end_gets_the_draw(sketch, dtype) -> None:
    grad = torch.randn(6, 5, 9).to(dtype)
    form = made(sketch, grad)
    torch.manual_seed(3)
    message = form.pack(grad)
    assert message.dtype == torch.uint8
    assert message.numel() == form.nbytes < grad.nbytes
    out = torch.full_like(grad, 7.0)
    form.unpack(message, out)
    torch.manual_seed(3)
    drawn = sketch(Vjp(grad.reshape(30, 9), samples=sketch.samples_of((6, 5))))
    assert torch.equal(out, drawn.dense().view_as(grad))


def test_a_gradient_in_any_memory_order() -> None:
    grad = torch.randn(9, 20).T
    form = made(sp.L1(1), grad)
    out = torch.empty(9, 20).T
    form.unpack(form.pack(grad), out)
    kept = out.abs().sum(0) > 0
    assert int(kept.sum()) == 1
    assert torch.equal(out[:, kept] != 0, grad[:, kept] != 0)


@pytest.mark.parametrize("sketch", SKETCHES, ids=repr)
def test_uninitialised_bytes_write_nowhere_else(sketch) -> None:
    """Indices are clamped: any bytes stay inside the gradient they are unpacked into."""
    around = torch.full((8, 5, 9), 7.0)
    grad = around[1:7]
    form = made(sketch, torch.randn(6, 5, 9))
    for fill in (0, 127, 255):
        form.unpack(torch.full((form.nbytes,), fill, dtype=torch.uint8), grad)
        assert not (grad == 7.0).any()
        assert (around[[0, 7]] == 7.0).all()


@pytest.mark.parametrize("sketch", SKETCHES, ids=repr)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_arrives_so(sketch, bad) -> None:
    grad = torch.randn(6, 5, 9)
    grad[2, 3, 4] = bad
    form = made(sketch, grad)
    for _ in range(20):
        out = torch.empty_like(grad)
        form.unpack(form.pack(grad), out)
        assert not out.isfinite().all()


def test_what_would_not_shrink_is_sent_as_it_is() -> None:
    assert wire_format(sp.L1(1.0), torch.randn(4, 8)) is None
    assert wire_format(sp.GradientSVD(0.9), torch.randn(8, 8)) is None
    assert wire_format(sp.L1(0.5), torch.randn(1, 2)) is None
    assert wire_format(sp.L1(0.5), torch.tensor(1.0)) is None
    assert wire_format(sp.L1(0.5), torch.empty(0, 4)) is None
    assert wire_format(sp.L1(0.5), torch.ones(4, 4, dtype=torch.long)) is None


def test_the_counter_tells_kinds_apart_and_starts_again() -> None:
    counter = WireCounter()
    counter.add("a", sent=10, exact=100)
    counter.add("a", sent=20, exact=100)
    counter.add("b", sent=5, exact=0)
    report = counter.take()
    assert report.kinds == {"a": (2, 30, 200), "b": (1, 5, 0)}
    assert [traffic.ratio for traffic in report.kinds.values()] == [0.15, 1.0]
    assert report.total == (3, 35, 200)
    assert "ratio 0.1750" in str(report)
    assert counter.take().total.messages == 0
