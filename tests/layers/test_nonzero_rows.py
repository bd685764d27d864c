"""``Rows(by="nonzero")``: the exact gradient without the work on rows of zeros."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import sketchprop as sp
from sketchprop.core.enumeration import every_draw
from sketchprop.core.vjp import Vjp

NONZERO = sp.Rows(1.0, by="nonzero")


@pytest.mark.parametrize("unit", ["token", "sample"])
def test_a_padded_batch_gets_its_exact_gradient_for_a_fraction_of_the_work(unit: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5)).double()
    sketch = sp.Rows(1.0, by="nonzero", unit=unit)
    model = sp.sketch_(copy.deepcopy(plain), sketch, sp.select.everything)
    labels = torch.full((4, 10), -100)
    labels[:2, :3] = torch.tensor([1, 0, 4])
    inputs = torch.randn(4, 10, 8, dtype=torch.float64)
    found, work = [], []
    for each in (plain, model):
        x = inputs.clone().requires_grad_()
        loss = F.cross_entropy(each(x).flatten(0, 1), labels.flatten(), ignore_index=-100)
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        work.append(counter.get_total_flops())
        found.append([x.grad, *(p.grad for p in each.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    kept = 6 if unit == "token" else 20
    assert work[1] == pytest.approx(work[0] * kept / 40)


def test_there_is_one_draw_and_it_is_the_gradient() -> None:
    G = torch.zeros(9, 4, dtype=torch.float64)
    G[[2, 5]] = torch.randn(2, 4, dtype=torch.float64)
    draws = list(every_draw(lambda uniforms: NONZERO(Vjp(G), uniforms).dense()))
    assert len(draws) == 1
    assert NONZERO(Vjp(G)).dense().equal(G)
    assert NONZERO(Vjp(torch.zeros(3, 4))).dense().equal(torch.zeros(3, 4))


def test_a_row_that_is_not_finite_is_kept() -> None:
    G = torch.zeros(5, 3)
    G[1, 2] = torch.nan
    assert NONZERO(Vjp(G)).dense()[1].isnan().any()


def test_compiled_it_is_the_exact_product() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 4)
    plain = copy.deepcopy(layer)
    sp.sketch_(layer, NONZERO, sp.select.everything)
    torch._dynamo.reset()
    x = torch.randn(5, 6)
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x)[:2].sum().backward()
    plain(x)[:2].sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)
