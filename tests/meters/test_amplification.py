"""Noise at both ends of layers and blocks, beside closed forms and operator norms."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sketchprop as sp
from sketchprop.meters.noise.amplification import measure_edges
from sketchprop.zoo import ViT


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def digits(*shape):
    return [(torch.randn(*shape), torch.randint(10, shape[:1])) for _ in range(2)]


def test_a_chain_of_linear_layers_agrees_with_the_closed_form():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 20), nn.Linear(20, 10)).double()
    sp.sketch_(model, {"1": sp.SampleMask(0.5), "2": sp.SampleMask(0.25)})
    batches = [(x.double(), y) for x, y in digits(32, 12)]
    middle, top = measure_edges(model, loss_fn, batches, draws=300)
    # A mask of samples times 1/p has E‖ĝ‖² = ‖g‖²/p, whatever is below it.
    assert top.at_output == 0
    assert top.with_draw == pytest.approx(3, rel=0.1)
    assert middle.at_output == top.with_draw
    assert middle.at_input == pytest.approx(3, rel=0.1)
    assert (1 + middle.with_draw) / (1 + middle.at_input) == pytest.approx(2, rel=0.1)
    for edge, layer in ((middle, model[1]), (top, model[2])):
        squares = torch.linalg.svdvals(layer.weight.detach()).square()
        assert edge.bound == pytest.approx(float(squares[0]), rel=0.02)
        assert edge.white_gain == pytest.approx(float(squares.sum()) / layer.out_features, rel=0.2)
        assert max(edge.noise_gain, edge.signal_gain) <= float(squares[0])


def test_blocks_are_named_and_columns_compound_where_one_draw_of_samples_does_not():
    torch.manual_seed(0)
    model, batches = ViT(dim=32, depth=3, heads=2, hidden=64), digits(8, 3, 32, 32)
    blocks = [f"blocks.{i}" for i in range(3)]
    columns, rows = (
        sp.measure(model, loss_fn, batches, {"*": sketch}, edges=blocks, draws=2, rounds=0)
        for sketch in (sp.L1(0.3), sp.Rows(0.3))
    )
    assert [edge.name for edge in columns.edges] == blocks
    assert "Dampened or amplified" in str(columns)
    assert columns.edges[0].with_draw > 2 * columns.edges[2].with_draw
    assert rows.edges[0].with_draw < 1.5 * rows.edges[2].with_draw
    assert all(edge.noise_gain <= 1.05 * edge.bound for edge in (*columns.edges, *rows.edges))
    with pytest.raises(ValueError, match="no module 'block'"):
        sp.measure(model, loss_fn, batches, sp.L1(0.3), edges=["block"], draws=2, rounds=0)
