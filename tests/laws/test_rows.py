"""Rows drawn by importance: the laws, the units, a sketch of the kept rows."""

import math

import pytest
import torch
from torch import nn

import sketchprop as sp
from law_table import exact_gradients, fixed, layer, products
from sketchprop.core.enumeration import expectation
from sketchprop.core.probabilities import optimal_probabilities
from sketchprop.core.samples import Samples
from sketchprop.core.vjp import Vjp

RULES = ("gradient", "gradient_input", "uniform")
SAMPLES = {
    "rows": Samples(1, 12, 1),
    "batch first": Samples(1, 4, 3),
    "sequence first": Samples(3, 4, 1),
    "between": Samples(2, 3, 2),
    "pixels": Samples(1, 4, 3, pixels=True),
}


def assert_close(got, wanted, tolerance=1e-10):
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, float(b.norm())))


# --- unbiased, whatever the weights and the unit ---


@pytest.mark.parametrize("unit", ["sample", "token", None])
@pytest.mark.parametrize("by", RULES)
@pytest.mark.parametrize("samples", SAMPLES.values(), ids=SAMPLES)
def test_unbiased_in_every_order_of_samples(samples, by, unit):
    G, W, X = layer(12, 5, 4)
    G[4] = 0
    X[7] = 0
    sketch = sp.Rows(2, by=by, unit=unit)
    vjp = Vjp(G, W, X, samples)
    p = sketch.atoms(vjp).probabilities
    whole = unit == "sample" or (unit is None and samples.pixels)
    assert p.numel() == (samples.samples if whole else 12)
    assert float(p.sum()) == pytest.approx(2)

    def draw(uniforms):
        drawn = sketch(vjp, uniforms)
        assert drawn.index.numel() == 2 * (samples.tokens if whole else 1)
        return *products(drawn, W, X), drawn.dense()

    assert_close(expectation(draw), [*exact_gradients(G, W, X), G])


@pytest.mark.parametrize("samples", SAMPLES.values(), ids=SAMPLES)
def test_a_sample_stays_together(samples):
    G, _, _ = layer(12, 5, 4)
    owner = torch.arange(12).view(samples.before, samples.samples, samples.after)
    owner = (owner // samples.after % samples.samples).flatten()
    for _ in range(10):
        kept = sp.Rows(2, unit="sample")(Vjp(G, samples=samples)).index
        assert sorted(kept.tolist()) == torch.isin(owner, owner[kept]).nonzero().flatten().tolist()
        assert owner[kept].unique().numel() == 2


def test_tokens_are_drawn_in_sample_major_order_whatever_the_memory_order():
    G, _, _ = layer(12, 5, 4)
    batch_first, sequence_first = Samples(1, 4, 3), Samples(3, 4, 1)
    moved = G.view(4, 3, 5).transpose(0, 1).reshape(12, 5)
    for u in torch.linspace(0, 0.99, 20, dtype=torch.float64):
        one = sp.Rows(5)(Vjp(G, samples=batch_first), fixed(u)).dense()
        two = sp.Rows(5)(Vjp(moved, samples=sequence_first), fixed(u)).dense()
        assert torch.equal(two.view(3, 4, 5).transpose(0, 1).reshape(12, 5), one)


def test_probabilities_are_the_optimum_for_dw():
    # Independent draws: the variance of dW is Σ ‖g‖²‖x‖²(1/p - 1); any other p has more.
    G, W, X = layer(40, 5, 4)
    X *= torch.rand(40, 1).double().exp().square()
    energy = G.square().sum(1) * X.square().sum(1)
    variances = {
        by: float((energy * (1 / sp.Rows(8, by=by).atoms(Vjp(G, W, X)).probabilities - 1)).sum())
        for by in RULES
    }
    best = float((energy * (1 / optimal_probabilities(energy, 8) - 1)).sum())
    assert best <= variances["gradient_input"] <= 1.05 * best
    assert variances["gradient_input"] < min(variances["gradient"], variances["uniform"])


# --- at most r units that are not zero: all of them, p = 1, nothing added ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("by", RULES)
@pytest.mark.parametrize("unit", ["sample", "token"])
def test_few_rows_are_kept_as_they_are(unit, by, dtype):
    samples = Samples(1, 10, 3)
    G, _, X = layer(30, 5, 4, dtype=dtype)
    for count in (1, 3):
        alive = torch.zeros(10, 3, dtype=torch.bool)
        alive[torch.randperm(10)[:count]] = True
        few = (G * alive.view(30, 1)).contiguous()
        few[few.norm(dim=1) > 0] *= 10 ** torch.randn(3 * count, 1).to(dtype)
        sketch = sp.Rows(3 if unit == "sample" else 9, by=by, unit=unit)
        for _ in range(5):
            assert torch.equal(sketch(Vjp(few, None, X, samples)).dense(), few)


class Encoder(nn.Module):
    """Two pre-norm blocks with attention and residuals, a mean over tokens, a head."""

    def __init__(self, batch_first=True):
        super().__init__()
        options = {"dropout": 0.0, "batch_first": batch_first, "norm_first": True}
        blocks = (nn.TransformerEncoderLayer(8, 2, 16, **options) for _ in range(2))
        self.body = nn.Sequential(nn.Linear(6, 8), *blocks)
        self.head = nn.Linear(8, 3)
        self.axis = 1 if batch_first else 0

    def forward(self, x):
        return self.head(self.body(x).mean(self.axis))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("by", RULES)
def test_one_draw_at_the_head_serves_a_whole_transformer(by, batch_first):
    """Below the head the gradients are those of exact layers, given the head's one draw."""
    model = Encoder(batch_first).double()
    x = torch.randn((16, 5, 6) if batch_first else (5, 16, 6)).double()
    target = torch.randint(0, 3, (16,))
    seen = {}

    def pooled(module, args):
        seen["features"] = args[0]
        args[0].retain_grad()

    model.head.register_forward_pre_hook(pooled)
    sketch = sp.Rows(4, by=by, unit="sample", batch_first=batch_first)
    sp.sketch_(model, sketch, sp.select.everything)
    nn.functional.cross_entropy(model(x), target).backward()
    drawn = seen["features"].grad
    assert (drawn.norm(dim=1) > 0).sum() == 4
    got = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with sp.exact(model):
        model(x)
        seen["features"].backward(drawn)
    for name, p in model.named_parameters():
        if not name.startswith("head"):
            torch.testing.assert_close(got[name], p.grad, rtol=1e-9, atol=1e-12)


def test_convolutions_keep_whole_images():
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 4, 1),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3, stride=2),
    ).double()
    x = torch.randn(10, 3, 8, 8).double().requires_grad_()
    sp.sketch_(model, sp.Rows(3), sp.select.everything)
    model(x).square().sum().backward()
    kept = x.grad.flatten(1).norm(dim=1) > 0
    assert kept.sum() == 3


@pytest.mark.parametrize("by", RULES)
@pytest.mark.parametrize("unit", ["sample", "token"])
def test_a_frozen_weight_and_a_stack(by, unit):
    sketch = sp.Rows(0.5, by=by, unit=unit)
    x = torch.randn(3, 6, 2, 4, requires_grad=True)
    W = torch.randn(3, 5, 4)
    sp.sketched_linear(x, W, None, sketch).square().sum().backward()
    kept = (x.grad.norm(dim=-1) > 0).view(3, 6, 2)
    if unit == "sample":
        assert (kept.all(-1).sum(-1) == 3).all()
        assert (kept.any(-1) == kept.all(-1)).all()
    else:
        assert (kept.sum((1, 2)) == 6).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("by", RULES)
@pytest.mark.parametrize("unit", ["sample", "token"])
def test_a_non_finite_gradient_is_never_hidden(unit, by, bad):
    G, W, X = layer(12, 5, 4)
    G[7, 2] = bad
    for _ in range(20):
        vjp = Vjp(G, W, X, Samples(1, 4, 3))
        drawn = sp.Rows(2, by=by, unit=unit)(vjp)
        assert all(not part.isfinite().all() for part in products(drawn, W, X))


def test_a_gate_keeps_whole_samples():
    x = torch.randn(8, 3, 5, requires_grad=True)
    sp.gate(x, sp.Rows(2, unit="sample")).square().sum().backward()
    kept = x.grad.norm(dim=-1) > 0
    assert kept.all(1).sum() == kept.any(1).sum() == 2
    with pytest.raises(TypeError, match="not in gate"):
        sp.gate(x, sp.Rows(2, by="gradient_input"))


# --- errors ---


def test_errors_say_what_to_type():
    with pytest.raises(ValueError, match="gradient_input"):
        sp.Rows(0.1, by="norm")
    with pytest.raises(ValueError, match="unit='sample'"):
        sp.Rows(0.1, unit="row")
    with pytest.raises(TypeError, match=r"pass Vjp\(G, W, X\)"):
        sp.Rows(0.1, by="gradient_input")(Vjp(torch.randn(20, 3)))
