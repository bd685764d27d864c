"""VCAS's controller: the published rule, on estimators with the right mean."""

import copy

import pytest
import torch
import torch.nn.functional as F

import sketchprop as sp
from experiments.vcas import Measured, VCASController, own_variance
from sketchprop.core.vjp import Vjp
from sketchprop.zoo import ViT


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def make_model(seed=0):
    torch.manual_seed(seed)
    return ViT(image=8, patch=4, dim=8, depth=2, heads=2, hidden=16, classes=3).double()


def make_batches(count, samples=6):
    torch.manual_seed(1)
    return [
        (torch.randn(samples, 3, 8, 8).double(), torch.randint(3, (samples,))) for _ in range(count)
    ]


def gradient(model, batch):
    grads = torch.autograd.grad(loss_fn(model, batch), list(model.parameters()))
    return torch.cat([g.flatten() for g in grads])


def test_the_samplers_together_have_the_right_mean():
    model, (batch,) = make_model(), make_batches(1)
    exact = gradient(model, batch)
    controller = VCASController(model, loss_fn)
    controller.ratios = [0.5, 0.7]
    controller.weight_ratios = dict.fromkeys(controller.layers, 0.6)
    controller._apply()
    torch.manual_seed(2)
    draws = torch.stack([gradient(model, batch) for _ in range(600)])
    along = draws @ exact / exact.square().sum()
    z = (along.mean() - 1) / (along.std() / len(along) ** 0.5)
    assert float(along.std()) > 0.05
    assert abs(float(z)) < 4  # a normal variable passes it in 6e-5 of cases
    controller.remove()
    assert torch.equal(gradient(model, batch), exact)


def test_the_variance_of_sample_w_is_that_of_its_draws():
    torch.manual_seed(3)
    G, X = torch.randn(12, 5).double(), torch.randn(12, 4).double()
    G[:3] = 0
    sketch = sp.Rows(0.5, by="gradient_input", unit="token", sampling="independent")
    kept = [sketch(Vjp(G[3:], None, X[3:])).weight_grad(X[3:]) for _ in range(4000)]
    seen = torch.stack([(k - G.mT @ X).square().sum() for k in kept])
    error = float(seen.std()) / len(seen) ** 0.5
    assert abs(float(seen.mean()) - own_variance(G, X, 0.5)) < 4 * error
    assert own_variance(G, X, 1.0) == 0


def test_ratios_follow_the_signs_of_the_published_rule():
    controller = VCASController(make_model(), loss_fn)
    first, second = list(controller.layers)[:2]
    flat, steep = torch.ones(4), torch.tensor([100.0, 1.0, 1.0, 1.0])
    weights = {first: (0.2, 1.0), second: (0.0, 1.0)}
    controller.learn(Measured(1.0, 0.0, weights, [[flat, steep], [steep, steep]]))
    assert controller.share == pytest.approx(0.99)
    # Block 0 needs all of a flat batch and three of four of a steep one; block 1 no less.
    assert controller.ratios == [pytest.approx(0.875)] * 2
    assert controller.weight_ratios[first] == pytest.approx(1 / 0.95)
    assert controller.weight_ratios[second] == pytest.approx(0.95)
    assert controller.budgets[first] == 1.0
    controller.learn(Measured(1.0, 0.5, {}, [[flat], [flat]]))
    assert controller.share == pytest.approx(1.0)


def test_a_probe_is_six_passes_and_leaves_training_alone():
    model, batches = make_model(), make_batches(12)
    plain = copy.deepcopy(model)
    calls = []

    def counted(model, batch):
        calls.append(1)
        return loss_fn(model, batch)

    controller = VCASController(model, counted, every=5, alpha=0.0, beta=1.0)
    for each, tuner in ((model, controller), (plain, None)):
        torch.manual_seed(4)
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for batch in batches:
            if tuner is not None:
                tuner(batch)
            optimizer.zero_grad()
            loss_fn(each, batch).backward()
            optimizer.step()
    assert [entry["step"] for entry in controller.log] == [1, 5, 10]
    assert len(calls) == 6 * 3
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_it_trains_and_comes_down_step_by_step_and_goes_on_where_it_stopped():
    model, batches = make_model(), make_batches(20)
    controller = VCASController(model, loss_fn, every=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        controller(batch)
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    assert controller.log[3]["share"] == pytest.approx(0.96)
    assert min(controller.budgets.values()) < 0.9
    assert max(entry["relative"] for entry in controller.log) > 0
    other = VCASController(make_model(), loss_fn, every=1)
    other.load_state_dict(controller.state_dict())
    assert other.budgets == controller.budgets
    ours, theirs = ([layer.sketch for layer in c.layers.values()] for c in (controller, other))
    assert ours == theirs


def test_a_network_without_blocks_and_bad_settings_are_refused():
    with pytest.raises(ValueError, match="no block"):
        VCASController(torch.nn.Linear(3, 2), loss_fn)
    with pytest.raises(ValueError, match="repeats=2"):
        VCASController(make_model(), loss_fn, repeats=1)
