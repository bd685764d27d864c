"""Convolutions obey the laws of the linear layer that they are."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import sketchprop as sp
from law_table import by_shape, fixed
from linear_laws import holds, saved_by
from sketchprop.core.enumeration import expectation
from sketchprop.core.sampling import draw_uniforms
from sketchprop.core.vjp import Vjp
from sketchprop.layers import SketchedConv1d, SketchedConv2d
from sketchprop.ops import sketched_conv
from sketchprop.sketches import Every

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
B, C, N = 3, 4, 7


@dataclass(frozen=True)
class Shape:
    kernel: tuple[int, ...]
    spatial: tuple[int, ...]
    options: tuple[tuple[str, object], ...] = ()
    channels_last: bool = False

    def __str__(self):
        words = [f"{k}={v}" for k, v in self.options]
        return " ".join([f"{self.kernel}", *words, *["channels_last"] * self.channels_last])

    @property
    def format(self):
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def tensors(self):
        x = torch.randn(B, C, *self.spatial, dtype=torch.float64).to(memory_format=self.format)
        weight = torch.randn(N, C, *self.kernel, dtype=torch.float64)
        bias = torch.randn(N, dtype=torch.float64)
        G = torch.randn_like(self.exact(x, weight, bias)) * torch.linspace(0.1, 2, N).view(
            -1, *[1] * len(self.spatial)
        )
        G = G.contiguous(memory_format=self.format)
        return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), G

    def exact(self, x, weight, bias):
        return CONV[len(self.kernel)](x, weight, bias, **dict(self.options))

    def sketched(self, x, weight, bias, sketch, uniforms=draw_uniforms, planner=None):
        return sketched_conv(
            x, weight, bias, sketch, uniforms=uniforms, planner=planner, **dict(self.options)
        )


def shape(kernel, spatial, *, channels_last=False, **options):
    return Shape(kernel, spatial, tuple(options.items()), channels_last)


POINTWISE = [
    shape((1, 1), (3, 2)),
    shape((1, 1), (4, 5), stride=2),
    shape((1, 1), (4, 5), stride=(1, 3), dilation=2),
    shape((1, 1), (1, 1)),
    shape((1, 1), (3, 2), channels_last=True),
    shape((1, 1), (4, 5), stride=2, channels_last=True),
    shape((1,), (6,)),
    shape((1,), (7,), stride=3, padding="valid"),
    shape((1, 1, 1), (2, 3, 2), stride=2),
]
KERNEL = [
    shape((3, 3), (4, 5), padding=1),
    shape((3, 3), (5, 6), stride=2, padding=(1, 0)),
    shape((3, 2), (6, 5), dilation=2, padding=2),
    shape((2, 3), (4, 4), padding="same"),
    shape((4, 2), (4, 4), padding="same", dilation=(1, 2)),
    shape((3, 3), (4, 4), padding="valid"),
    shape((1, 1), (3, 3), padding=1),
    shape((3, 3), (5, 4), stride=2, padding=1, channels_last=True),
    shape((3, 1), (5, 4), padding=(1, 0), channels_last=True),
    shape((4,), (9,), stride=2, padding=1, dilation=2),
    shape((2, 2, 2), (3, 3, 2), padding=1),
]
OPTIONS = {"exact_bias": False}
COLUMNS = [
    sp.ColumnMask(0.4, **OPTIONS),
    sp.L1(0.4, **OPTIONS),
    sp.L1(2, root=True, **OPTIONS),
    sp.L2(0.4, **OPTIONS),
    sp.Variance(0.4, **OPTIONS),
    sp.Diagonal(0.4, **OPTIONS),
    sp.L1(0.4, sampling="independent", **OPTIONS),
    sp.Diagonal(0.4, sampling="independent", **OPTIONS),
]
OTHERS = [
    sp.SampleMask(0.3, **OPTIONS),
    sp.SampleMask(0.3, sampling="independent", **OPTIONS),
    sp.GradientSVD(0.3, **OPTIONS),
    sp.RankConstrained(0.3, **OPTIONS),
]
SAMPLES = sp.Rows(2, unit="sample", **OPTIONS)
PAIRS = [(s, k) for s in POINTWISE + KERNEL for k in (COLUMNS[1], COLUMNS[5])]
PAIRS += [(s, k) for s in (POINTWISE[1], POINTWISE[4]) for k in COLUMNS + OTHERS]
PAIRS += [(s, k) for s in (KERNEL[1], KERNEL[7]) for k in [*COLUMNS, SAMPLES]]
PAIRS = list(dict.fromkeys(PAIRS))
"""Every shape with two sketches, every sketch in shapes with a stride and channels last."""
every_pair = pytest.mark.parametrize(("where", "sketch"), PAIRS, ids=str)
every_shape = pytest.mark.parametrize("where", POINTWISE + KERNEL, ids=str)
PLANNERS = [Every(1, rows=0.5), Every(3), Every(3, rows=0.5)]
PLANNED = [(s, COLUMNS[1], planner) for s in POINTWISE + KERNEL for planner in PLANNERS]


def rows(t):
    return t.movedim(1, -1).reshape(-1, t.shape[1])


def gated(where, x, weight, bias, sketch, u):
    """The dense reference: torch's own backward of the masked, rescaled gradient."""
    y = where.exact(x, weight, bias).movedim(1, -1)
    return sp.gate(y, sketch, weight=weight.flatten(1), uniforms=u).movedim(-1, 1)


def close(actual, wanted, tolerance=1e-10):
    for a, w in zip(actual, wanted, strict=True):
        assert a.shape == w.shape
        assert float((a - w).norm()) <= tolerance * max(1e-300, float(w.norm()))


@pytest.mark.parametrize(
    ("where", "sketch", "planner"), [*((*pair, None) for pair in PAIRS), *PLANNED], ids=str
)
def test_mean_of_every_gradient_is_exact(where, sketch, planner):
    x, weight, bias, G = where.tensors()
    wanted = torch.autograd.grad(where.exact(x, weight, bias), (x, weight, bias), G)

    def gradients(uniforms):
        own = planner and planner.anew()
        if own is not None:  # what it remembers is of another gradient
            y = where.sketched(x, weight, bias, sketch, fixed(0.5), own)
            torch.autograd.grad(y, x, G.flip(1))
        y = where.sketched(x, weight, bias, sketch, uniforms, own)
        return torch.autograd.grad(y, (x, weight, bias), G)

    close(expectation(gradients), wanted)


@every_pair
def test_reduced_backward_is_the_dense_one(where, sketch):
    x, weight, bias, G = where.tensors()
    for seed in range(3):
        u = by_shape(seed)
        y = where.sketched(x, weight, bias, sketch, u)
        wanted = torch.autograd.grad(gated(where, x, weight, bias, sketch, u), (x, weight, bias), G)
        assert torch.equal(y, where.exact(x, weight, bias))
        close(torch.autograd.grad(y, (x, weight, bias), G), wanted)


@pytest.mark.parametrize("where", POINTWISE, ids=str)
def test_element_masks_are_those_of_the_linear_layer(where):
    x, weight, bias, G = where.tensors()
    sketch = sp.ElementMask(0.5)
    u = by_shape()
    got = torch.autograd.grad(where.sketched(x, weight, bias, sketch, u), (x, weight, bias), G)
    seen = x[(..., *(slice(None, None, s) for s in _strides(where)))]
    y = sp.sketched_linear(rows(seen), weight.flatten(1), bias, sketch, uniforms=u)
    close(got, torch.autograd.grad(y, (x, weight, bias), rows(G)))


def _strides(where):
    stride = dict(where.options).get("stride", 1)
    return (stride,) * len(where.kernel) if isinstance(stride, int) else stride


@every_shape
@pytest.mark.parametrize("sketch", [sp.L1(0.4), sp.Diagonal(0.4)], ids=str)
def test_layouts_of_the_gradient_do_not_matter(where, sketch):
    """Contiguous, channels innermost, expanded, sliced: the same numbers."""
    x, weight, bias, G = where.tensors()
    u = fixed(0.37)

    def gradients(G):
        return torch.autograd.grad(where.sketched(x, weight, bias, sketch, u), (x, weight, bias), G)

    layouts = [
        G.contiguous(),
        G.movedim(1, -1).contiguous().movedim(-1, 1),
        torch.stack([G, G], -1)[..., 0],
    ]
    for other in layouts:
        close(gradients(other), gradients(G))
    flat = G[:1, :, :1].expand_as(G) if where.spatial[0] > 1 else G
    close(gradients(flat), gradients(flat.contiguous()))


@every_shape
def test_keeping_everything_is_the_exact_convolution_bitwise(where):
    x, weight, bias, G = where.tensors()
    sketch = sp.Diagonal(N) if where.channels_last else sp.L1(1.0)
    got = torch.autograd.grad(where.sketched(x, weight, bias, sketch), (x, weight, bias), G)
    wanted = torch.autograd.grad(where.exact(x, weight, bias), (x, weight, bias), G)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@every_shape
def test_memory_format_of_the_input_gradient_and_an_exact_bias(where):
    x, weight, bias, G = where.tensors()
    y = where.sketched(x, weight, bias, sp.L1(0.4))
    dX, db = torch.autograd.grad(y, [x, bias], G)
    assert dX.is_contiguous(memory_format=where.format)
    close([db], [rows(G).sum(0)])


@every_shape
@pytest.mark.parametrize("frozen", ["x", "weight", "x and weight"])
def test_what_is_frozen_costs_nothing(where, frozen):
    x, weight, bias, G = where.tensors()
    u = fixed(0.37)
    sketch = sp.L1(0.4)
    wanted = torch.autograd.grad(where.sketched(x, weight, bias, sketch, u), (x, weight, bias), G)
    leaves = {"x": x, "weight": weight, "bias": bias}
    for name in frozen.split(" and "):
        leaves[name].requires_grad_(False)
    saved, y = saved_by(lambda: where.sketched(x, weight, bias, sketch, u))
    if dict(where.options).get("padding") != "same":  # uneven padding makes a new x
        assert holds(saved, x) == weight.requires_grad
    assert holds(saved, weight) == x.requires_grad
    y.backward(G)
    for leaf, true in zip(leaves.values(), wanted, strict=True):
        if leaf.requires_grad and leaf is not bias:
            close([leaf.grad], [true])
        elif leaf is not bias:
            assert leaf.grad is None


@every_shape
def test_a_gradient_that_is_not_finite_is_seen(where):
    x, weight, bias, G = where.tensors()
    inside = (size // 2 for size in G.shape[2:])  # no place that sees only padding
    G[(1, 2, *inside)] = float("nan")
    for sketch, *planner in [
        (sp.L1(0.4),),
        (sp.ColumnMask(0.4),),
        (sp.Diagonal(0.4, sampling="independent"),),
        *((sp.L1(1), planner.anew()) for planner in PLANNERS),
    ]:
        for u in (0.0, 0.3, 0.6, 0.9):
            y = where.sketched(x, weight, bias, sketch, fixed(u), *planner)
            for gradient in torch.autograd.grad(y, (x, weight, bias), G):
                assert not gradient.isfinite().all()


@every_shape
def test_unbatched_and_empty_inputs(where):
    x, weight, bias, G = where.tensors()
    u = fixed(0.6)
    single = x.detach()[0].clone().requires_grad_()
    got = torch.autograd.grad(
        where.sketched(single, weight, bias, sp.L1(0.4), u), (single, weight, bias), G[0]
    )
    batch = single.detach()[None].requires_grad_()
    wanted = torch.autograd.grad(
        where.sketched(batch, weight, bias, sp.L1(0.4), u), (batch, weight, bias), G[:1]
    )
    close([got[0][None], *got[1:]], wanted)
    empty = where.sketched(x.detach()[:0], weight, bias, sp.L1(0.4))
    assert empty.shape == (0, *G.shape[1:])
    assert torch.autograd.grad(empty.sum(), [weight])[0].eq(0).all()


def test_a_large_gradient_is_scored_in_parts():
    """Above a megabyte the absolute sums are taken image by image: the same weights."""
    G = torch.randn(40, 32, 24, 24)
    wanted = sp.L1(0.1).atoms(Vjp(rows(G))).probabilities
    got = sp.L1(0.1).atoms(Vjp(sp.L1(0.1).fold(G.flatten(2)))).probabilities
    assert torch.allclose(got, wanted, rtol=1e-5)
    half = sp.L1(0.1).fold(G.flatten(2).half())
    assert half.dtype == torch.float32
    assert torch.allclose(half, G.flatten(2).half().float().abs().sum(-1), rtol=1e-4)


def test_sketches_without_channels_and_groups_are_refused():
    x, weight, _, _ = KERNEL[0].tensors()
    with pytest.raises(TypeError, match="column sketch, for example L1"):
        sketched_conv(x, weight, None, sp.SampleMask(0.3))
    with pytest.raises(ValueError, match="grouped"):
        sketched_conv(x, weight[:, :2], None, sp.L1(0.3))
    with pytest.raises(ValueError, match="does not fit"):
        sketched_conv(x[0, 0], weight, None, sp.L1(0.3))
    with pytest.raises(TypeError, match="unit='sample'"):
        sketched_conv(x, weight, None, sp.Rows(0.3, unit="token"))


LAYERS = [
    nn.Conv2d(4, 6, 3, padding=1),
    nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular", stride=2),
    nn.Conv2d(4, 6, (3, 2), padding="same", padding_mode="reflect"),
    nn.Conv2d(4, 6, 1, bias=False),
    nn.Conv2d(4, 6, 1, padding=1, padding_mode="replicate"),
    nn.Conv1d(4, 6, 5, dilation=2, padding=2, padding_mode="replicate"),
    nn.Conv1d(4, 6, 1, stride=2),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_modules(layer):
    layer = copy.deepcopy(layer).double()
    spatial = (7, 6)[: len(layer.kernel_size)]
    x = torch.randn(3, 4, *spatial, dtype=torch.float64, requires_grad=True)
    sketched = sp.sketch_(copy.deepcopy(layer), sp.L1(0.5))
    assert type(sketched) in (SketchedConv1d, SketchedConv2d)
    assert "sketch=L1(0.5)" in repr(sketched)
    assert sketched.state_dict().keys() == layer.state_dict().keys()
    y = sketched(x)
    assert torch.equal(y, layer(x))
    report = sp.check_unbiased(sketched, lambda m, x: m(x).square().sum(), x, draws=200)
    assert report.ok, report
    state = torch.get_rng_state()
    assert torch.equal(sketched.eval()(x), layer.eval()(x))
    with torch.no_grad():
        assert torch.equal(sketched.train()(x), layer(x))
    assert torch.equal(state, torch.get_rng_state())
    with sp.exact(sketched):
        got = torch.autograd.grad(sketched(x).square().sum(), [sketched.weight, x])
    wanted = torch.autograd.grad(layer(x).square().sum(), [layer.weight, x])
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert type(sp.unsketch_(sketched)) is type(layer)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(("kernel", "padding"), [(1, 0), (3, 1)])
def test_the_products_are_really_smaller(kernel, padding, form):
    layer = nn.Conv2d(32, 40, kernel, padding=padding)
    x = torch.randn(4, 32, 8, 8).to(memory_format=form).requires_grad_()
    counts = []
    for module in (layer, sp.sketch_(copy.deepcopy(layer), sp.L1(0.1))):
        y = module(x)
        with FlopCounterMode(display=False) as counter:
            y.backward(torch.randn_like(y))
        counts.append(counter.get_total_flops())
    assert counts[1] == pytest.approx(0.1 * counts[0])
