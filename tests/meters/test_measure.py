"""measure(): σ², V, its origin and the verdict, against truths known otherwise."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import sketchprop as sp
from measure_helpers import Branched, loss_fn, make_batches, mlp
from sketchprop.core.compact import ColumnAtoms
from sketchprop.core.cost import Size
from sketchprop.core.vjp import Vjp
from sketchprop.layers import SketchedModule, Sketching
from sketchprop.meters import Estimate, Times, criterion, measure_variance
from sketchprop.meters.noise.estimate import minibatch_variance, over_draws, variance_ratio
from sketchprop.meters.noise.variance import alignment, surprising
from sketchprop.sketches import RowSketch

Z = 4.5
"""Standard errors allowed: beyond this by chance less than once in 100,000 comparisons."""


def brute_force(model, batches, draws):
    """V by plain training steps: .backward() with torch's own generator, nothing of the meter."""
    totals = []
    for batch in batches:
        with sp.exact(model):
            model.zero_grad()
            loss_fn(model, batch).backward()
            exact = [p.grad.clone() for p in model.parameters()]
        values = []
        for _ in range(draws):
            model.zero_grad()
            loss_fn(model, batch).backward()
            pairs = zip(model.parameters(), exact, strict=True)
            values.append(sum(float((p.grad - g).double().square().sum()) for p, g in pairs))
        totals.append(values)
    return over_draws(totals)


def agree(a, b):
    return abs(a.value - b.value) <= Z * math.hypot(a.draw_error, b.draw_error)


# --- V ---------------------------------------------------------------------------------------


def test_one_layer_agrees_with_the_closed_form():
    """Σ wᵢ(1/pᵢ - 1), wᵢ = ‖gᵢ‖²‖X‖-weighted: for independent columns of dW and db."""
    torch.manual_seed(1)
    model = nn.Linear(8, 12)
    batches = [torch.randn(24, 8) for _ in range(3)]
    target = torch.randn(24, 12)

    def quadratic(m, x):
        return (m(x) - target).square().mean()

    sketch = sp.L2(0.3, sampling="independent", exact_bias=False)
    sp.sketch_(model, sketch, lambda module, name: True)
    report = measure_variance(model, quadratic, batches, draws=400)
    expected = []
    for x in batches:
        y = model(x).detach().requires_grad_()
        (G,) = torch.autograd.grad((y - target).square().mean(), y)
        p = sketch.atoms(Vjp(G, model.weight)).probabilities
        w = (G.mT @ x).square().sum(1) + G.sum(0).square()  # the atom's share of ‖dW‖² + ‖db‖²
        expected.append(float((w * (1 / p - 1)).sum()))
    truth = sum(expected) / len(expected)
    assert abs(report.added.value - truth) <= Z * report.added.draw_error
    assert report.added.draw_error < 0.1 * truth
    assert [line.layer for line in report.layers] == [""]
    assert report.layers[0].injected == report.added


def test_a_whole_mlp_agrees_with_brute_force():
    torch.manual_seed(2)
    model = sp.sketch_(mlp(), sp.L1(0.5))
    batches = make_batches()
    report = measure_variance(model, loss_fn, batches, draws=150)
    truth = brute_force(model, batches, 400)
    assert agree(report.added, truth)
    assert report.added.draw_error < 0.1 * truth.value


def test_the_whole_budget_adds_nothing():
    model = sp.sketch_(Branched(), sp.L1(1.0))
    report = sp.measure(model, loss_fn, make_batches(), rounds=0)
    assert report.added == Estimate(0.0, 0.0, 0.0)
    assert report.relative.value == 0
    assert report.flops.kept == 1
    assert report.flops.overhead == 0
    assert report.equivalent_batch == 1
    assert report.verdict.change == 1
    assert all(line.injected.value == 0 for line in report.variance.layers)


def test_sigma2_is_the_variance_between_batches():
    torch.manual_seed(3)
    model = sp.sketch_(mlp(), sp.L1(0.5))
    batches = make_batches(5)
    report = measure_variance(model, loss_fn, batches, draws=2, split=False)
    rows = []
    with sp.exact(model):
        for batch in batches:
            grads = torch.autograd.grad(loss_fn(model, batch), list(model.parameters()))
            rows.append(torch.cat([g.flatten() for g in grads]).double())
    gradients = torch.stack(rows)
    assert report.sigma2.value == pytest.approx(float(gradients.var(0).sum()), rel=1e-6)
    # The jackknife, done the long way.
    parts = [float(torch.cat([gradients[:i], gradients[i + 1 :]]).var(0).sum()) for i in range(5)]
    spread = torch.tensor(parts, dtype=torch.float64)
    error = float((4 / 5 * (spread - spread.mean()).square().sum()).sqrt())
    assert report.sigma2.error == pytest.approx(error, rel=1e-5)
    assert report.layers == ()
    assert report.remainder is None


# --- where V comes from ----------------------------------------------------------------------


@pytest.mark.parametrize("sketch", [sp.L1(0.5), sp.SampleMask(0.5, sampling="independent")])
def test_layers_sum_to_the_total(sketch):
    torch.manual_seed(4)
    model = sp.sketch_(Branched(), sketch)
    report = measure_variance(model, loss_fn, make_batches(2), draws=80)
    assert {line.layer for line in report.layers} == {"a", "q", "k", "o"}
    parts = sum(line.injected.value for line in report.layers)
    assert report.remainder.value == pytest.approx(report.added.value - parts, rel=1e-9)
    assert abs(report.remainder.value) <= Z * report.remainder.draw_error
    assert report.reliable
    # The remainder is a small share: the split explains the total, not its error bars.
    assert report.remainder.draw_error < 0.15 * report.added.value


def test_the_top_layer_injects_what_it_would_alone():
    """Nothing noisy reaches the layer that backward meets first: it adds what it adds alone."""
    torch.manual_seed(5)
    model, batches = mlp(), make_batches()
    every = lambda module, name: True  # noqa: E731
    sp.sketch_(model, sp.L1(0.5), every)
    together = measure_variance(model, loss_fn, batches, draws=100)
    sp.unsketch_(model)
    sp.sketch_(model, sp.L1(0.5), lambda module, name: name == "4")
    alone = measure_variance(model, loss_fn, batches, draws=100)
    top = next(line for line in together.layers if line.layer == "4")
    assert agree(top.injected, alone.added)
    # The lowest layer, on the other hand, gets noisy gradients and injects more than alone.
    sp.unsketch_(model)
    sp.sketch_(model, sp.L1(0.5), lambda module, name: name == "0")
    first_alone = measure_variance(model, loss_fn, batches, draws=100)
    bottom = next(line for line in together.layers if line.layer == "0")
    assert bottom.injected.value > first_alone.added.value + Z * first_alone.added.draw_error


def test_a_biased_sketch_does_not_pass_for_one_whose_layers_sum_to_the_total():
    class Twice(ColumnAtoms):
        def keep(self, vjp, index, scale):
            return super().keep(vjp, index, 2 * scale)

    class Doubled(sp.L1):
        def atoms(self, vjp):
            right = super().atoms(vjp)
            return Twice(right.probabilities, right.rank, right.sampling)

    torch.manual_seed(7)
    model = sp.sketch_(mlp(), Doubled(0.5), lambda module, name: True)
    report = measure_variance(model, loss_fn, make_batches(2), draws=40)
    assert not report.reliable
    assert abs(report.remainder.value) > 2 * Z * report.remainder.draw_error


def test_rare_draws_are_noticed():
    """Six of 128 rows, redrawn at each of four layers: V is near 20³ σ², and hardly ever met."""
    torch.manual_seed(15)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    batches = [(torch.randn(128, 8), torch.randint(0, 8, (128,))) for _ in range(3)]
    rare = dict.fromkeys("0123", sp.SampleMask(0.05))
    report = sp.measure(model, loss_fn, batches, rare, rounds=0)
    assert not report.pays
    report = replace(report, by_time=criterion(report.relative, 1e-9))
    assert report.variance.draws == 64  # the pilot was surprised and asked for all it may
    assert not report.variance.reliable
    assert report.variance.missed["0.weight"].value == pytest.approx(-1, abs=0.2)
    assert "3.weight" not in report.variance.missed
    assert report.verdict.pays
    assert not report.pays
    assert "NOT RELIABLE" in str(report)
    assert report.as_dict()["reliable"] is False
    # Half of the columns at each layer: noisy, but every draw shows it.
    calm = sp.measure(model, loss_fn, batches, dict.fromkeys("0123", sp.L1(0.5)), rounds=0)
    assert calm.variance.reliable
    assert "NOT RELIABLE" not in str(calm)


@pytest.mark.parametrize(("size", "expected"), [(1e-9, 0.0), (1e-3, -1.0), (0.0, 0.0)])
def test_what_rounding_leaves_of_a_zero_gradient_is_aligned_with_nothing(size, expected):
    exact = [torch.ones(4), torch.full((4,), size)]
    assert alignment([torch.ones(4), torch.zeros(4)], exact) == pytest.approx([0.0, expected])


# --- randomness that is not the sketches' ----------------------------------------------------


def test_attention_with_its_own_dropout():
    torch.manual_seed(8)
    block = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.3, batch_first=True)
    model = sp.sketch_(nn.Sequential(block, nn.Linear(16, 4)), sp.L1(1.0))
    batches = [torch.randn(4, 5, 16) for _ in range(2)]

    def square(m, x):
        return m(x).square().mean()

    assert measure_variance(model, square, batches, draws=3).added.value == 0
    sp.sketch_(model, sp.L1(0.5))
    report = measure_variance(model, square, batches, draws=60)
    assert len(report.layers) == 3
    assert abs(report.remainder.value) <= Z * report.remainder.draw_error
    assert report.added.draw_error < 0.3 * report.added.value


def test_draws_made_in_forward_are_measured_too():
    class EarlyMask(SketchedModule, nn.Linear):
        """Keeps each row of its gradient with probability ½, drawn in forward."""

        def forward(self, x):
            out = nn.Linear.forward(self, x)
            if self.is_sketching():
                mask = (torch.rand(len(x), 1) < 0.5) * 2.0
                out.register_hook(lambda grad: grad * mask)
            return out

    torch.manual_seed(9)
    layer = EarlyMask(8, 4)
    layer.sketching = Sketching(sp.SampleMask(0.5))
    model = nn.Sequential(layer)
    batches = make_batches()
    report = measure_variance(model, loss_fn, batches, draws=300)
    truth = 0.0
    for x, y in batches:
        out = model(x).detach().requires_grad_()
        (G,) = torch.autograd.grad(F.cross_entropy(out, y), out)
        truth += float((G.square().sum(1) * (x.square().sum(1) + 1)).sum()) / len(batches)
    assert abs(report.added.value - truth) <= Z * report.added.draw_error


def test_activation_checkpointing_measures_the_same():
    class Checkpointed(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body
            self.on = False

        def forward(self, x):
            x = self.body[0](x)
            if not self.on:
                return self.body[1:](x)
            return checkpoint(self.body[1:], x, use_reentrant=False)

    torch.manual_seed(10)
    model = Checkpointed(mlp())
    sp.sketch_(model, sp.L1(0.5), lambda module, name: True)
    batches = make_batches(2)
    plain = measure_variance(model, loss_fn, batches, draws=4)
    model.on = True
    again = measure_variance(model, loss_fn, batches, draws=4)
    assert again.added.value == pytest.approx(plain.added.value, rel=1e-5)
    for a, b in zip(again.layers, plain.layers, strict=True):
        assert a.injected.value == pytest.approx(b.injected.value, rel=1e-5)


def test_the_same_seed_measures_the_same():
    model, batches = sp.sketch_(Branched(), sp.L1(0.5)), make_batches()
    reports = [measure_variance(model, loss_fn, batches, draws=3, seed=s) for s in (1, 1, 2)]
    assert reports[0] == reports[1]
    assert reports[0].added != reports[2].added


# --- the verdict -----------------------------------------------------------------------------


def test_where_sketching_pays_and_where_it_does_not():
    """Truth known: wide layers and rare rows that carry all the gradient, or even rows."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256))
    target = torch.randn(64, 256)

    def weighted(m, batch):
        x, w = batch
        return (w[:, None] * (m(x) - target).square()).mean()

    class RowNorm(RowSketch):
        def importance(self, vjp):
            return vjp.G.square().sum(-1)

    rare = torch.zeros(64).scatter_(0, torch.randperm(64)[:6], 1.0)
    even = torch.ones(64)
    every = {"0": RowNorm(0.1), "2": RowNorm(0.1)}
    # Six of 64 rows carry everything and six are kept: no variance at a tenth of the backward.
    batches = [(torch.randn(64, 64), rare) for _ in range(4)]
    report = sp.measure(model, weighted, batches, every, draws=4, rounds=0)
    assert report.relative.value < 1e-9
    assert report.flops.kept < 0.2
    assert report.pays
    assert report.verdict.certain
    assert report.verdict.basis == "FLOPs"
    # Even rows: a tenth of them is a tenth of the batch, ten times the noise for half the cost.
    batches = [(torch.randn(64, 64), even) for _ in range(4)]
    report = sp.measure(model, weighted, batches, every, draws=8, rounds=0)
    assert report.relative.value > 2
    assert not report.pays
    assert report.verdict.certain
    assert "does not pay" in str(report)


def test_times_decide_where_there_are_some():
    torch.manual_seed(12)
    report = sp.measure(sp.sketch_(mlp(), sp.L1(0.5)), loss_fn, make_batches(4), draws=8, rounds=2)
    steps = 1 + report.relative.value / (1 + report.variance.relative_signal)
    assert report.verdict is report.by_time
    assert report.by_time.change == pytest.approx(report.times.ratio * steps)
    for cost in (0.01, 1.1):
        by_time = criterion(report.relative, cost, signal=report.variance.relative_signal)
        assert replace(report, by_time=by_time).pays == (cost < 1)
    # An optimizer that costs nine times as much dilutes the gain.
    assert Times(1.0, 0.01, 0.01, 0.0, 7).with_overhead(9.0).ratio == pytest.approx(9.01 / 10)


def test_the_signal_is_the_square_of_the_mean_gradient():
    """g = w + noise of known variance over 40 batches: within a tenth, three standard errors."""
    torch.manual_seed(5)
    model = sp.sketch_(nn.Linear(50, 1, bias=False), sp.Rows(0.5), sp.select.everything)
    mean = torch.ones(50)
    batches = [mean + torch.randn(4, 50) for _ in range(40)]
    report = measure_variance(model, lambda m, x: m(x).mean(), batches, draws=2)
    assert report.sigma2.value == pytest.approx(50 / 4, rel=0.1)
    assert report.signal == pytest.approx(50, rel=0.1)
    assert report.relative_signal == pytest.approx(4, rel=0.2)


def test_criterion_and_its_error():
    verdict = criterion(Estimate(0.5, 0.1), 0.6, 0.05)
    assert verdict.change == pytest.approx(0.9)
    assert verdict.error == pytest.approx(math.hypot(0.6 * 0.1, 1.5 * 0.05))
    assert verdict.pays
    assert not verdict.certain
    assert not criterion(Estimate(math.inf, math.inf), 0.1).pays
    # With a signal of σ² the same noise is half as much of all: 0.6 (2 + 0.5)/2.
    assert criterion(Estimate(0.5, 0.1), 0.6, signal=1.0).change == pytest.approx(0.75)


def test_errors_of_estimates_cover():
    """The stated error of V/σ² is the spread that repeated measurements have."""
    generator = torch.Generator().manual_seed(0)
    ratios, errors = [], []
    for _ in range(400):
        gradients = torch.randn(8, 20, generator=generator, dtype=torch.float64)
        deviations = (gradients - gradients.mean(0)).square().sum(1).tolist()
        added = (torch.rand(8, 5, generator=generator, dtype=torch.float64) * 10).tolist()
        assert minibatch_variance(deviations).value == pytest.approx(float(gradients.var(0).sum()))
        ratio = variance_ratio(added, deviations)
        ratios.append(ratio.value)
        errors.append(ratio.error**2)
    spread = torch.tensor(ratios).std()
    assert float(spread) == pytest.approx((sum(errors) / len(errors)) ** 0.5, rel=0.2)


def test_the_report_is_plain_data():
    model, batches = sp.sketch_(Branched(), sp.L1(0.5)), make_batches(2)
    report = sp.measure(model, loss_fn, batches, draws=2, rounds=1)
    data = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert data["variance"]["added"]["value"] == report.added.value
    assert data["variance"]["relative"]["error"] is None  # unknown from two batches
    assert data["pays"] is report.pays
    assert [line["layer"] for line in data["variance"]["layers"]] == ["a", "q", "k", "o"]
    text = str(report)
    for word in ("σ²", "V/σ²", "by time", "in FLOPs", "saved for backward"):
        assert word in text


def test_flops_of_a_step_equal_the_formulas():
    model = sp.sketch_(mlp(), sp.L1(0.25))
    report = sp.measure(model, loss_fn, make_batches(rows=32), draws=2, rounds=0)
    # 8-16-16-4 on 32 rows; the first layer owes no dX; the last one is exact.
    exact = [2 * 32 * 16 * 8, 4 * 32 * 16 * 16, 4 * 32 * 4 * 16]
    assert report.flops.exact_backward == sum(exact)
    assert report.flops.forward == 2 * 32 * (8 * 16 + 16 * 16 + 16 * 4)
    products = 2 * 32 * 4 * 8 + 4 * 32 * 4 * 16 + exact[2]
    sizes = Size(32, 16, 8, input_grad=False), Size(32, 16, 16)
    planning = sum(sp.L1(0.25).cost(size).overhead for size in sizes)
    assert report.flops.overhead == planning
    assert report.flops.sketched_backward == products + planning


# --- bad input -------------------------------------------------------------------------------


def test_bad_input_is_refused_with_a_way_out():
    model, batches = mlp(), make_batches()
    with pytest.raises(ValueError, match="no sketched layer; call sketch_"):
        sp.measure(model, loss_fn, batches)
    sp.sketch_(model, sp.L1(0.5))
    with pytest.raises(ValueError, match=r"shape \(24, 4\); return a scalar"):
        sp.measure(model, lambda m, b: m(b[0]), batches)
    with pytest.raises(ValueError, match="returned a float; return a scalar"):
        sp.measure(model, lambda m, b: loss_fn(m, b).item(), batches)
    with pytest.raises(ValueError, match="without a graph"):
        sp.measure(model, lambda m, b: loss_fn(m, b).detach(), batches)
    with pytest.raises(ValueError, match="draws=1 has no spread"):
        sp.measure(model, loss_fn, batches, draws=1)
    with pytest.raises(ValueError, match="every sketch of Sequential is off"), sp.exact(model):
        sp.measure(model, loss_fn, batches)
    with pytest.raises(TypeError) as error:
        sp.measure(model, F.cross_entropy, batches)
    assert "loss_fn(model, batch)" in "".join(error.value.__notes__)
    with pytest.raises(ValueError, match="not finite"):
        sp.measure(model, lambda m, b: loss_fn(m, b) * math.inf, batches)


# --- few draws -------------------------------------------------------------------------------


def test_few_draws_of_an_unbiased_sketch_pass_for_reliable():
    """20,000 parameters, four batches of two normal draws: one in a million may surprise.

    With five standard errors, however few draws they come from, hundreds would.
    """
    draws = torch.randn(20_000, 4, 2, generator=torch.Generator().manual_seed(5)).double()
    errors = (draws.var(-1) / 2).mean(-1).div(4).sqrt()
    assert int((draws.mean((1, 2)).abs() > 5 * errors).sum()) > 100
    assert not any(surprising(values) for values in draws.tolist())
    assert surprising((draws[0] + 1000 * errors[0]).tolist())


def test_noise_that_the_loss_draws_is_no_signal():
    """Denoising: σ² is that of draws, too. Of 32 batches ‖g‖² had it as a gradient in common."""

    def denoised(model, x):
        noisy = x + torch.randn_like(x)
        return (model(noisy) - x).square().mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    x = torch.randn(4, 8)
    batches = [x + 1e-6 * k for k in range(32)]  # the same samples: all noise is the loss's
    variance = sp.measure(model, denoised, batches, sp.L1(0.5), draws=2, rounds=0).variance
    parameters = list(model.parameters())
    drawn = [torch.autograd.grad(denoised(model, x), parameters) for _ in range(400)]
    flat = torch.stack([torch.cat([g.flatten() for g in gradient]) for gradient in drawn])
    assert variance.sigma2.value == pytest.approx(float(flat.var(0).sum()), rel=0.4)
