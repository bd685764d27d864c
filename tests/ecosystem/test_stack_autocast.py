"""Autocast and GradScaler on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sketchprop as sp
from sketchprop.sketches import ForwardRows
from stack_helpers import SKETCHES, Z_LIMIT, batch, equal, gradients, largest_z, net


def autocast_loss(model: nn.Module, dtype: torch.dtype) -> Tensor:
    x, y = batch()
    with torch.autocast("cpu", dtype=dtype):
        out = model(x)
        assert out.dtype == dtype
        return F.cross_entropy(out.float(), y)


@pytest.mark.parametrize(
    ("sketch", "dtype"),
    [*((sketch, torch.bfloat16) for sketch in SKETCHES), (sp.L1(0.3), torch.float16)],
    ids=str,
)
def test_the_mean_is_the_autocast_gradient(sketch: sp.Sketch, dtype: torch.dtype) -> None:
    """z ≤ 5 over 200 draws."""
    model = net()
    truth = gradients(model.parameters(), lambda: autocast_loss(model, dtype), 0)
    sp.sketch_(model, sketch)

    def draw(k: int) -> list[Tensor]:
        return gradients(model.parameters(), lambda: autocast_loss(model, dtype), k)

    assert not equal(truth, draw(0))
    assert all(g.dtype == torch.float32 for g in draw(0))
    assert largest_z(truth, draw, 200) <= Z_LIMIT


@pytest.mark.parametrize("sketch", [sp.L1(0.3), sp.Rows(0.3), ForwardRows(0.3)], ids=repr)
def test_float64_stays_float64_as_in_plain_layers(sketch: sp.Sketch) -> None:
    x = batch()[0].double().requires_grad_()
    image = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    for given, model in ((x, net().double()), (image, nn.Conv2d(3, 8, 1).double())):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plain = model(given)
        if isinstance(sketch, ForwardRows) and isinstance(model, nn.Conv2d):
            continue
        sp.sketch_(model, sketch, filter_fn=lambda module, name: True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(given)
        assert out.dtype == plain.dtype == torch.float64
        assert torch.equal(out, plain)
        (grad,) = torch.autograd.grad(out.sum(), given)
        assert grad.dtype == torch.float64


def test_the_mean_test_notices_a_bias() -> None:
    model = sp.sketch_(net(), sp.L1(0.3))
    with sp.exact(model):
        truth = gradients(model.parameters(), lambda: autocast_loss(model, torch.bfloat16), 0)

    def draw(k: int) -> list[Tensor]:
        loss = autocast_loss(model, torch.bfloat16)
        return [1.15 * g for g in gradients(model.parameters(), lambda: loss, k)]

    assert largest_z(truth, draw, 200) > Z_LIMIT


@pytest.mark.parametrize(
    "sketch", [*SKETCHES, sp.ElementMask(0.3), sp.L1(0.3, sampling="independent")], ids=repr
)
def test_grad_scaler_sees_an_overflow_and_skips_the_step(sketch: sp.Sketch) -> None:
    model = sp.sketch_(net(), sketch, filter_fn=lambda module, name: True)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    loss = autocast_loss(model, torch.float16)
    scaler.scale(loss).backward()
    # Each layer's own gradient tells, not only the head's.
    assert not any(bool(m.weight.grad.isfinite().all()) for m in model if isinstance(m, nn.Linear))
    scaler.step(optimizer)
    scaler.update()
    assert equal(before, model.parameters())
    assert scaler.get_scale() == 2.0**39
