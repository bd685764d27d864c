"""The fast path is the gate is the dense product is the paper's pseudo-code, draw for draw."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import pseudo_code
import sketchprop as sp
from law_table import ATOMS, FIXED, GATED, SKETCHES, by_shape, fixed, layer
from linear_laws import (
    INPUTS,
    TOLERANCE,
    B,
    D,
    N,
    assert_same,
    dense,
    fast,
    gated,
    holds,
    leaf,
    parameters,
    rows_of,
    saved_by,
)
from sketchprop.core.cost import Size

every_sketch = pytest.mark.parametrize("variant", SKETCHES, ids=str)
SPECTRAL = (sp.GradientSVD, sp.RankConstrained)
every_gate = pytest.mark.parametrize("variant", GATED, ids=str)


# --- four ways to the same gradient ---


@pytest.mark.parametrize("exact_bias", [True, False])
@pytest.mark.parametrize("dims", INPUTS)
@pytest.mark.parametrize("variant", ATOMS, ids=str)
def test_fast_path_is_gate_is_dense(variant, dims, exact_bias):
    weight, bias = parameters()
    x = leaf(torch.randn(INPUTS[dims], dtype=torch.float64))
    G = torch.randn(*INPUTS[dims][:-1], N, dtype=torch.float64)
    for budget in (1, 0.5):
        sketch = replace(variant(budget), exact_bias=exact_bias)
        u = by_shape(3)
        quick = fast(x, weight, bias, sketch, G, u, variant.new_planner())
        assert_same(quick, dense(x, weight, bias, sketch, G, u, variant.new_planner()))
        if exact_bias:
            torch.testing.assert_close(quick[2], rows_of(G).sum(0))
        if variant not in GATED:
            continue
        slow = gated(x, weight, bias, sketch, G, u)
        assert_same(quick[:2], slow[:2])
        # The gate sits behind the whole layer: its bias gradient always comes from Ĝ.
        if not exact_bias:
            assert_same(quick[2:], slow[2:])


@every_sketch
def test_forward_is_bitwise_f_linear(variant):
    weight, bias = parameters(torch.float32)
    for shape in INPUTS.values():
        x = leaf(torch.randn(shape))
        for b in (bias, None):
            y = sp.sketched_linear(x, weight, b, variant(0.5))
            assert torch.equal(y, F.linear(x, weight, b))
            assert y.requires_grad


@every_gate
def test_the_gate_is_the_identity_in_forward(variant):
    x = leaf(torch.randn(B, N))
    y = sp.gate(x, variant(0.5), weight=torch.randn(N, D))
    assert torch.equal(x, y)
    assert y.requires_grad


COORDINATES = {sp.L1: "l1", sp.L2: "l2", sp.Variance: "var", sp.Diagonal: "diagonal"}


def pseudo_code_draw(method, root, G, W, r, u):
    """Ĝ as the paper writes it."""
    if method is sp.GradientSVD:
        return pseudo_code.svd_sketch(G, r, u, root=root)
    if method is sp.RankConstrained:
        return pseudo_code.rank_constrained_sketch(G, W, r, u)
    weights = pseudo_code.coordinate_weights(G, W, COORDINATES[method])
    return pseudo_code.coordinate_sketch(G, weights.sqrt() if root else weights, r, u)


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize(
    ("method", "root"),
    [
        *((method, False) for method in (*COORDINATES, *SPECTRAL)),
        *((method, True) for method in (sp.L1, sp.L2, sp.Variance, sp.GradientSVD)),
    ],
)
def test_fast_path_is_the_pseudo_code_of_the_paper(method, root, rank):
    options = {"root": True} if root else {}
    if method in (sp.Variance, sp.Diagonal, sp.RankConstrained):
        options["paper"] = True
    G, W, X = layer(7, 6, 8)
    sketch = method(rank, exact_bias=False, **options)
    x, weight, bias = leaf(X), leaf(W), leaf(torch.randn(6).double())
    for u in torch.rand(10, dtype=torch.float64):
        G_hat = pseudo_code_draw(method, root, G, W, rank, float(u))
        expected = pseudo_code.masked_backward(G_hat, X, W)
        assert_same(fast(x, weight, bias, sketch, G, fixed(u)), expected, 1e-7)


@pytest.mark.parametrize("p", [0.3, 0.7])
def test_fast_path_is_the_pseudo_code_of_the_masks(p):
    G, W, X = layer(7, 6, 8)
    x, weight, bias = leaf(X), leaf(W), leaf(torch.randn(6).double())
    for method, mask, atoms in [
        (sp.ColumnMask, pseudo_code.per_column_mask, 6),
        (sp.SampleMask, pseudo_code.per_sample_mask, 7),
    ]:
        sketch = method(p, sampling="independent", exact_bias=False)
        for u in torch.rand(8, atoms, dtype=torch.float64):
            expected = pseudo_code.masked_backward(mask(G, p, u < p), X, W)
            assert_same(fast(x, weight, bias, sketch, G, fixed(u)), expected)
    sketch = sp.ElementMask(p, sampling="independent")
    for u in torch.rand(8, 6 + 7, 8, dtype=torch.float64):
        expected = pseudo_code.per_element_backward(G, X, W, p, u[:6] < p, u[6:] < p)
        assert_same(fast(x, weight, bias, sketch, G, fixed(u)), expected)


# --- shapes, strides, dtypes ---


@every_sketch
def test_what_is_not_contiguous(variant):
    weight, bias = parameters()
    sketch = variant(0.5)
    plain = torch.randn(3, 2, D, dtype=torch.float64)
    G = torch.randn(3, 2, N, dtype=torch.float64)
    strange = {
        "transposed": (plain.transpose(0, 1).contiguous().transpose(0, 1), weight, G),
        "strided": (torch.stack([plain, plain], -1).flatten(-2)[..., ::2], weight, G),
        "weight transposed": (plain, weight.mT.contiguous().mT, G),
        "gradient transposed": (plain, weight, G.mT.contiguous().mT),
        "gradient expanded": (plain, weight, G[:1, :1].expand(3, 2, N)),
    }
    for name, tensors in strange.items():
        assert not all(t.is_contiguous() for t in tensors), name
        u = by_shape()
        x, w, grad = (t.detach() for t in tensors)
        got = fast(x.requires_grad_(), w.requires_grad_(), bias, sketch, grad, u)
        x, w, grad = (leaf(t.contiguous()) for t in tensors)
        assert_same(got, fast(x, w, bias, sketch, grad, u))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@every_sketch
def test_dtypes(variant, dtype):
    weight, bias = parameters(dtype)
    x, G = leaf(torch.randn(B, D, dtype=dtype)), torch.randn(B, N, dtype=dtype)
    for budget in (1, 0.5):
        sketch = variant(budget)
        u = by_shape()
        got = fast(x, weight, bias, sketch, G, u)
        assert [g.dtype for g in got] == [dtype] * 3
        # The same numbers in float64. Directions of near-equal strength may turn in lower
        # precision, so spectral sketches are compared in mean below, not draw by draw.
        if variant.method not in SPECTRAL:
            wide = [t.detach().double() for t in (x, weight, bias)]
            expected = fast(*map(leaf, wide), sketch, G.double(), u)
            for a, b in zip(got, expected, strict=True):
                assert (a.double() - b).norm() <= TOLERANCE[dtype] * b.norm()
        if variant in GATED:
            assert_same(got[:2], gated(x, weight, bias, sketch, G, u)[:2], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "variant", [v for v in FIXED if v.method in SPECTRAL and v.planner is None], ids=str
)
def test_means_of_directions_in_every_dtype(variant, dtype):
    # A fine grid of u: the mean of the fast path is the exact gradient, to the dtype's rounding.
    weight, bias = parameters(dtype)
    x, G = leaf(torch.randn(B, D, dtype=dtype)), torch.randn(B, N, dtype=dtype)
    sketch = variant(0.5)
    K = 200
    totals = [torch.zeros(t.shape, dtype=torch.float64) for t in (x, weight, bias)]
    for k in range(K):
        u = fixed((k + 0.5) / K)
        for total, grad in zip(totals, fast(x, weight, bias, sketch, G, u), strict=True):
            total.add_(grad.double() / K)
    truths = (G.double() @ weight.double(), G.double().mT @ x.double(), G.double().sum(0))
    for total, true in zip(totals, truths, strict=True):
        assert (total - true).norm() <= (TOLERANCE[dtype] + 20 / K) * true.norm()


@pytest.mark.parametrize("shape", [(0, D), (3, 0, D)])
@every_sketch
def test_a_batch_without_rows(variant, shape):
    weight, bias = parameters()
    x = leaf(torch.zeros(shape, dtype=torch.float64))
    y = sp.sketched_linear(x, weight, bias, variant(0.5))
    assert y.shape == (*shape[:-1], N)
    y.sum().backward()
    assert x.grad.shape == shape
    assert not weight.grad.any()
    assert not bias.grad.any()
    z = leaf(torch.zeros(*shape[:-1], N))
    if variant in GATED:
        sp.gate(z, variant(0.5), weight=weight).sum().backward()
        assert z.grad.shape == z.shape


# --- what is wanted, and what is not ---


@pytest.mark.parametrize("wants", ["xwb", "xw", "x", "w", "wb", "b", "xw-"])
@every_sketch
def test_only_what_is_wanted(variant, wants):
    """``-``: without a bias at all."""
    weight, bias = parameters()
    X, G = torch.randn(B, D).double(), torch.randn(B, N).double()
    sketch = variant(0.5)
    u = by_shape()
    full = fast(leaf(X), weight, bias, sketch, G, u)
    kinds = wants.removesuffix("-")
    tensors = [leaf(t, grad=k in kinds) for k, t in zip("xwb", (X, weight, bias), strict=True)]
    x, w, b = tensors
    sp.sketched_linear(x, w, b if kinds == wants else None, sketch, uniforms=u).backward(G)
    for tensor, expected in zip(tensors, full, strict=True):
        if tensor.requires_grad:
            torch.testing.assert_close(tensor.grad, expected, rtol=1e-12, atol=1e-12)
        else:
            assert tensor.grad is None


def test_only_the_bias_draws_nothing_when_it_is_exact():
    weight, bias = torch.randn(N, D), torch.randn(N, requires_grad=True)
    state = torch.get_rng_state()
    y = sp.sketched_linear(torch.randn(B, D, generator=torch.Generator()), weight, bias, sp.L1(1))
    y.sum().backward()
    assert torch.equal(bias.grad, torch.full((N,), float(B)))
    assert torch.equal(torch.get_rng_state(), state)


@every_sketch
def test_a_frozen_weight_saves_no_input(variant):
    weight, bias = parameters()
    x = leaf(torch.randn(B, D).double())
    sketch = variant(0.5)
    drawn_in_forward = "G" not in sketch.sees or getattr(sketch, "forward", None) is not None
    saved, _ = saved_by(lambda: sp.sketched_linear(x, weight.detach(), bias, sketch))
    assert holds(saved, x) == ("X" in sketch.sees and "G" in sketch.sees)
    saved, _ = saved_by(lambda: sp.sketched_linear(x, weight, bias, sketch))
    assert holds(saved, x) == (not drawn_in_forward)
    assert holds(saved, weight)


def test_a_frozen_input_saves_no_weight_and_computes_no_dx():
    weight, bias = parameters()
    x = torch.randn(B, D).double()
    saved, y = saved_by(lambda: sp.sketched_linear(x, weight, bias, sp.L1(2)))
    assert not holds(saved, weight)
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 2 * B * 2 * D


@every_sketch
def test_no_gradient_wanted_is_f_linear(variant):
    x, weight, bias = torch.randn(B, D), torch.randn(N, D), torch.randn(N)
    assert not sp.sketched_linear(x, weight, bias, variant(0.5)).requires_grad
    with torch.no_grad():
        assert not sp.sketched_linear(leaf(x), weight, bias, variant(0.5)).requires_grad


# --- cost ---


def backward_flops(sketch, B, n, d, *stack):
    x, weight = (torch.randn(*stack, rows, d, requires_grad=True) for rows in (B, n))
    y = F.linear(x, weight) if sketch is None else sp.sketched_linear(x, weight, None, sketch)
    G = torch.randn_like(y)
    with FlopCounterMode(display=False) as counter:
        y.backward(G)
    return counter.get_total_flops()


@pytest.mark.parametrize("budget", [0.1, 0.25, 7])
def test_products_are_as_small_as_the_budget_says(budget):
    B, n, d = 64, 40, 48
    assert backward_flops(None, B, n, d) == 4 * B * n * d
    for method in (sp.ColumnMask, sp.L1, sp.L2, sp.Variance, sp.Diagonal, sp.SampleMask):
        sketch = method(budget)
        flops = backward_flops(sketch, B, n, d)
        assert flops == sketch.cost(Size(B, n, d)).products
        assert flops < 0.3 * 4 * B * n * d
        assert backward_flops(sketch, B, n, d, 3) == 3 * flops
    for method in (sp.GradientSVD, sp.RankConstrained):
        # The products with W and X are thin; making the basis costs what its cost says.
        sketch = method(budget)
        r = sketch.rank_of(B, n, d)
        thin = 4 * r * d * (B + n) + 2 * r * B * n
        planned = backward_flops(sketch, B, n, d) - thin
        assert planned <= sketch.cost(Size(B, n, d)).scoring_products
