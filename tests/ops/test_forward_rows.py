"""Rows drawn in forward: unbiased, and only r rows of X are saved."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import sketchprop as sp
from law_table import exact_gradients
from linear_laws import saved_by
from sketchprop.core.enumeration import expectation
from sketchprop.core.samples import Samples
from sketchprop.layers import SketchedModule
from sketchprop.meters.cost.memory import saved_bytes
from sketchprop.ops import sketched_conv
from sketchprop.sketches import ForwardRows
from sketchprop.zoo import ViT

every_rule = pytest.mark.parametrize(
    "sketch", [ForwardRows(4, by="uniform"), ForwardRows(4)], ids=str
)


@pytest.mark.parametrize("shape", [(12, 4), (4, 3, 4), (2, 3, 2, 4)])
@every_rule
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_op_is_unbiased_and_dx_and_db_are_exact(sketch, shape, batch_first):
    x = torch.randn(shape).double().requires_grad_()
    weight = torch.randn(5, 4).double().requires_grad_()
    bias = torch.randn(5).double().requires_grad_()
    G = torch.randn(*shape[:-1], 5).double()
    with torch.no_grad():
        x.view(12, 4)[3] = 0
    sketch = replace(sketch, batch_first=batch_first)
    samples = sketch.samples_of(shape[:-1])
    X, rows = x.detach().reshape(12, 4), G.reshape(12, 5)
    true = exact_gradients(rows, weight.detach(), X)

    def gradients(uniforms):
        y = sp.sketched_linear(x, weight, bias, sketch, samples=samples, uniforms=uniforms)
        assert torch.equal(y, F.linear(x, weight, bias))
        dX, dW, db = torch.autograd.grad(y, (x, weight, bias), G)
        torch.testing.assert_close(dX.reshape(12, 4), true[0])
        torch.testing.assert_close(db, true[2])
        return (dW,)

    (mean,) = expectation(gradients)
    torch.testing.assert_close(mean, true[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    ("input", "rows"),
    [
        (sp.Rows(2, sampling="independent"), 3),
        (sp.ColumnMask(3), 100),  # more rows than there are: all of them, in their order
    ],
    ids=["coins", "all rows"],
)
def test_rows_of_x_belong_to_the_side_that_drew_them(input, rows, batch_first):
    sketch = sp.Split(input=input, weight=ForwardRows(rows), exact_bias=False)
    x = torch.randn(2, 3, 2).double().requires_grad_()
    weight = torch.randn(4, 2).double().requires_grad_()
    G = torch.randn(2, 3, 4).double()
    samples = Samples.of((2, 3), 0 if batch_first else 1)
    true = exact_gradients(G.view(6, 4), weight.detach(), x.detach().view(6, 2))

    def gradients(uniforms):
        y = sp.sketched_linear(x, weight, None, sketch, samples=samples, uniforms=uniforms)
        return torch.autograd.grad(y, (x, weight), G)

    dX, dW = expectation(gradients)
    torch.testing.assert_close(dX.view(6, 2), true[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(dW, true[1], rtol=0, atol=1e-10)


@every_rule
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("layer", ["linear", "frozen", "attention"])
def test_checkpointing_repeats_the_draw(sketch, reentrant, layer):
    """With the masks of dropout behind it: a reentrant one runs without a graph first."""
    last = nn.Linear(8, 8)
    if layer == "attention":
        last = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.3, batch_first=True)
    last.requires_grad_(layer != "frozen")
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), last, nn.Dropout(0.5)).double()
    x = torch.randn(10, 3, 6).double().requires_grad_()

    def grads(call):
        sp.sketch_(model, sketch, sp.select.everything)
        torch.manual_seed(1)
        call().square().sum().backward()
        got = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return got

    plain = grads(lambda: model(x))
    again = grads(lambda: checkpoint(model, x, use_reentrant=reentrant))
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b)


def test_compiles_without_breaks_and_saves_the_rows_only():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8)).double()
    sp.sketch_(model, ForwardRows(0.1), sp.select.everything)
    x = torch.randn(100, 16).double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    saved, y = saved_by(lambda: compiled(x))
    y.square().sum().backward()
    sizes = {tuple(t.shape) for t in saved}
    assert (10, 32) in sizes
    assert (100, 32) not in sizes
    true = y.detach() * 2
    torch.testing.assert_close(model[1].bias.grad, true.sum(0))


def test_autocast_works():
    x = torch.randn(20, 4, requires_grad=True)
    weight = torch.randn(5, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = sp.sketched_linear(x, weight, None, ForwardRows(0.2))
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32


# --- what is saved, by unique storage ---


def linear_bytes(model, loss, batch, names):
    report = saved_bytes(model, loss, batch)
    lines = {line.layer: line for line in report.layers}
    return sum(lines[name].saved for name in names), report


def loss_fn(model, batch):
    return model(batch).square().mean()


MODELS = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 8)),
        torch.randn(200, 64),
    ),
    "vit": lambda: (ViT(dim=32, depth=2, heads=2, hidden=64), torch.randn(8, 3, 32, 32)),
}


@pytest.mark.parametrize("name", MODELS)
def test_linear_inputs_cost_the_budget_and_little_more(name):
    model, x = MODELS[name]()
    sp.sketch_(model, ForwardRows(0.1))
    names = [n for n, m in model.named_modules() if isinstance(m, SketchedModule)]
    assert len(names) >= 2
    with sp.exact(model):
        # Summed over layers: each layer holds its input, shared or not.
        exact, whole = linear_bytes(model, loss_fn, x, names)
    kept, report = linear_bytes(model, loss_fn, x, names)
    assert kept <= 1.1 * 0.1 * exact
    assert report.total < whole.total


def test_a_buffer_that_another_operation_holds_is_reported_as_shared():
    x = torch.randn(100, 16)

    def saved(activation):
        model = nn.Sequential(nn.Linear(16, 32), activation, nn.Linear(32, 8))
        sp.sketch_(model, ForwardRows(0.1), sp.select.everything)
        with sp.exact(model):
            exact = saved_bytes(model, loss_fn, x)
        drawn = saved_bytes(model, loss_fn, x)
        line = next(line for line in exact.layers if line.layer == "2")
        return line, exact.total - drawn.total

    size = 100 * 32 * 4
    line, freed = saved(nn.GELU())  # GELU keeps its input, the linear layer GELU's output
    assert line.shared == 0
    assert freed > 0.8 * size
    line, freed = saved(nn.ReLU())  # ReLU keeps its own output: nothing to free
    assert line.shared == size
    assert freed < 0
    assert line.holders == ("(others)",)
    line, freed = saved(nn.LayerNorm(32))  # LayerNorm keeps its input
    assert line.shared == 0
    assert freed > 0.8 * size
    assert line.holders == ()


def test_summary_shows_what_is_saved():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    sp.sketch_(model, ForwardRows(0.25))
    first, last = sp.summary(model, rows=100).layers
    assert (first.saved, last.saved) == (0.25, 1.0)
    assert 0.5 < first.flops < 0.7
    assert "saved" in str(sp.summary(model))


def test_errors_say_what_to_type():
    with pytest.raises(ValueError, match="'uniform'"):
        ForwardRows(0.1, by="gradient")
    with pytest.raises(TypeError, match="linear layers and attention only"):
        sketched_conv(torch.randn(2, 3, 8, 8), torch.randn(4, 3, 1, 1), None, ForwardRows(0.3))
    with pytest.raises(ValueError, match="linear layers and attention only"):
        sp.sketch_(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)), ForwardRows(0.3))
    with pytest.raises(TypeError, match="not in gate"):
        sp.gate(torch.randn(4, 3, requires_grad=True), ForwardRows(0.5))
