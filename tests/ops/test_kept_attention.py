"""Attention on kept queries: means over all draws, masks, heads, shapes, errors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

import sketchprop as sp
from sketchprop import kept_attention
from sketchprop.core.enumeration import expectation
from sketchprop.core.sampling import Uniforms, draw_uniforms
from sketchprop.ops.attend import Attending

N, H, T, D = 2, 4, 5, 4


def heads(count: int = H, tokens: int = T, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(N, tokens, count, D, dtype=dtype).transpose(1, 2).requires_grad_()


def padding() -> Tensor:
    mask = torch.ones(N, 1, 1, T, dtype=torch.bool)
    mask[0, ..., 3:] = False
    return mask


CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "padding": {"attn_mask": padding()},
    "a row each": {"attn_mask": torch.ones(T, T, dtype=torch.bool).tril()},
    "added, for each head": {
        "attn_mask": torch.linspace(-2, 2, N * H * T * T).double().view(N, H, T, T)
    },
    "a query that sees nothing": {
        "attn_mask": torch.ones(T, T, dtype=torch.bool).tril(-1).unsqueeze(0)
    },
    "scaled": {"scale": 0.3},
    "dropout": {"dropout_p": 0.3},
    "dropout and causal": {"dropout_p": 0.3, "is_causal": True},
}


def scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float | None, causal: bool) -> Tensor:
    """S of CUDA's memory-efficient kernel, which refuses what the assertions do."""
    for t, step in ((q, 16 // q.element_size()), (k, 16 // q.element_size()), (bias, 16)):
        if t is not None:
            assert t.stride(-1) == 1
            assert not any(n % step for n in (*t.stride()[:-1], t.storage_offset()))
    S = q @ k.mT * Attending(scale=scale).factor(q)
    if bias is not None:
        assert (bias.shape, bias.dtype) == (S.shape, q.dtype)
        S = S + bias
    return S.masked_fill(torch.ones_like(S).triu(1).bool(), -math.inf) if causal else S


def by_token(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def efficient(q, k, v, bias, wants, dropout_p=0.0, is_causal=False, *, scale=None):  # type: ignore[no-untyped-def]
    """What ``aten._scaled_dot_product_efficient_attention`` does, its padding included."""
    S = scores(q, k, bias, scale, is_causal)
    lse = S.logsumexp(-1)
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    out = (S - lse.unsqueeze(-1)).exp() @ v
    padded = F.pad(lse, (0, -q.shape[-2] % 32), value=math.inf)
    return by_token(out), padded, torch.tensor(0), torch.tensor(0)


def efficient_back(g, q, k, v, bias, out, lse, *rest, scale=None):  # type: ignore[no-untyped-def]
    """And its backward, without dropout and causality, which nobody asks of it."""
    assert rest[2:] == (0.0, [True, True, True, False])
    assert out.transpose(1, 2).is_contiguous()
    assert lse.is_contiguous()
    lse, padding = lse.split([q.shape[-2], -q.shape[-2] % 32], -1)
    assert (padding == math.inf).all()
    P = (scores(q, k, bias, scale, False) - lse.unsqueeze(-1)).exp()
    dS = P * (g @ v.mT - (g * out).sum(-1, keepdim=True)) * Attending(scale=scale).factor(q)
    return by_token(dS @ k), by_token(dS.mT @ q), by_token(P.mT @ g), None


@pytest.fixture
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Attention by this way, CUDA's with kernels that stand in for it."""
    library = torch.library.Library("aten", "IMPL")
    name = "_scaled_dot_product_efficient_attention"
    library.impl(name, efficient, "CPU")
    library.impl(f"{name}_backward", efficient_back, "CPU")
    way: str = request.param
    monkeypatch.setattr(Attending, "engine", lambda how, q, v: way)
    yield way
    library._destroy()


ENGINES = ("flash", "efficient", "again", "formulas")


def grads_of(y: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)
    return torch.autograd.grad((y * weights).sum(), inputs)


def apart(found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize(
    ("case", "engine"),
    [(case, engine) for case in CASES for engine in ENGINES[3 * ("dropout" in case) :]],
    indirect=["engine"],
)
def test_the_mean_over_all_draws_is_the_exact_gradient(case: str, engine: str) -> None:
    """With the kernel of CPUs, and with the ways of other devices."""
    arguments = CASES[case]
    torch.manual_seed(0)
    inputs = heads(), heads(), heads()

    def run(uniforms: Uniforms) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        return grads_of(
            kept_attention(*inputs, queries=2, uniforms=uniforms, **arguments),
            inputs,  # type: ignore[arg-type]
        )

    torch.manual_seed(1)
    truth = grads_of(F.scaled_dot_product_attention(*inputs, **arguments), inputs)  # type: ignore[arg-type]
    # torch's dropout divides by 1 - p in float32.
    assert apart(expectation(run), truth) < (1e-6 if "dropout_p" in arguments else 1e-12)
    assert apart(run(draw_uniforms), truth) > 1e-3


def assert_exact_mean(inputs: tuple[Tensor, ...], capacity: float = 1.0, **arguments: Any) -> None:
    truth = grads_of(F.scaled_dot_product_attention(*inputs, **arguments), inputs)
    budgets = {"queries": 2, "capacity": capacity}
    mean = expectation(
        lambda u: grads_of(kept_attention(*inputs, uniforms=u, **budgets, **arguments), inputs)
    )
    assert apart(mean, truth) < 1e-12


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("few", [1, 2])
def test_grouped_heads_have_the_exact_mean(few: int, engine: str) -> None:
    assert_exact_mean((heads(), heads(few), heads(few)), enable_gqa=True)


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("case", ["plain", "causal", "padding", "added, for each head"])
def test_queries_that_the_batch_shares_have_the_exact_mean(case: str, engine: str) -> None:
    assert_exact_mean((heads(), heads(), heads()), 1.5, **CASES[case])


def test_cross_attention_has_the_exact_mean() -> None:
    assert_exact_mean((heads(), heads(tokens=7), heads(tokens=7)))


@pytest.mark.parametrize("case", [c for c in CASES if "dropout" not in c])
def test_forward_is_torch_bit_for_bit(case: str) -> None:
    inputs = heads(), heads(), heads()
    found = kept_attention(*inputs, queries=2, **CASES[case])  # type: ignore[arg-type]
    truth = F.scaled_dot_product_attention(*inputs, **CASES[case])  # type: ignore[arg-type]
    # torch has another kernel for a mask of three axes.
    assert torch.allclose(found, truth) if "nothing" in case else found.equal(truth)


def test_all_queries_are_torch_itself() -> None:
    inputs = heads(), heads(), heads()
    found = grads_of(kept_attention(*inputs, queries=1.0), inputs)
    truth = grads_of(F.scaled_dot_product_attention(*inputs), inputs)
    assert all(a.equal(b) for a, b in zip(found, truth, strict=True))


def test_one_token_and_no_sample() -> None:
    one = tuple(torch.randn(2, H, 1, D, requires_grad=True) for _ in range(3))
    grads_of(kept_attention(*one, queries=0.3), one)
    none = tuple(torch.randn(0, H, 4, D, requires_grad=True) for _ in range(3))
    assert [g.shape[0] for g in grads_of(kept_attention(*none, queries=0.3), none)] == [0, 0, 0]


@pytest.mark.parametrize("token", [0, 3])
def test_a_gradient_that_is_not_finite_is_seen(token: int) -> None:
    inputs = heads(), heads(), heads()
    y = kept_attention(*inputs, queries=1)
    direction = torch.ones_like(y)
    direction[1, 2, token, 0] = float("nan")
    assert all(not g.isfinite().all() for g in torch.autograd.grad(y, inputs, direction))


def test_a_mask_that_learns_makes_it_exact() -> None:
    bias = torch.randn(T, T, dtype=torch.float64, requires_grad=True)
    inputs = heads(), heads(), heads()
    found = grads_of(kept_attention(*inputs, bias, queries=1), (*inputs, bias))
    truth = grads_of(F.scaled_dot_product_attention(*inputs, bias), (*inputs, bias))
    assert apart(found, truth) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"attn_mask": torch.ones(N, T, dtype=torch.bool)}, ValueError, "None, None, :"),
        ({"attn_mask": torch.ones(T, T, dtype=torch.int64)}, TypeError, "bool mask"),
        ({"attn_mask": padding(), "is_causal": True}, ValueError, "exclude each other"),
        ({"queries": 0.0}, ValueError, "budget=0.0"),
        ({"capacity": 0.5}, ValueError, "capacity=0.5"),
    ],
)
def test_bad_masks_name_the_fix(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kept_attention(heads(), heads(), heads(), **{"queries": 2, **arguments})  # type: ignore[arg-type]


def test_bad_heads_name_the_fix() -> None:
    with pytest.raises(ValueError, match="enable_gqa=True"):
        kept_attention(heads(), heads(2), heads(2), queries=2)
    with pytest.raises(ValueError, match="4 query heads do not fit 3"):
        kept_attention(heads(), heads(3), heads(3), queries=2, enable_gqa=True)
    with pytest.raises(ValueError, match=r"q\.unsqueeze\(1\)"):
        kept_attention(heads()[0], heads()[0], heads()[0])
    nested = torch.nested.nested_tensor([torch.randn(H, 3, D), torch.randn(H, 2, D)])
    with pytest.raises(TypeError, match="pad them"):
        kept_attention(nested, nested, nested)


@pytest.mark.parametrize(
    ("case", "engine"),
    [("causal", "flash"), ("padding", "flash"), ("dropout", "formulas"), ("causal", "efficient")],
    indirect=["engine"],
)
def test_compiled_in_one_graph_the_draw_is_that_of_eager(case: str, engine: str) -> None:
    def run(*inputs: Tensor) -> Tensor:
        return kept_attention(*inputs, queries=2, **CASES[case])  # type: ignore[arg-type]

    inputs = heads(), heads(), heads()
    assert_compiled_as_eager(lambda call: grads_of(call(*inputs), inputs), run, 1e-9)


def assert_compiled_as_eager(grads: Any, call: Any, limit: float) -> None:
    torch._dynamo.reset()
    fast = torch.compile(call, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        torch.manual_seed(seed)
        eager = grads(call)
        torch.manual_seed(seed)
        assert apart(grads(fast), eager) < limit


def whole(save: str = "activations", dropout: float = 0.2) -> nn.Module:
    """A block with dropout in attention and behind it, and one draw for both of its parts."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(
        8, 2, 12, dropout, batch_first=True, norm_first=True, activation="gelu"
    )
    return sp.sketch_(block, sp.Tokens(0.25, queries=0.5, keys=0.75, save=save))


@pytest.mark.parametrize("save", ["activations", "input"])
def test_dropout_has_one_mask_in_both_passes(save: str) -> None:
    """Few rows carry a gradient, all are kept: equal to autograd through the same dropout."""
    block = whole(save).double()
    x = torch.randn(3, 8, 8, dtype=torch.float64, requires_grad=True)
    # Not x, nor what makes k and v, whose rows are drawn: their means are proven elsewhere.
    inputs = (block.linear1.weight, block.linear2.weight, block.self_attn.out_proj.weight)
    select = torch.zeros(3, 8, 1, dtype=torch.float64)
    select[:, 2] = 1
    torch.manual_seed(4)
    found = grads_of(block(x) * select, inputs)
    torch.manual_seed(4)
    with sp.exact(block):
        truth = grads_of(block(x) * select, inputs)
    assert apart(found, truth) < 1e-6


@pytest.mark.parametrize(
    ("save", "dropout", "engine"),
    [("activations", 0.2, "formulas"), ("input", 0.0, "flash"), ("input", 0.0, "efficient")],
    indirect=["engine"],
)
def test_a_compiled_block_draws_as_eager_does(save: str, dropout: float, engine: str) -> None:
    block = whole(save, dropout)
    x = torch.randn(3, 8, 8, requires_grad=True)
    inputs = (x, *block.parameters())
    assert_compiled_as_eager(lambda call: grads_of(call(x), inputs), block, 1e-4)


def test_the_engine_is_torchs_kernel_on_cpus() -> None:
    q = torch.randn(1, 1, 2, 4)
    assert Attending().engine(q, q) == "flash"
    assert Attending(dropout_p=0.1).engine(q, q) == "formulas"
    assert Attending().engine(q, q[..., :2]) == "formulas"
