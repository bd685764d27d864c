"""torch.func, functional_call, torch.export."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad

import sketchprop as sp
from stack_helpers import SKETCHES, batch, equal, gradients, net


def functional_gradients(model: nn.Module, seed: int) -> list[Tensor]:
    x, y = batch()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(functional_call(model, values, (x,)), y)

    torch.manual_seed(seed)
    return list(grad(loss)(parameters).values())


@pytest.mark.parametrize("sketch", SKETCHES, ids=repr)
def test_func_grad_is_backward(sketch: sp.Sketch) -> None:
    """Seed for seed."""
    model = net(dropout=0.2)
    x, y = batch()
    sp.sketch_(model, sketch)
    backward = gradients(model.parameters(), lambda: F.cross_entropy(model(x), y), 5)
    assert equal(functional_gradients(model, 5), backward)
    assert not equal(functional_gradients(net(dropout=0.2), 5), backward)


def test_functional_call_uses_the_given_parameters() -> None:
    model = sp.sketch_(net(), sp.L1(0.3))
    x, y = batch()
    values = {name: torch.zeros_like(p).requires_grad_() for name, p in model.named_parameters()}
    F.cross_entropy(functional_call(model, values, (x,)), y).backward()
    assert all(p.grad is None for p in model.parameters())
    assert float(values["5.bias"].grad.norm()) > 0


def test_blocks_without_weights_of_their_own_share_no_budget() -> None:
    options = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
    model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, **options) for _ in range(2)))
    values = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    empty = sp.sketch_(model.to("meta"), sp.Tokens(0.3))
    functional_call(empty, values, (torch.randn(3, 6, 8),)).square().sum().backward()
    assert "not plain parameters" in empty[0].sketching.shares.note
    assert all(value.grad is not None for value in values.values())


@pytest.mark.parametrize("sketch", [*SKETCHES, sp.GradientSVD(0.3)], ids=repr)
def test_export_of_the_eval_model_is_the_parents(sketch: sp.Sketch) -> None:
    x, _ = batch()
    plain, sketched = net(dropout=0.2).eval(), sp.sketch_(net(dropout=0.2), sketch).eval()
    programs = [torch.export.export(m, (x,)) for m in (plain, sketched)]
    graphs = [[str(node.target) for node in p.graph.nodes] for p in programs]
    assert graphs[0] == graphs[1]
    assert list(programs[1].state_dict) == list(plain.state_dict())
    assert torch.equal(programs[1].module()(x), plain(x))
