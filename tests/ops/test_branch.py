"""Row-wise branches: the mean over all draws, what is saved, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sketchprop.core.enumeration import expectation
from sketchprop.core.sampling import Uniforms, draw_uniforms
from sketchprop.layers.branch import branch
from sketchprop.tokens.rowwise import (
    Activation,
    Chain,
    Linear,
    Pair,
    RMSNorm,
    RowWise,
    Scale,
)

D, HIDDEN = 4, 6


class Gated(nn.Module):
    """down(silu(gate(x)) · up(x)): not a Sequential, so it is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(D, HIDDEN), nn.Linear(D, HIDDEN)
        self.down = nn.Linear(HIDDEN, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter that may drop some of its input."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.base = nn.Linear(D, HIDDEN).requires_grad_(False)
        self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, HIDDEN, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + 2 * self.up(self.down(self.drop(x)))
        return y


def spelled_gate() -> tuple[RowWise, list[Tensor]]:
    """The same gate as steps, with an RMS norm, a layer scale and an adapter."""
    torch.manual_seed(1)
    shapes = [(D,), (HIDDEN, D), (HIDDEN,), (HIDDEN, D), (D, HIDDEN), (2, HIDDEN), (D, 2), (D,)]
    values = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    g, gate, bias, up, down, a, b, scale = values
    product = Pair(Chain((Linear(), Activation("silu"))), Chain((Linear(),)))
    adapted = Pair(Chain((Linear(),)), Chain((Linear(), Linear())), factor=0.5)
    return RowWise.of(
        (RMSNorm(1e-6), (g,)),
        (product, (((gate, bias), ()), ((up, None),))),
        (adapted, (((down, None),), ((a, None), (b, None)))),
        (Scale(), (scale,)),
    ), values


BRANCHES: dict[str, Callable[[], nn.Module]] = {
    "norm first": lambda: nn.Sequential(
        nn.LayerNorm(D), nn.Linear(D, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, D)
    ),
    "norm last": lambda: nn.Sequential(nn.Linear(D, HIDDEN), nn.ReLU(), nn.LayerNorm(HIDDEN)),
    "tanh and silu": lambda: nn.Sequential(
        nn.Linear(D, HIDDEN, bias=False), nn.Tanh(), nn.Linear(HIDDEN, 3), nn.SiLU()
    ),
    "dropout": lambda: nn.Sequential(
        nn.Linear(D, HIDDEN),
        nn.GELU("tanh"),
        nn.Dropout(0.3),
        nn.Linear(HIDDEN, D),
        nn.Dropout(0.2),
    ),
    "one linear layer": lambda: nn.Sequential(nn.Linear(D, D)),
    "gated": Gated,
    "adapted": lambda: nn.Sequential(Adapted(), nn.GELU(), nn.Linear(HIDDEN, D)),
}
SAVES = ("activations", "input")


def grads_of(y: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)
    return torch.autograd.grad((y * weights).sum(), inputs)


def trained(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.requires_grad]


def closest(found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("name", BRANCHES)
def test_the_mean_over_all_draws_is_the_exact_gradient(
    name: str, save: str, residual: bool
) -> None:
    torch.manual_seed(0)
    f = BRANCHES[name]().double()
    if residual and f(torch.zeros(1, D).double()).shape[-1] != D:
        f.append(nn.Linear(f(torch.zeros(1, D).double()).shape[-1], D).double())  # type: ignore[operator]
    x = torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True)
    inputs = [x, *trained(f)]

    def run(uniforms: Uniforms) -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        y = branch(f, x, 2, save=save, residual=residual, uniforms=uniforms, check=False)
        return grads_of(y, inputs)

    torch.manual_seed(5)
    truth = grads_of(x + f(x) if residual else f(x), inputs)
    assert closest(expectation(run), truth) < 1e-12
    assert closest(run(draw_uniforms), truth) > 1e-3


@pytest.mark.parametrize("save", SAVES)
def test_steps_that_are_spelled_out_have_the_exact_mean(save: str) -> None:
    f, parameters = spelled_gate()
    x = torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True)
    inputs = [x, *parameters]
    mean = expectation(lambda u: grads_of(branch(f, x, 2, save=save, uniforms=u), inputs))
    assert closest(mean, grads_of(f(x), inputs)) < 1e-12


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("name", BRANCHES)
def test_forward_is_that_of_the_module(name: str, save: str) -> None:
    f = BRANCHES[name]()
    x = torch.randn(2, 5, D, requires_grad=True)
    torch.manual_seed(3)
    y = branch(f, x, 0.3, save=save, check=False)
    torch.manual_seed(3)
    assert torch.allclose(y, f(x), atol=1e-6)


@pytest.mark.parametrize("name", BRANCHES)
def test_budget_one_is_the_module_bit_for_bit(name: str) -> None:
    f = BRANCHES[name]()
    x = torch.randn(2, 5, D, requires_grad=True)
    inputs = [x, *trained(f)]
    torch.manual_seed(3)
    found = grads_of(branch(f, x, 1.0), inputs)
    torch.manual_seed(3)
    assert all(a.equal(b) for a, b in zip(found, grads_of(f(x), inputs), strict=True))


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("name", ["norm first", "dropout", "gated"])
@pytest.mark.parametrize("share", [0.0, 0.4, 0.8])
def test_the_rows_that_are_not_zero_give_the_exact_gradient(
    share: float, name: str, save: str
) -> None:
    f = BRANCHES[name]().double()
    x = torch.randn(4, 5, D, dtype=torch.float64, requires_grad=True)
    real = (torch.rand(4, 5, 1) < share).double()
    inputs = [x, *f.parameters()]
    torch.manual_seed(2)
    truth = grads_of(f(x) * real, inputs)
    torch.manual_seed(2)
    budget = min(19, max(1, int(real.sum())))
    found = grads_of(branch(f, x, budget, save=save, check=False) * real, inputs)
    assert closest(found, truth) < 1e-12


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("name", ["norm first", "gated"])
@pytest.mark.parametrize("row", [0, 7, 19])
def test_a_gradient_that_is_not_finite_is_seen(row: int, name: str, save: str) -> None:
    f = BRANCHES[name]()
    x = torch.randn(4, 5, D, requires_grad=True)
    y = branch(f, x, 0.1, save=save)
    direction = torch.ones_like(y)
    direction.view(-1, D)[row, 1] = float("nan")
    grads = torch.autograd.grad(y, [x, *f.parameters()], direction)
    assert all(not g.isfinite().all() for g in grads)


class Rectified(nn.Module):
    """A linear layer behind a ReLU that is not spelled out, so it is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x)) + 0


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["spelled out", "run again"])
def test_relu_does_not_hide_what_a_dropped_row_had(kind: str, value: float, save: str) -> None:
    f = Rectified() if kind != "spelled out" else nn.Sequential(nn.Linear(D, D), nn.ReLU())
    linear = f.linear if isinstance(f, Rectified) else f[0]
    x = -torch.rand(4, 5, D)
    with torch.no_grad():
        linear.weight.fill_(1.0)
        linear.bias.zero_()
        x[2, 1] = 1.0  # in the other rows ReLU is off, and torch's backward gives zeros
    x.requires_grad_()
    run = partial(branch, f, budget=0.1, save=save)
    direction = torch.ones_like(x)
    direction[2, 1, 1] = value
    for _ in range(5):  # of which some drop that row, where it can be dropped
        grads = torch.autograd.grad(run(x), [x, *f.parameters()], direction)
        assert all(not g.isfinite().all() for g in grads)
    direction[2, 1] = 0.0
    grads = torch.autograd.grad(run(x), [x, *f.parameters()], direction)
    assert all(not g.any() for g in grads)


@pytest.mark.parametrize("rows", [0, 3])
def test_where_nothing_is_dropped_f_itself_is_called(rows: int) -> None:
    f = nn.Sequential(nn.Dropout(0.5), nn.ReLU())
    called = []
    f.register_forward_hook(lambda *_: called.append(1))
    x = torch.randn(rows, D, requires_grad=True)
    branch(f, x, 0.5 if rows == 0 else 1.0, residual=True).sum().backward()
    assert called
    assert x.grad is not None


def test_saving_the_input_keeps_nothing_else() -> None:
    f = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 100), nn.GELU(), nn.Linear(100, D))
    x = torch.randn(8, 16, D, requires_grad=True)
    kept: dict[str, int] = dict.fromkeys(SAVES, -sum(p.numel() for p in f.parameters()))

    def pack(save: str, t: Tensor) -> Tensor:
        kept[save] += t.numel()
        return t

    for save in SAVES:
        with torch.autograd.graph.saved_tensors_hooks(partial(pack, save), lambda t: t):
            branch(f, x, 0.2, save=save)
    assert kept == {"input": x.numel(), "activations": x.numel() + 8 * 16 * 100}


def test_only_wanted_gradients_are_made() -> None:
    f = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, D))
    f[0].requires_grad_(False)
    f[1].weight.requires_grad_(False)
    branch(f, torch.randn(2, 5, D), 0.3).sum().backward()
    assert f[0].weight.grad is None
    assert f[1].weight.grad is None
    assert f[1].bias.grad is not None
    assert f[3].weight.grad is not None


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.reshape(-1, D)).view(x.shape)
        return y


def test_a_branch_that_mixes_rows_is_refused_with_the_culprit() -> None:
    with pytest.raises(ValueError, match=r"Mixing.*inner \(BatchNorm1d.* mixes rows"):
        branch(Mixing(), torch.randn(2, 5, D, requires_grad=True), 0.5)
    for tokens in (2, 3, 5):
        x = torch.randn(1, tokens, D, requires_grad=True)
        with pytest.raises(ValueError, match="mixes rows"):
            branch(lambda x: x - x.mean(1, keepdim=True), x, 1, parameters=())


def test_a_branch_that_draws_random_numbers_is_refused_with_the_culprit() -> None:
    x = torch.randn(2, 5, D, requires_grad=True)
    with pytest.raises(ValueError, match=r"Adapted.*drop \(Dropout.*draws random numbers"):
        branch(Adapted(0.5), x, 0.5)
    with pytest.raises(ValueError, match="draws random numbers"):
        branch(lambda x: x * torch.rand(1), x, 0.5, parameters=())


class Parametrised(nn.Module):
    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return branch(self.f, x, 0.5)


@pytest.mark.parametrize("name", ["norm first", "gated"])
def test_parameters_that_functional_call_gives_get_their_gradient(name: str) -> None:
    model = Parametrised(BRANCHES[name]())
    given = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    x = torch.randn(2, 5, D)
    torch.func.functional_call(model, given, (x,)).square().sum().backward()
    assert all(p.grad is not None for p in given.values())
    assert all(p.grad is None for p in model.parameters())


def test_what_a_closure_learns_is_not_forgotten() -> None:
    layer, scale = nn.Linear(D, D), torch.ones(D, requires_grad=True)
    x = torch.randn(2, 5, D, requires_grad=True)
    with pytest.raises(ValueError, match="learns what is not among its parameters"):
        branch(lambda x: layer(x) * scale, x, 0.5, parameters=layer.parameters())
    both = [*layer.parameters(), scale]
    branch(lambda x: layer(x) * scale, x, 0.5, parameters=both).sum().backward()
    assert scale.grad is not None


def test_a_method_that_was_replaced_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.GELU, "forward", lambda self, x: x.sin())
    f = nn.Sequential(nn.Linear(D, D), nn.GELU())
    x = torch.randn(2, 5, D, requires_grad=True)
    torch.testing.assert_close(branch(f, x, 0.5), f(x))


def test_a_function_must_name_its_parameters() -> None:
    layer = nn.Linear(D, D)
    x = torch.randn(2, 5, D, requires_grad=True)
    with pytest.raises(TypeError, match=r"parameters=module\.parameters\(\)"):
        branch(lambda x: layer(x), x, 0.5)  # noqa: PLW0108
    branch(lambda x: layer(x).relu(), x, 0.5, parameters=layer.parameters()).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save": "nothing"}, "save='nothing'"),
        ({"budget": 0.0}, "budget=0.0"),
    ],
)
def test_bad_settings_name_the_fix(arguments: dict[str, object], message: str) -> None:
    settings = {"budget": 0.5, **arguments}
    with pytest.raises(ValueError, match=message):
        branch(nn.Linear(D, D), torch.randn(3, D, requires_grad=True), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(1, 1, D), (0, 5, D), (3, 0, D), (D,), (7, D), (2, 3, 4, D)])
@pytest.mark.parametrize("name", ["norm first", "gated"])
def test_any_shape_of_rows(name: str, shape: tuple[int, ...]) -> None:
    f = BRANCHES[name]()
    x = torch.randn(shape, requires_grad=True)
    y = branch(f, x, 0.5)
    assert y.shape == shape
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape


@pytest.mark.parametrize("name", ["norm first", "gated"])
def test_a_second_derivative_is_refused(name: str) -> None:
    f = BRANCHES[name]()
    x = torch.randn(2, 5, D, requires_grad=True)
    (grad,) = torch.autograd.grad(branch(f, x, 0.5).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        grad.sum().backward()


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("name", ["norm first", "dropout", "gated"])
def test_checkpointing_gives_the_same_gradients(name: str, save: str) -> None:
    f = BRANCHES[name]()
    x = torch.randn(2, 5, D, requires_grad=True)

    def run(inside: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(0)

        def g(t: Tensor) -> Tensor:
            return branch(f, t, 0.5, save=save, uniforms=middle, check=False)

        y = checkpoint(g, x, use_reentrant=False) if inside else g(x)
        return grads_of(y, [x, *f.parameters()])

    plain = run(False)
    assert all(torch.allclose(a, b) for a, b in zip(run(True), plain, strict=True))


def middle(p: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.full(shape, 0.37, dtype=torch.float64)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("name", ["norm first", "dropout", "gated", "adapted"])
def test_autocast_has_the_gradients_of_the_plain_module(name: str, save: str) -> None:
    """Rows with a gradient all kept, so nothing is random: bfloat16 on both sides."""
    torch.manual_seed(0)
    f = BRANCHES[name]()
    x = torch.randn(4, 8, D, requires_grad=True)
    real = torch.zeros(4, 8, 1)
    real[1:3, :4] = 1
    inputs = [x, *trained(f)]

    def run(kept: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = branch(f, x, 0.5, save=save, check=False) if kept else f(x)
        return grads_of(y.float() * real, inputs)

    for found, truth, like in zip(run(True), run(False), inputs, strict=True):
        assert found.dtype == like.dtype
        assert (found - truth).abs().max() <= 0.03 * truth.abs().max() + 1e-6


@pytest.mark.parametrize(
    ("name", "save"),
    [("norm first", "activations"), ("dropout", "input"), ("norm last", "activations")],
)
def test_compiled_in_one_graph_the_draw_is_that_of_eager(name: str, save: str) -> None:
    torch._dynamo.reset()
    f = BRANCHES[name]()
    x = torch.randn(4, 6, D, requires_grad=True)
    inputs = [x, *f.parameters()]

    def run(t: Tensor) -> Tensor:
        return branch(f, t, 0.25, save=save)

    fast = torch.compile(run, fullgraph=True, backend="aot_eager")
    truth = None
    for seed in range(3):
        torch.manual_seed(seed)
        eager = grads_of(run(x), inputs)
        torch.manual_seed(seed)
        found = grads_of(fast(x), inputs)
        assert closest(found, eager) < 1e-5
        assert truth is None or closest(truth, eager) > 1e-4
        truth = eager


def test_what_cannot_be_compiled_says_what_can() -> None:
    torch._dynamo.reset()
    f = nn.Sequential(Adapted(), nn.Linear(HIDDEN, D))
    fast = torch.compile(lambda t: branch(f, t, 0.25), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="RowWise that spells it out"):
        fast(torch.randn(2, 6, D, requires_grad=True))


def test_layers_with_hooks_are_not_taken_apart() -> None:
    f = nn.Sequential(nn.Linear(D, D), nn.GELU())
    seen: list[tuple[int, ...]] = []
    f[0].register_forward_hook(lambda m, i, o: seen.append(tuple(o.shape)))
    branch(f, torch.randn(2, 5, D, requires_grad=True), 0.5, check=False).sum().backward()
    assert seen[0] == (2, 5, D)


@pytest.mark.parametrize("residual", [True, False])
def test_what_follows_may_change_the_result_in_place(residual: bool) -> None:
    x = torch.randn(2, 6, 4, requires_grad=True)
    y = branch(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), x, 0.5, residual=residual)
    assert not y._is_view()
    y.relu_().sum().backward()
    assert x.grad is not None
