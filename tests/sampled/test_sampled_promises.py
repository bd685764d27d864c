"""What a loss owes to anything but the outputs, low precision, and random numbers of all kinds."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sketchprop as sp
from sketchprop.core.enumeration import every_draw, expectation


def means(parameters, run, seed=0):
    """E of the gradient of each parameter over all draws, from the same random state."""

    def grads(uniforms):
        torch.manual_seed(seed)
        random.seed(seed)
        return torch.autograd.grad(run(uniforms), parameters)

    return expectation(grads)


def exact(parameters, loss, seed=0):
    torch.manual_seed(seed)
    random.seed(seed)
    return torch.autograd.grad(loss(), parameters)


def assert_unbiased(parameters, run, loss):
    for mean, wanted in zip(means(parameters, run), exact(parameters, loss), strict=True):
        torch.testing.assert_close(mean, wanted, rtol=1e-9, atol=1e-12)


def digits(samples=7, inputs=4, classes=3):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, inputs, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (samples,), generator=generator)


@pytest.mark.parametrize("by", ["gradient", "uniform"])
def test_parameters_of_the_loss_get_their_gradient(by):
    """A learned temperature, a regulariser, and an auxiliary loss on other data."""
    net = nn.Linear(4, 3).double()
    log_scale = nn.Parameter(torch.tensor(0.7).double())
    scale = log_scale.exp()  # not a leaf: its graph is outside of loss_fn
    x, y = digits()
    other, other_labels = digits(5)

    def loss_fn(out, y):
        auxiliary = F.cross_entropy(net(other), other_labels)
        return F.cross_entropy(out * log_scale.exp(), y) + net.weight.square().sum() + auxiliary

    def scaled(out, y):
        return loss_fn(out * scale, y)

    parameters = [net.weight, net.bias, log_scale]
    assert_unbiased(
        parameters,
        lambda u: sp.sampled_loss(net, loss_fn, x, y, 3, by=by, uniforms=u),
        lambda: loss_fn(net(x), y),
    )
    drawn = sp.sampled_loss(net, scaled, x, y, 3)
    (wanted,) = torch.autograd.grad(scaled(net(x), y), scale, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(drawn, scale)[0], wanted)


def test_inputs_and_targets_that_have_a_graph():
    """An embedding before the model, a second tower whose outputs are the targets."""
    embed, net, tower = (nn.Linear(4, 4).double() for _ in range(3))
    x, _ = digits()
    parameters = [embed.weight, net.weight, tower.weight]

    def loss_fn(out, targets):
        return (out @ targets.mT).log_softmax(-1).diagonal().mean()

    assert_unbiased(
        parameters,
        lambda u: sp.sampled_loss(net, loss_fn, embed(x), tower(x), 3, uniforms=u),
        lambda: loss_fn(net(embed(x)), tower(x)),
    )


def test_the_gradients_of_both_roads_meet_in_one_accumulation():
    """A hook on a parameter (DDP's) must see one gradient, the sum."""
    net = nn.Linear(4, 3).double()
    x, y = digits()
    seen = []
    net.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))

    def loss_fn(out, y):
        return F.cross_entropy(out, y) + net.weight.square().sum()

    sp.sampled_backward(net, loss_fn, x, y, 3)
    assert len(seen) == 1


def test_a_loss_of_outputs_alone_keeps_no_graph():
    net = nn.Linear(4, 3).double()
    x, y = digits()
    loss = sp.sampled_loss(net, F.cross_entropy, x, y, 3)
    nodes = [str(node) for node, _ in loss.grad_fn.next_functions if node is not None]
    assert len(nodes) == 1
    assert "Addmm" in nodes[0]


def test_a_loss_scale_passes_through_float16():
    """The exact mean under autocast and loss scaling, at GradScaler's default scale too."""
    torch.manual_seed(0)
    N, T, V, d = 4, 64, 8000, 8
    net = nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Linear(d, V))
    x, y = torch.randn(N, T, d), torch.randint(V, (N, T))

    def loss_fn(out, y):
        return F.cross_entropy(out.flatten(0, 1).float(), y.flatten())

    def gradient(run, scale):
        with torch.autocast("cpu", torch.float16):
            loss = run()
        (grad,) = torch.autograd.grad(loss * scale, net[0].weight)
        return grad / scale

    # What underflows without a scale: rounding in float16 remains, 2⁻¹¹ of each entry.
    for scale in (32768.0, 65536.0):
        wanted = gradient(lambda: loss_fn(net(x), y), scale)
        mean = torch.zeros_like(wanted)
        draws = every_draw(
            lambda u, scale=scale: gradient(
                lambda: sp.sampled_loss(net, loss_fn, x, y, 2, by="uniform", uniforms=u),
                scale,
            )
        )
        for chance, grad in draws:
            mean += chance * grad
        assert mean.isfinite().all()
        assert (mean - wanted).norm() < 0.01 * wanted.norm()


def test_tiny_gradients_are_not_taken_for_zero():
    """Squares of 1e-30 underflow in float32; a sample with p = 0 would be lost for good."""
    net = nn.Linear(4, 3)
    x = torch.randn(6, 4)

    def loss_fn(out, _):
        return (1e-30 * out).sum() + out[0].sum()

    mean = sum(
        chance * grad
        for chance, grad in every_draw(
            lambda u: torch.autograd.grad(
                sp.sampled_loss(net, loss_fn, x[1:], None, 2, uniforms=u), net.weight
            )[0]
        )
    )
    (wanted,) = torch.autograd.grad(loss_fn(net(x[1:]), None), net.weight)
    torch.testing.assert_close(mean, wanted)
    far = sp.sampled_loss(net, lambda out, _: (1e-30 * out).sum(), x, None, 2)
    assert torch.autograd.grad(far, net.weight)[0].abs().sum() > 0


def test_masked_logits_give_a_finite_loss():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            mask = torch.tensor([False, False, True])
            return self.layer(x).masked_fill(mask, float("-inf"))

    net = Masked().double()
    x, y = digits(classes=2)
    assert sp.sampled_loss(net, F.cross_entropy, x, y, 3).isfinite()
    assert_unbiased(
        list(net.parameters()),
        lambda u: sp.sampled_loss(net, F.cross_entropy, x, y, 3, uniforms=u),
        lambda: F.cross_entropy(net(x), y),
    )


@pytest.mark.parametrize("by", ["gradient", "uniform"])
def test_an_output_of_one_number_for_each_sample(by):
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1), nn.Flatten(0)).double()
    x, _ = digits()
    y = torch.randn(7).double()
    assert_unbiased(
        list(net.parameters()),
        lambda u: sp.sampled_loss(net, F.mse_loss, x, y, 3, by=by, uniforms=u),
        lambda: F.mse_loss(net(x), y),
    )


def test_complex_outputs():
    net = nn.Linear(4, 3, dtype=torch.complex128)
    x = torch.randn(6, 4, dtype=torch.complex128)

    def loss_fn(out, _):
        return (out * out.conj()).real.square().mean() + out.imag.mean()

    assert_unbiased(
        list(net.parameters()),
        lambda u: sp.sampled_loss(net, loss_fn, x, None, 2, uniforms=u),
        lambda: loss_fn(net(x), None),
    )


class Flattened(nn.Module):
    """Dropout on rows that a model has flattened in an order of its own."""

    def __init__(self, order, dropout=0.5):
        super().__init__()
        self.first, self.dropout = nn.Linear(4, 6), nn.Dropout(dropout)
        self.last, self.order = nn.Linear(6, 3), order

    def forward(self, x):
        rows = torch.relu(self.first(x))
        moved = rows.permute(*self.order, 3)
        flat = self.dropout(moved.flatten(0, 2)).view(moved.shape)
        return self.last(flat.sum([i for i, axis in enumerate(self.order) if axis != 0]))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0), (2, 0, 1)])
def test_flattened_rows_have_the_masks_of_their_samples(order):
    net = Flattened(order).double()
    x, y = torch.randn(6, 2, 3, 4).double(), torch.randint(3, (6,))
    assert_unbiased(
        list(net.parameters()),
        lambda u: sp.sampled_loss(net, F.cross_entropy, x, y, 2, uniforms=u),
        lambda: F.cross_entropy(net(x), y),
    )


def test_time_major_rows():
    class TimeMajor(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.dropout, self.last = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)

        def forward(self, x):
            hidden = self.dropout(torch.relu(self.first(x.flatten(0, 1))))
            return self.last(hidden).view(*x.shape[:2], 3)

    net = TimeMajor().double()
    x, y = torch.randn(5, 6, 4).double(), torch.randint(3, (5, 6))

    def loss_fn(out, y):
        return F.cross_entropy(out.flatten(0, 1), y.flatten())

    assert_unbiased(
        list(net.parameters()),
        lambda u: sp.sampled_loss(net, loss_fn, x, y, 3, sample_dim=1, uniforms=u),
        lambda: loss_fn(net(x), y),
    )


def test_rows_that_cannot_be_told_apart_are_refused():
    net = Flattened((1, 0, 2)).double()
    x, y = torch.ones(6, 2, 3, 4).double(), torch.randint(3, (6,))
    with pytest.raises(RuntimeError, match=r"dropout\(x\).flatten\(0, 1\)"):
        sp.sampled_backward(net, F.cross_entropy, x, y, 2)


def test_attention_weights_have_the_masks_of_their_samples():
    """``need_weights=True`` drops entries of [samples × heads, T, T], rows that all sum to 1."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.4)

        def forward(self, x):
            x = x.transpose(0, 1)
            return self.attention(x, x, x, need_weights=True)[0].sum(0)

    net = Net().double()
    x = torch.randn(5, 4, 8).double()
    y = torch.randint(8, (5,))
    parameters = list(net.parameters())
    assert_unbiased(
        parameters,
        lambda u: sp.sampled_loss(net, F.cross_entropy, x, y, 2, uniforms=u),
        lambda: F.cross_entropy(net(x), y),
    )


class Noisy(nn.Module):
    """A linear layer whose input is multiplied by noise of any origin."""

    def __init__(self, noise, **held):
        super().__init__()
        self.layer, self.noise = nn.Linear(4, 3), noise
        vars(self).update(held)

    def forward(self, x):
        return self.layer(x * self.noise(self, x))


def torch_generator(self, x):
    return torch.rand(x.shape, generator=self.source, dtype=x.dtype)


def test_generators_of_the_model_are_refused():
    numpy = pytest.importorskip("numpy")
    x, y = digits()
    sources = [
        (torch_generator, torch.Generator()),
        (lambda self, x: self.source.random(), random.Random(0)),
        (lambda self, x: self.source.random(), numpy.random.default_rng(0)),
        (lambda self, x: self.source.rand(), numpy.random.RandomState(0)),
    ]
    for noise, source in sources:
        net = Noisy(noise, source=source).double()
        with pytest.raises(RuntimeError, match="generator of its own, 'source'"):
            sp.sampled_backward(net, F.cross_entropy, x, y, 3)
    unused = Noisy(lambda self, x: 1.0, source=torch.Generator()).double()
    sp.sampled_backward(unused, F.cross_entropy, x, y, 3)


def test_a_generator_from_elsewhere_is_refused_beside_dropout():
    source = torch.Generator()
    net = Noisy(lambda self, x: self.drop(x) + torch.rand(x.shape, generator=source)).double()
    net.drop = nn.Dropout(0.5)
    with pytest.raises(RuntimeError, match="leave out generator"):
        sp.sampled_backward(net, F.cross_entropy, *digits(), 3)


def test_python_and_numpy_draws_for_the_whole_batch_are_repeated():
    numpy = pytest.importorskip("numpy")
    x, y = digits()

    def layer_drop(self, x):
        return 2.0 if random.random() < 0.5 else 0.5

    def numpys(self, x):
        numpy.random.seed(random.randrange(100))
        return numpy.random.rand()

    for noise in (layer_drop, numpys):
        net = Noisy(noise).double()
        assert_unbiased(
            list(net.parameters()),
            lambda u, net=net: sp.sampled_loss(net, F.cross_entropy, x, y, 3, uniforms=u),
            lambda net=net: F.cross_entropy(net(x), y),
        )


def test_python_draws_for_each_sample_are_refused():
    def each(self, x):
        return torch.tensor([[random.random()] for _ in x])

    with pytest.raises(RuntimeError, match="draws from python's random another number of times"):
        sp.sampled_backward(Noisy(each).double(), F.cross_entropy, *digits(), 3)


def test_one_random_order_for_the_whole_batch_is_repeated():
    net = Noisy(lambda self, x: 1.0 + torch.randperm(4)).double()
    x, y = digits()
    assert_unbiased(
        list(net.parameters()),
        lambda u: sp.sampled_loss(net, F.cross_entropy, x, y, 3, uniforms=u),
        lambda: F.cross_entropy(net(x), y),
    )


def test_random_operations_that_depend_on_the_data_are_refused():
    more = Noisy(lambda self, x: F.dropout(x, 0.5) if len(x) == 3 else x + torch.rand(1)).double()
    with pytest.raises(RuntimeError, match="did not in the first"):
        sp.sampled_backward(more, F.cross_entropy, *digits(), 3)
    less = Noisy(lambda self, x: F.dropout(x, 0.5) if len(x) != 3 else x).double()
    with pytest.raises(RuntimeError, match="did not in the second"):
        sp.sampled_backward(less, F.cross_entropy, *digits(), 3)


def test_layers_that_draw_in_forward_beside_dropout():
    """Masks are repeated, the layers' own draws are new: unbiased over both."""
    net = nn.Sequential(
        nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 3)
    ).double()
    x, y = digits(12)
    parameters = list(net.parameters())
    wanted = torch.cat([g.flatten() for g in exact(parameters, lambda: F.cross_entropy(net(x), y))])
    sp.sketch_(net, sp.ForwardRows(0.5), sp.select.everything)
    torch.manual_seed(0)
    masks = torch.get_rng_state()
    drawn = []
    for i in range(3000):
        torch.manual_seed(i)
        u = torch.rand((), dtype=torch.float64)
        torch.set_rng_state(masks)

        def uniforms(p, shape, u=u, i=i):
            torch.manual_seed(10_000 + i)  # from here on only the layers draw
            return u

        loss = sp.sampled_loss(net, F.cross_entropy, x, y, 4, uniforms=uniforms)
        grads = torch.autograd.grad(loss, parameters)
        drawn.append(torch.cat([g.flatten() for g in grads]))
    along = (torch.stack(drawn) - wanted) @ (wanted / wanted.norm())
    # z below 5 for 3,000 draws.
    assert abs(float(along.mean())) < 5 * float(along.std()) / 3000**0.5


@pytest.mark.parametrize("budget", [0.5, 1.0])
def test_in_evaluation_mode_it_is_the_plain_loss_bitwise(budget):
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    x, y = digits()
    net.train(budget == 1.0)
    torch.manual_seed(0)
    wanted = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    torch.manual_seed(0)
    loss = sp.sampled_loss(net, F.cross_entropy, x, y, budget)
    for got, g in zip(torch.autograd.grad(loss, list(net.parameters())), wanted, strict=True):
        assert torch.equal(got, g)


def test_budget_one_is_bitwise_plain_training_for_a_hundred_steps():
    def trained(sampled):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        for _ in range(100):
            x, y = torch.randn(8, 4), torch.randint(3, (8,))
            optimizer.zero_grad()
            if sampled:
                sp.sampled_backward(net, F.cross_entropy, x, y, 1.0)
            else:
                F.cross_entropy(net(x), y).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    assert torch.equal(trained(True), trained(False))


def test_a_second_derivative_is_refused():
    net = nn.Linear(4, 3).double()
    loss = sp.sampled_loss(net, F.cross_entropy, *digits(), 3)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss, net.weight, create_graph=True)


def test_more_refusals_say_what_to_do():
    net = nn.Linear(4, 3).double()
    x, y = digits()
    with pytest.raises(ValueError, match="sample_dim=-1 is no axis"):
        sp.sampled_loss(net, F.cross_entropy, x, y, 3, sample_dim=-1)
    with pytest.raises(TypeError, match="kept fraction"):
        sp.sampled_loss(net, F.cross_entropy, x, y, "0.1")

    def padded(x):
        return net(x)[:, : 1 + len(x) // 3]

    with pytest.raises(ValueError, match=r"data loader"):
        sp.sampled_loss(padded, lambda out, _: out.sum(), x, None, 3)
