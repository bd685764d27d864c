"""FLOPs of sketches: equal to torch's counter, to the FLOP, for every matrix product."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import sketchprop as sp
from law_table import METHODS
from sketchprop.core.cost import Size
from sketchprop.layers import SketchedModule
from sketchprop.meters import measure_flops
from sketchprop.meters.cost.shapes import recorded_uses

SKETCHES = METHODS[:-2]  # those of the paper
SHAPES = [(32, 24, 40), (24, 40, 16), (20, 20, 20), (12, 30, 11)]


def counted(sketch, shape, input_grad=True, weight_grad=True):
    """What the counter sees in a backward pass, and the same for an exact layer."""
    B, n, d = shape
    totals = []
    for run in (lambda x, W: sp.sketched_linear(x, W, None, sketch), F.linear):
        x = torch.randn(B, d, requires_grad=input_grad)
        W = torch.randn(n, d, requires_grad=weight_grad)
        y = run(x, W)
        with FlopCounterMode(display=False) as counter:
            y.backward(torch.randn_like(y))
        totals.append(counter.get_total_flops())
    return totals


def products(cost):
    """The part of a cost that is matrix products: what the counter sees."""
    return cost.products + cost.scoring_products + cost.drawing_products


@pytest.mark.parametrize("kind", [*SKETCHES, partial(sp.RankConstrained, paper=True)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", [0.25, 3])
def test_matrix_products_to_the_flop(kind, shape, budget):
    sketch = kind(budget)
    sketched, exact = counted(sketch, shape)
    B, n, d = shape
    assert exact == 4 * B * n * d
    assert sketched == products(sketch.cost(Size(*shape)))


@pytest.mark.parametrize("kind", [sp.GradientSVD, sp.RankConstrained])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_side_costs_half_of_the_products(kind, shape):
    sketch = kind(0.3)
    whole = sketch.cost(Size(*shape))
    for sides in ((True, False), (False, True)):
        sketched, _ = counted(sketch, shape, *sides)
        one = sketch.cost(Size(*shape, *sides))
        assert sketched == products(one)
        assert one == whole._replace(products=whole.products / 2)
    assert sketch.cost(Size(*shape, False, False)).total == 0


@pytest.mark.parametrize("kind", SKETCHES)
def test_planning_is_not_free(kind):
    B, n, d = shape = 64, 48, 32
    for sampling in ("fixed", "independent"):
        sketch = kind(0.25, sampling=sampling)
        # No method can score or draw without at least a look at each atom.
        assert sketch.cost(Size(*shape)).overhead >= sketch.atom_count(*shape)
    # A decomposition each step costs more than an exact backward of this size.
    if kind in (sp.GradientSVD, sp.RankConstrained):
        assert kind(0.25).cost(Size(*shape)).total > 4 * B * n * d


def test_independent_draws_cost_their_mean():
    sketch = sp.ColumnMask(0.25, sampling="independent")
    shape = 16, 32, 8
    totals = [counted(sketch, shape)[0] for _ in range(200)]
    mean = sum(totals) / len(totals)
    # Binomial(32, 0.25) columns of 4·16·8 FLOPs each: a standard deviation of √6 columns.
    error = 4 * 16 * 8 * 6**0.5 / 200**0.5
    assert abs(mean - sketch.cost(Size(*shape)).products) < 4 * error


def square(model, x):
    return model(x).square().mean()


def by_formula(model, batch):
    """Exact and sketched FLOPs of the backward of all sketched layers."""
    layers = {m: name for name, m in model.named_modules() if isinstance(m, SketchedModule)}
    with recorded_uses(layers) as uses:
        square(model, batch)
    costs = [
        (size.exact_flops, use.layer.sketching.cost(size).total)
        for use in uses
        for size in use.products
    ]
    exact, sketched = map(sum, zip(*costs, strict=True))
    return exact, sketched


def test_convolutions_to_the_flop():
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.ReLU()),
        *(nn.Conv2d(16, 32, 1), nn.Flatten(), nn.Linear(32 * 9, 10)),
    )
    sp.sketch_(model, sp.L1(0.25), sp.select.everything)
    batch = torch.randn(2, 3, 8, 8)
    report = measure_flops(model, square, batch)
    # Every product of this model belongs to a sketched layer: formulas and counter must agree.
    exact, sketched = by_formula(model, batch)
    assert exact == report.exact_backward
    assert sketched == pytest.approx(report.sketched_backward, abs=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_attention_to_the_flop(fused):
    """Projections by formula; the products of attention itself are counted, fused or not."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=not fused)[0]

    model = sp.sketch_(Encoder(), sp.L1(0.25), sp.select.everything)
    batch = torch.randn(3, 5, 16)
    report = measure_flops(model, square, batch)
    exact, sketched = by_formula(model, batch)
    inside = 3 * 2 * (2 * 5 * 5 * 8)  # one product of a head: 3 samples, 2 heads, 5 × 5 × 8
    assert report.forward == 2 * 15 * (48 * 16 + 16 * 16) + 2 * inside
    own = report.exact_backward - exact
    assert own == (5 if fused else 4) * inside  # fused attention computes QKᵀ once more
    assert report.sketched_backward - sketched == pytest.approx(own)
