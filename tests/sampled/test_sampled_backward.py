"""The whole backward on a few samples: unbiased for every parameter, in every kind of loop."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import distributed_helpers as processes
import sketchprop as sp
from sketchprop.core.enumeration import expectation


class Residual(nn.Module):
    """Dropout in a residual branch, attention with dropout, a norm."""

    def __init__(self, dropout=0.3, batch_first=True):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=batch_first)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 3)
        self.axis = 1 if batch_first else 0

    def forward(self, x):
        x = self.embed(x)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.dropout(self.down(F.gelu(self.up(self.dropout(x)))))
        return self.head(x.mean(self.axis))


def batch(samples=8, batch_first=True):
    shape = (samples, 4, 6) if batch_first else (4, samples, 6)
    return torch.randn(shape).double(), torch.randint(0, 3, (samples,))


def gradients(model):
    got = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return got


def exact_gradients(model, x, y, seed):
    torch.manual_seed(seed)
    F.cross_entropy(model(x), y).backward()
    return gradients(model)


def fixed(u):
    """Uniforms that are always u."""
    return lambda p, shape: torch.full(shape, u, dtype=torch.float64)


def mean_gradients(model, run, seed=0):
    """E of each gradient that ``run(uniforms)`` makes, over all draws, with the same masks."""
    names = [name for name, _ in model.named_parameters()]

    def grads(uniforms):
        torch.manual_seed(seed)
        run(uniforms)
        found = gradients(model)
        return tuple(found[name] for name in names)

    return dict(zip(names, expectation(grads), strict=True))


def assert_same(got, wanted):
    for name, g in wanted.items():
        torch.testing.assert_close(got[name], g, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_unbiased_for_every_parameter_with_the_same_masks(dropout, batch_first):
    model = Residual(dropout, batch_first).double()
    x, y = batch(8, batch_first)
    wanted = exact_gradients(model, x, y, seed=3)

    class SampleFirst(nn.Module):
        """A sequence-first network whose outputs have the samples first, its inputs too."""

        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x if batch_first else x.transpose(0, 1))

    given = x if batch_first else x.transpose(0, 1)

    def run(uniforms):
        sp.sampled_backward(SampleFirst(), F.cross_entropy, given, y, 3, uniforms=uniforms)

    assert_same(mean_gradients(model, run, seed=3), wanted)


def test_it_returns_the_loss_of_the_whole_batch_and_keeps_few_samples():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    x, y = torch.randn(20, 6).double(), torch.randint(0, 3, (20,))
    seen = []
    model.register_forward_hook(lambda m, a, out: seen.append((a[0].shape[0], out.requires_grad)))
    loss = sp.sampled_backward(model, F.cross_entropy, x, y, 0.1)
    assert seen == [(20, False), (2, True)]
    torch.testing.assert_close(loss, F.cross_entropy(model(x), y).detach())
    assert not loss.requires_grad


def test_a_loss_that_couples_samples_is_unbiased():
    """Only the model must treat samples apart; the loss may look at all of them."""
    model = nn.Linear(4, 3).double()
    x = torch.randn(6, 4).double()

    def contrast(out, _):
        z = F.normalize(out, dim=1)
        return (z @ z.mT).exp().mean()

    contrast(model(x), None).backward()
    wanted = gradients(model)

    def run(uniforms):
        sp.sampled_backward(model, contrast, x, None, 2, uniforms=uniforms)

    assert_same(mean_gradients(model, run), wanted)


def test_samples_without_a_gradient_cost_nothing():
    model = nn.Linear(4, 1).double()
    x, y = torch.randn(12, 4).double(), torch.zeros(12).double()

    def loss(out, y):
        return out[:3].square().sum()

    loss(model(x), y).backward()
    wanted = gradients(model)
    for _ in range(5):
        sp.sampled_backward(model, loss, x, y, 3)
        for name, g in gradients(model).items():
            torch.testing.assert_close(g, wanted[name])


def test_budget_one_and_evaluation_are_the_plain_loss():
    model = Residual(0.2).double()
    x, y = batch(6)
    wanted = exact_gradients(model, x, y, seed=1)
    torch.manual_seed(1)
    sp.sampled_backward(model, F.cross_entropy, x, y, 1.0)
    for name, g in gradients(model).items():
        assert torch.equal(g, wanted[name])
    model.eval()
    with torch.no_grad():
        assert not sp.sampled_loss(model, F.cross_entropy, x, y, 0.5).requires_grad


def test_the_random_state_moves_on():
    model = Residual(0.3).double()
    x, y = batch(6)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = sp.sampled_backward(model, F.cross_entropy, x, y, 2)
    assert not torch.equal(before, torch.get_rng_state())
    assert not torch.equal(first, sp.sampled_backward(model, F.cross_entropy, x, y, 2))


def test_accumulation_and_scaling_are_those_of_a_loss():
    model = nn.Linear(6, 3).double()
    x, y = torch.randn(10, 6).double(), torch.randint(0, 3, (10,))
    u = fixed(0.4)
    sp.sampled_backward(model, F.cross_entropy, x, y, 3, uniforms=u)
    one = gradients(model)
    for _ in range(2):
        (sp.sampled_loss(model, F.cross_entropy, x, y, 3, uniforms=u) * 8).backward()
    for name, g in gradients(model).items():
        torch.testing.assert_close(g, 16 * one[name])


def test_autocast():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    x, y = torch.randn(10, 16), torch.randint(0, 3, (10,))
    u = fixed(0.4)
    sp.sampled_backward(model, F.cross_entropy, x, y, 4, uniforms=u)
    full = gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = sp.sampled_backward(model, F.cross_entropy, x, y, 4, uniforms=u)
    assert loss.dtype == torch.float32
    for name, g in gradients(model).items():
        assert g.dtype == torch.float32
        assert (g - full[name]).norm() < 0.1 * full[name].norm()


def test_compiled_models():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    x, y = torch.randn(10, 6).double(), torch.randint(0, 3, (10,))
    u = fixed(0.4)
    sp.sampled_backward(model, F.cross_entropy, x, y, 3, uniforms=u)
    wanted = gradients(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    sp.sampled_backward(compiled, F.cross_entropy, x, y, 3, uniforms=u)
    for name, g in gradients(model).items():
        torch.testing.assert_close(g, wanted[name])


def test_compiled_dropout_has_the_same_masks_or_is_refused():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    x, y = torch.randn(10, 6).double(), torch.randint(0, 3, (10,))
    u = fixed(0.4)
    torch.manual_seed(2)
    sp.sampled_backward(model, F.cross_entropy, x, y, 3, uniforms=u)
    wanted = gradients(model)
    compiled = torch.compile(model, backend="inductor")
    torch.manual_seed(2)
    try:
        sp.sampled_backward(compiled, F.cross_entropy, x, y, 3, uniforms=u)
    except RuntimeError as error:
        assert "without torch.compile" in str(error)  # noqa: PT017
    else:
        for name, g in gradients(model).items():
            torch.testing.assert_close(g, wanted[name])


def in_ddp() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    x, y = torch.randn(10, 6).double(), torch.randint(0, 3, (10,))
    u = fixed(0.4)
    torch.manual_seed(2)
    sp.sampled_backward(model, F.cross_entropy, x, y, 3, uniforms=u)
    found = [gradients(model)]
    parallel = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        torch.manual_seed(2)
        sp.sampled_backward(parallel, F.cross_entropy, x, y, 3, uniforms=u)
        found.append(gradients(model))
    return {"gradients": found}


def test_in_ddp(tmp_path):
    """In a process of its own: gloo's group waits for the interpreter's lock now and then, for
    ever, when it is freed while others work."""
    (record,) = processes.of(processes.run(tmp_path, 1, (in_ddp,), limit=120), in_ddp)
    wanted, *found = record["gradients"]
    assert len(found) == 2
    for one in found:
        for name, g in one.items():
            torch.testing.assert_close(g, wanted[name])


def test_non_finite_gradients_stay_visible():
    model = nn.Linear(4, 3)
    x, y = torch.randn(20, 4), torch.randint(0, 3, (20,))
    x[7] = math.nan
    for _ in range(5):
        sp.sampled_backward(model, F.cross_entropy, x, y, 2)
        assert not gradients(model)["weight"].isfinite().all()


def test_sketched_layers_inside():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    x, y = torch.randn(12, 6).double(), torch.randint(0, 3, (12,))
    sp.sketch_(model, sp.L1(0.5))

    def loss():
        return sp.sampled_loss(model, F.cross_entropy, x, y, 0.5)

    def draws(exact):
        total = None
        for i in range(2000 if not exact else 1):
            torch.manual_seed(i)
            (F.cross_entropy(model(x), y) if exact else loss()).backward()
            g = torch.cat([v.flatten() for v in gradients(model).values()])
            total = [g] if total is None else [*total, g]
        return torch.stack(total)

    with sp.exact(model):
        true = draws(True)[0]
    drawn = draws(False)
    # Along the true gradient: z below 5 for 2,000 draws.
    along = (drawn - true) @ (true / true.norm())
    assert abs(float(along.mean())) < 5 * float(along.std()) / 2000**0.5


def test_keyword_inputs_and_several_outputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x, *, shift):
            return {"a": self.a(x + shift), "b": self.b(x), "unused": x.sum()}

    model = Two().double()
    inputs = {"x": torch.randn(8, 4).double(), "shift": torch.ones(4).double()}
    y = torch.randint(0, 3, (8,))

    def loss_fn(out, y):
        return F.cross_entropy(out["a"], y) + out["b"].square().mean()

    loss = sp.sampled_backward(model, loss_fn, inputs, y, 3)
    torch.testing.assert_close(loss, loss_fn(model(**inputs), y).detach())
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


def test_refusals_say_what_to_do():
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    norm = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"'1' is a BatchNorm1d.*eval\(\)"):
        sp.sampled_backward(norm, F.cross_entropy, x, y, 0.5)
    norm[1].eval()
    sp.sampled_backward(norm, F.cross_entropy, x, y, 0.5)

    plain = nn.Linear(6, 3)
    with pytest.raises(ValueError, match="return a scalar"):
        sp.sampled_backward(plain, lambda o, y: o, x, y, 0.5)
    with pytest.raises(ValueError, match="does not depend on the outputs"):
        sp.sampled_backward(plain, lambda o, y: torch.zeros(()), x, y, 0.5)
    with pytest.raises(ValueError, match="no axis of 8 samples"):
        sp.sampled_backward(lambda x: plain(x).mean(), lambda o, y: o, x, y, 0.5)
    with pytest.raises(TypeError, match="no tensor"):
        sp.sampled_backward(plain, F.cross_entropy, "x", y, 0.5)
    with pytest.raises(ValueError, match="by='gradient'"):
        sp.sampled_backward(plain, F.cross_entropy, x, y, 0.5, by="input")


def test_dropout_inside_checkpointing_is_refused():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(checkpoint(self.part, x, use_reentrant=False))

    model = Checkpointed()
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    with pytest.raises(RuntimeError, match="activation checkpointing"):
        sp.sampled_backward(model, F.cross_entropy, x, y, 0.5)
    model.part[1].p = 0.0
    sp.sampled_backward(model, F.cross_entropy, x, y, 0.5)


def test_functional_dropout_is_found_too():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            noise = torch.rand(x.shape[0], 1, dtype=x.dtype) + torch.randn_like(x)
            return self.layer(F.dropout(x, 0.5) + noise)

    model = Functional().double()
    x, y = torch.randn(8, 6).double(), torch.randint(0, 3, (8,))
    wanted = exact_gradients(model, x, y, seed=5)

    def run(uniforms):
        sp.sampled_backward(model, F.cross_entropy, x, y, 3, uniforms=uniforms)

    assert_same(mean_gradients(model, run, seed=5), wanted)


def test_in_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 3))

        def training_step(self, batch, index):
            return sp.sampled_loss(self.net, F.cross_entropy, *batch, budget=0.5)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    data = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)))
    model = Net()
    before = [p.detach().clone() for p in model.parameters()]
    trainer = lightning.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, 8))
    assert all((a != b).any() for a, b in zip(before, model.parameters(), strict=True))
