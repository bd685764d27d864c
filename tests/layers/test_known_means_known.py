"""A block is taken apart only if it is the block that is known, and its first batch proves it."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import sketchprop as sp
from sketchprop import Tokens, zoo
from sketchprop.layers.depth import RUNGS, shares_of
from sketchprop.layers.share import kept_flops


class Swapped(zoo.Attention):
    """Attention of another kind, which a caller knows by its class alone."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class StochasticDepth(nn.Dropout):
    """Drops whole samples, in the place of a dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape[0], 1, 1) > 0.5)


class Mixing(nn.Sequential):
    """A feed-forward part that mixes tokens."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y + x.mean(1, keepdim=True)


def swap_attention(block: Any) -> None:
    block.attn.__class__ = Swapped


def replace_a_method(block: Any) -> None:
    block.attn.forward = functools.partial(Swapped.forward, block.attn)
    block.attn.__class__ = Swapped


class Around(nn.Module):
    """Attention in a module that has none of its attributes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * self.inner(x)


def wrap_attention(block: Any) -> None:
    block.attn = Around(block.attn)


def swap_the_feed_forward_part(block: Any) -> None:
    block.mlp = Mixing(*block.mlp)


def swap_dropout(block: Any) -> None:
    block.drop = StochasticDepth(0.5)


def subclass_a_norm(block: Any) -> None:
    block.norm1.__class__ = type("Doubled", (nn.LayerNorm,), {"forward": _doubled})


def _doubled(self: nn.LayerNorm, x: Tensor) -> Tensor:
    return 2 * F.layer_norm(x, self.normalized_shape, self.weight, self.bias)


MUTATIONS: list[Callable[[Any], None]] = [
    swap_attention, replace_a_method, wrap_attention, swap_the_feed_forward_part, swap_dropout,
    subclass_a_norm,
]  # fmt: skip


def block_and_input() -> tuple[zoo.Block, Tensor]:
    torch.manual_seed(0)
    return zoo.Block(8, 2, 16), torch.randn(3, 6, 8, requires_grad=True)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return (y * torch.linspace(-1, 1, 8)).square().sum()


@pytest.mark.parametrize("change", MUTATIONS)
def test_a_changed_block_has_its_own_result_and_mean(change: Callable[[Any], None]) -> None:
    plain, x = block_and_input()
    change(plain)
    block = sp.sketch_(copy.deepcopy(plain), Tokens(0.3))
    try:
        torch.manual_seed(1)
        y = block(x)
    except ValueError as refused:
        assert "mixes rows" in str(refused) or "random numbers" in str(refused)  # noqa: PT017
        return
    torch.manual_seed(1)
    torch.testing.assert_close(y, plain(x))
    if change is not swap_dropout:  # its own noise is in the mean
        assert sp.check_unbiased(block, loss, x.detach(), draws=300).ok


def test_a_method_replaced_on_the_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = block_and_input()
    sp.sketch_(block, Tokens(0.3))
    monkeypatch.setattr(nn.LayerNorm, "forward", _doubled)
    twin = zoo.Block(8, 2, 16)
    twin.load_state_dict(block.state_dict())
    torch.testing.assert_close(block(x), twin(x))
    assert "LayerNorm" in block.sketching.note


class Learned(zoo.Block):
    """A block with a parameter that its anatomy forgets."""

    def __init__(self) -> None:
        super().__init__(8, 2, 16)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class Halved(zoo.Block):
    """A block whose anatomy is that of another."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


@pytest.mark.parametrize(
    ("kind", "reason"), [(Learned, "gain would get no gradient"), (Halved, "differs from the")]
)
def test_the_first_batch_finds_an_anatomy_that_is_wrong(kind: Any, reason: str) -> None:
    sp.sketchable(kind)(type("Sketched", (zoo.SketchedZooBlock, kind), {}))
    torch.manual_seed(0)
    plain = kind(8, 2, 16) if kind is Halved else kind()
    block = sp.sketch_(copy.deepcopy(plain), Tokens(0.3))
    x = torch.randn(3, 6, 8, requires_grad=True)
    with pytest.warns(UserWarning, match=reason):
        y = block(x)
    assert torch.equal(y, plain(x))
    assert reason in str(sp.summary(block))
    torch._dynamo.reset()
    early = sp.sketch_(copy.deepcopy(plain), Tokens(0.3))
    with pytest.warns(UserWarning, match="compiled before its check on a first batch"):
        y = torch.compile(early, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, plain(x))
    trusted = sp.sketch_(copy.deepcopy(plain), Tokens(0.3), check=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trusted(x)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("place", ["", "_ff_block", "norm1.forward", "self_attn.forward"])
def test_a_method_replaced_after_the_first_batch_is_seen(place: str, compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    twin, x = copy.deepcopy(layer), torch.randn(3, 6, 8, requires_grad=True)
    sp.sketch_(layer, Tokens(0.3))
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    run(x)
    for changed in (layer, twin) if place else ():
        owner, _, name = place.rpartition(".")
        module = changed.get_submodule(owner)
        setattr(module, name, functools.partial(_half, getattr(module, name)))
    torch.testing.assert_close(run(x), twin(x))
    for model in (run, twin):
        loss(model, x).backward()
    drawn = not torch.allclose(layer.linear1.weight.grad, twin.linear1.weight.grad)
    assert drawn == (place != "_ff_block")


def _half(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    y = method(*args, **kwargs)
    return (0.5 * y[0], *y[1:]) if isinstance(y, tuple) else 0.5 * y


def test_attention_that_is_not_torchs_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = block_and_input()
    sp.sketch_(block, Tokens(0.3))(x)
    half = functools.partial(_half, F.scaled_dot_product_attention)
    monkeypatch.setattr(F, "scaled_dot_product_attention", half)
    y = block(x)
    with sp.exact(block):
        torch.testing.assert_close(y, block(x))
    assert "attention was replaced" in block.sketching.note


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_proof_leaves_no_trace(dropout: float) -> None:
    """Neither in random numbers nor in modes, and it is made once."""
    torch.manual_seed(0)
    block = zoo.Block(8, 2, 16, dropout)
    x = torch.randn(3, 6, 8, requires_grad=True)
    results = []
    for check in (True, False):
        twin = sp.sketch_(copy.deepcopy(block), Tokens(0.3), check=check)
        torch.manual_seed(2)
        y = twin(x)
        y.sum().backward()
        results.append((y.detach(), twin.mlp[0].weight.grad, torch.rand(3)))
        assert twin.sketching.proof == ""
        assert all(module.training for module in twin.modules())
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_counting_flops_changes_nothing():
    """Torch's counter hangs hooks on all modules; they only look."""
    torch.manual_seed(0)
    block = sp.sketch_(zoo.Block(32, 2, 64), Tokens(0.2), check=False)
    x = torch.randn(2, 40, 32)
    counted = []
    for budget in (0.2, 1.0):
        sp.set_budget_(block, budget)
        with FlopCounterMode(display=False) as counter:
            block(x).sum().backward()
        counted.append(counter.get_total_flops())
    assert counted[0] < 0.8 * counted[1]


@pytest.mark.parametrize("refused", [False, True])
def test_what_ran_exactly_is_not_counted_as_saved(refused: bool) -> None:
    config = hf.LlamaConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, use_cache=False,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config).train()
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: None)
    sp.sketch_(model, Tokens(0.3))
    ids = torch.randint(8, (2, 20))
    model(ids, **({"seq_idx": torch.zeros_like(ids)} if refused else {})).logits.sum().backward()
    lines = {la.name.rpartition(".")[2]: la for la in sp.summary(model).layers}
    assert lines["q_proj"].flops == lines["k_proj"].kept == 1.0
    assert (lines["up_proj"].flops == 1.0) is refused
    assert (kept_flops(model, 128) == 1.0) is refused


class Routed(nn.Module):
    """A feed-forward part that keeps a loss of its own, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.inner = nn.Linear(8, 2), nn.Linear(8, 16)
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.aux = self.router(x).softmax(-1).mean((0, 1)).square().sum()
        y: Tensor = self.inner(x)
        return y.unflatten(-1, (2, 8)).mul(self.router(x).unsqueeze(-1)).sum(-2)


def own_part() -> zoo.Block:
    """A feed-forward part that is not known, and runs again."""
    block, _ = block_and_input()
    block.mlp = nn.Sequential(nn.Linear(8, 16), nn.Mish(), nn.Dropout(0.0), nn.Linear(16, 8))
    return block


def routed() -> zoo.Block:
    block, _ = block_and_input()
    block.mlp = Routed()
    return block


def few_rows(block: Any, run: Callable[..., Tensor] = lambda block, x: block(x)) -> list[Tensor]:
    """Gradients where so few rows have one that no draw drops any."""
    x = torch.linspace(-1, 1, 144).sin().view(3, 6, 8)
    block.zero_grad()
    y = run(block, x)[:, :2].square().sum()
    (y + (10 * block.mlp.aux if isinstance(block.mlp, Routed) else 0)).backward()
    return [p.grad.clone() for p in block.parameters()]


def scaled(block: Any) -> None:
    block.mlp[-1].weight.register_hook(lambda g: g / 10)


def dropping(block: Any) -> None:
    block.mlp[2].p = 0.5


def selective(block: Any, x: Tensor) -> Tensor:
    """Checkpointed, but for products, which are kept."""
    kept = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = operation in kept
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    y: Tensor = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return y


@pytest.mark.parametrize(
    ("make", "later", "run"),
    [
        (lambda: block_and_input()[0], None, selective),
        (routed, None, lambda block, x: block(x)),
        (own_part, scaled, lambda block, x: block(x)),
    ],
    ids=["selective", "a loss of its own", "a hook on a parameter"],
)
def test_a_gradient_that_no_draw_drops_is_the_plain_ones(make: Any, later: Any, run: Any) -> None:
    plain = make()
    block = sp.sketch_(copy.deepcopy(plain), Tokens(0.7, keys=1.0, share="even"))
    for step in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, exact = few_rows(block, run), few_rows(plain, run)
        for a, b in zip(found, exact, strict=True):
            torch.testing.assert_close(a, b)
        if later is not None and step == 0:
            later(plain)
            later(block)


def test_a_part_that_drops_out_later_is_exact_from_then_on() -> None:
    block = sp.sketch_(own_part(), Tokens(0.3, share="even"))
    few_rows(block)
    assert not block.sketching.note
    dropping(block)
    few_rows(block)
    assert "not as it was when it was checked" in block.sketching.note


def test_noise_of_a_part_that_runs_again_is_measured_in_eval_mode() -> None:
    """Not taken for exact, because it was checked while it trained."""
    model = sp.sketch_(nn.Sequential(own_part(), own_part()), Tokens(0.3))
    model(torch.randn(3, 6, 8)).square().sum().backward()
    assert not model[0].sketching.shares.open
    for numbers in shares_of(model).values():
        rows_own = numbers[len(RUNGS)]
        assert rows_own > 0


def test_a_loss_that_branch_would_cut_off_is_refused() -> None:
    with pytest.raises(ValueError, match=r"keeps Routed\.aux, which would have no gradient"):
        sp.branch(Routed(), torch.randn(3, 6, 8, requires_grad=True), 0.5)


def test_several_gradients_at_once_are_refused_with_a_way_out() -> None:
    block, x = block_and_input()
    y = sp.sketch_(block, Tokens(0.3, share="even"))(x)
    with pytest.raises(NotImplementedError, match="exact"):
        torch.autograd.grad(y, x, torch.randn(2, *y.shape), is_grads_batched=True)
