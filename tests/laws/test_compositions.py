"""Kept tokens in a block: the exact mean over all draws, in float64, of every gradient.

A draw in one part decides what the next one sees, so a proof of a single sketch says nothing
about a block. Here each block runs for every outcome of the whole tree of its draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sketchprop.core.enumeration import every_draw, expectation
from sketchprop.core.sampling import Uniforms, draw_uniforms
from sketchprop.ops.attend import Attending
from sketchprop.tokens import parts
from sketchprop.tokens.attention import AttentionTensors, SelfAttention, kept_attention
from sketchprop.tokens.draw import Among, KeptRows, QueryCount, draw_queries, kept_count
from sketchprop.tokens.function import run
from sketchprop.tokens.parts import BlockTensors, RowBranch
from sketchprop.tokens.rowwise import RowWise, read

TOLERANCE = 1e-12
N, T, D, HEADS = 2, 3, 4, 2


def rowwise(*modules: nn.Module) -> RowWise:
    found = read(nn.Sequential(*modules))
    assert found is not None
    return found


class Block(nn.Module):
    """A transformer block in plain torch, and once more with kept tokens."""

    def __init__(self, *, first: bool = True, packed: bool = True, kv_heads: int = HEADS) -> None:
        super().__init__()
        size = D // HEADS * kv_heads
        self.first, self.packed, self.kv_heads = first, packed, kv_heads
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv = nn.Linear(D, D + 2 * size)
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, size), nn.Linear(D, size)
        self.out = nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 5), nn.GELU(), nn.Linear(5, D))
        if packed:
            del self.q, self.k, self.v
        else:
            del self.qkv

    def attention(self, x: Tensor, **mask: object) -> Tensor:
        size = D // HEADS * self.kv_heads
        parts = (
            self.qkv(x).split([D, size, size], -1)
            if self.packed
            else (self.q(x), self.k(x), self.v(x))
        )
        q, k, v = (t.unflatten(-1, (-1, D // HEADS)).transpose(1, 2) for t in parts)
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            enable_gqa=self.kv_heads != HEADS,
            **mask,  # type: ignore[arg-type]
        )
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y

    def forward(self, x: Tensor, **mask: object) -> Tensor:
        if self.first:
            x = x + self.attention(self.norm1(x), **mask)
            y: Tensor = x + self.mlp(self.norm2(x))
            return y
        x = self.norm1(x + self.attention(x, **mask))
        z: Tensor = self.norm2(x + self.mlp(x))
        return z


@dataclass(frozen=True)
class Budgets:
    rows: float | int = 3
    queries: float | int = 2
    keys: float | int = 1.0
    save: str = "activations"
    carry: bool = True
    capacity: float = 1.0


def kept(block: Block, x: Tensor, b: Budgets, uniforms: Uniforms, **mask: object) -> Tensor:
    """The same block on kept tokens."""
    layers = (block.qkv,) if block.packed else (block.q, block.k, block.v)
    projections = [rowwise(m) for m in layers]
    before, after = rowwise(*[block.norm1][: block.first]), rowwise(block.out)
    size = x.shape[0] * x.shape[1]
    attention = SelfAttention(
        before.chain, tuple(p.chain for p in projections), after.chain, HEADS, block.kv_heads,
        Attending(is_causal=bool(mask.get("is_causal"))),
        QueryCount.of(b.queries, b.capacity, *x.shape[:2]),
        kept_count(b.keys, size), b.save == "activations", *x.shape[:2],
    )  # fmt: skip
    tensors = AttentionTensors(
        mask.get("attn_mask"),  # type: ignore[arg-type]
        mask.get("rotary"),  # type: ignore[arg-type]
        before.parameters,
        tuple(p.parameters for p in projections),
        after.parameters,
    )
    f = rowwise(*[block.norm2][: block.first], *block.mlp)
    branch = RowBranch(f.chain, kept_count(b.rows, size), b.save == "activations", True)
    norm = rowwise(*[] if block.first else [block.norm1])
    part = parts.Block(attention, norm.chain, branch, b.carry)
    inputs = BlockTensors(x, tensors, norm.parameters, f.parameters)
    y = run(part, inputs, uniforms)
    return y if block.first else block.norm2(y)


def gradients(modules: nn.Module, x: Tensor, output: Tensor) -> tuple[Tensor, ...]:
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).double()
    return torch.autograd.grad((output * direction).sum(), [x, *modules.parameters()])


def largest_error(found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> float:
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))
        for a, b in zip(found, truth, strict=True)
    )


def inputs(seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    x = torch.randn(N, T, D, dtype=torch.float64)
    # Rows of very different size: then probabilities are far from equal.
    return (x * torch.tensor([3.0, 1.0, 0.2]).double()[:, None]).requires_grad_()


MASKS: dict[str, dict[str, object]] = {
    "no mask": {},
    "causal": {"is_causal": True},
    "padded": {"attn_mask": torch.tensor([[True, True, False], [True] * 3])[:, None, None, :]},
    "added": {"attn_mask": torch.linspace(-1, 1, N * T * T).double().view(N, 1, T, T)},
}
BUDGETS = {
    "rows": Budgets(rows=2, queries=1.0),
    "queries": Budgets(rows=1.0, queries=1, carry=False),
    "keys": Budgets(rows=1.0, queries=1.0, keys=2),
    "one draw carried": Budgets(rows=2, queries=1),
    "fewer rows than queries": Budgets(rows=2, queries=2),
    "a fresh draw": Budgets(rows=3, queries=2, carry=False),
    "all three": Budgets(rows=3, queries=2, keys=4),
    "queries that the batch shares": Budgets(rows=2, queries=1, keys=4, capacity=2.0),
    "shared, a fresh draw": Budgets(rows=2, queries=1, capacity=2.0, carry=False),
    "shared, from the input": Budgets(rows=2, queries=1, keys=4, capacity=2.0, save="input"),
    "from the input": Budgets(rows=3, queries=2, keys=4, save="input"),
}


@pytest.mark.parametrize("first", [True, False], ids=["norm first", "norm last"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "separate"])
@pytest.mark.parametrize("name", BUDGETS)
def test_the_mean_over_all_draws_is_the_exact_gradient(
    name: str, packed: bool, first: bool
) -> None:
    x = inputs()
    block = Block(first=first, packed=packed).double()
    truth = gradients(block, x, block(x))
    mean = expectation(lambda u: gradients(block, x, kept(block, x, BUDGETS[name], u)))
    assert largest_error(mean, truth) < TOLERANCE
    one = gradients(block, x, kept(block, x, BUDGETS[name], draw_uniforms))
    assert largest_error(one, truth) > 1e-3


@pytest.mark.parametrize("first", [True, False], ids=["norm first", "norm last"])
@pytest.mark.parametrize("mask", list(MASKS)[1:])
def test_the_mean_is_exact_behind_masks(mask: str, first: bool) -> None:
    x = inputs()
    block = Block(first=first).double()
    truth = gradients(block, x, block(x, **MASKS[mask]))
    budgets = BUDGETS["all three"]
    mean = expectation(lambda u: gradients(block, x, kept(block, x, budgets, u, **MASKS[mask])))
    assert largest_error(mean, truth) < TOLERANCE


def test_the_mean_is_exact_with_grouped_heads() -> None:
    x = inputs()
    block = Block(packed=False, kv_heads=1).double()
    truth = gradients(block, x, block(x))
    mean = expectation(lambda u: gradients(block, x, kept(block, x, BUDGETS["all three"], u)))
    assert largest_error(mean, truth) < TOLERANCE


@pytest.mark.parametrize("save", ["activations", "input"])
@pytest.mark.parametrize("shape", [(T,), (N, T)], ids=["places", "places of each sample"])
def test_the_mean_is_exact_with_rotated_queries_and_keys(shape: tuple[int, ...], save: str) -> None:
    x = inputs()
    block = Block(packed=False, kv_heads=1).double()
    angles = torch.rand(*shape, D // HEADS // 2, dtype=torch.float64) * 3
    rotary = tuple(torch.cat([t, t], -1) for t in (angles.cos(), angles.sin()))

    def exact(x: Tensor) -> Tensor:
        normed = block.norm1(x)
        parts = (block.q(normed), block.k(normed), block.v(normed))
        q, k, v = (t.unflatten(-1, (-1, D // HEADS)).transpose(1, 2) for t in parts)
        cos, sin = (t.unsqueeze(-3) for t in rotary)
        q, k = (t * cos + torch.cat([-t[..., 1:], t[..., :1]], -1) * sin for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + block.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + block.mlp(block.norm2(x))
        return y

    budgets = Budgets(rows=3, queries=2, keys=4, capacity=1.5, save=save)
    truth = gradients(block, x, exact(x))
    mean = expectation(
        lambda u: gradients(block, x, kept(block, x, budgets, u, rotary=rotary, is_causal=True))
    )
    assert largest_error(mean, truth) < TOLERANCE
    everything = kept(
        block, x, Budgets(1.0, 1.0, 1.0), draw_uniforms, rotary=rotary, is_causal=True
    )
    assert torch.allclose(everything, exact(x))


def test_samples_that_draw_independently_have_the_same_mean() -> None:
    """All combinations of the uniforms of a stack, not only those where they move together."""
    x = inputs()
    block = Block().double()
    truth = gradients(block, x, block(x))
    budgets = Budgets(rows=2, queries=1)
    mean = expectation(lambda u: gradients(block, x, kept(block, x, budgets, u)), together=False)
    assert largest_error(mean, truth) < TOLERANCE


@pytest.mark.parametrize("first", [True, False], ids=["norm first", "norm last"])
def test_two_blocks_in_a_row_have_the_exact_mean(first: bool) -> None:
    x = inputs()
    blocks = nn.ModuleList([Block(first=first), Block(first=first, packed=False)]).double()
    truth = gradients(blocks, x, blocks[1](blocks[0](x)))
    budgets = Budgets(rows=2, queries=1)

    def run(u: Uniforms) -> tuple[Tensor, ...]:
        return gradients(
            blocks,
            x,
            kept(blocks[1], kept(blocks[0], x, budgets, u), budgets, u),  # type: ignore[arg-type]
        )

    assert largest_error(expectation(run), truth) < TOLERANCE


def test_one_mask_used_twice_is_biased_and_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """(g + j)_S/p_S instead of g_S/p_S + j_S: the same test sees it."""
    x = inputs()
    block = Block().double()
    truth = gradients(block, x, block(x))
    budgets = Budgets(rows=2, queries=1)

    def biased(among: Among, queries: KeptRows, values: Tensor) -> KeptRows:
        """j divided by p once more: 1/p is what the drawn values have gained over g."""
        assert among.places is None
        direction = torch.randn(N, T, D, generator=torch.Generator().manual_seed(3)).double()
        g = direction.view(-1, D)[queries.rows]
        gain = queries.values.norm(dim=-1, keepdim=True) / g.norm(dim=-1, keepdim=True)
        return KeptRows(queries.rows, queries.values + values * gain)

    fair = expectation(lambda u: gradients(block, x, kept(block, x, budgets, u)))
    assert largest_error(fair, truth) < TOLERANCE
    monkeypatch.setattr(Among, "add", biased)
    twice = expectation(lambda u: gradients(block, x, kept(block, x, budgets, u)))
    assert largest_error(twice, truth) > 0.05


def test_each_draw_asks_for_numbers_of_its_own() -> None:
    x = inputs()
    block = Block().double()
    shapes: list[tuple[int, ...]] = []

    def uniforms(p: Tensor, shape: tuple[int, ...]) -> Tensor:
        shapes.append(shape)
        return draw_uniforms(p, shape)

    gradients(block, x, kept(block, x, Budgets(rows=3, queries=2, keys=4), uniforms))
    # Queries of each sample, rows among them, keys: the attention below makes no draw of its own.
    assert shapes == [(N,), (), ()]


@pytest.mark.parametrize("capacity", [1.0, 2.0])
@pytest.mark.parametrize("where", [(0, 0), (0, 2), (1, 1)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_seen_whatever_is_dropped(
    value: float, where: tuple[int, int], capacity: float
) -> None:
    x = inputs()
    block = Block().double()
    for seed in range(4):
        torch.manual_seed(seed)
        budgets = Budgets(rows=2, queries=1, capacity=capacity)
        y = kept(block, x, budgets, draw_uniforms)
        direction = torch.ones_like(y)
        direction[where] = value
        for grad in torch.autograd.grad(y, [x, *block.parameters()], direction):
            assert not grad.isfinite().all()


def test_rows_without_a_gradient_are_free_and_add_nothing() -> None:
    """One label for a sample: where all rows that carry it are kept, the gradient is exact."""
    x = inputs()
    block = Block().double()
    select = torch.zeros(N, T, D, dtype=torch.float64)
    select[:, 1] = torch.randn(N, D, dtype=torch.float64)

    def back(y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((y * select).sum(), [x, *block.parameters()])

    truth = back(block(x))
    for chance, found in every_draw(lambda u: back(kept(block, x, Budgets(rows=2, queries=1), u))):
        assert chance > 0
        assert largest_error(found, truth) < TOLERANCE


def test_attention_finds_the_rows_that_the_projection_behind_it_drew() -> None:
    """Two draws of one size: the second keeps the rows of the first with p = 1."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(N, HEADS, 5, 3, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    direction = torch.zeros(N, HEADS, 5, 3, dtype=torch.float64)
    direction[0, :, [1, 4]] = 1.0
    direction[1, :, [0, 3]] = -2.0
    run: Callable[..., Tensor] = F.scaled_dot_product_attention
    truth = torch.autograd.grad(run(q, k, v), [q, k, v], direction)
    found = torch.autograd.grad(kept_attention(q, k, v, queries=2), [q, k, v], direction)
    assert largest_error(found, truth) < TOLERANCE


@pytest.mark.parametrize("capacity", [1.0, 1.5, 2.0])
def test_probabilities_that_a_batch_shares_fill_the_budget_and_no_sample_too_much(
    capacity: float,
) -> None:
    """Samples of very different size, one without any gradient: Σ p = r, at most so many each."""
    torch.manual_seed(0)
    size = torch.tensor([100.0, 3.0, 1.0, 0.1, 0.0], dtype=torch.float64)[:, None]
    norms = (torch.rand(5, 8, dtype=torch.float64) * size).flatten()
    most = QueryCount.of(2, capacity, 1, 8).capacity
    counts = []
    for _ in range(50):
        rows, scale = draw_queries(norms.view(5, 8), 10, most, draw_uniforms)
        assert rows.unique().numel() == 10
        assert (scale >= 1 - 1e-12).all()
        counts.append(torch.bincount(rows // 8, minlength=5))
    seen = torch.stack(counts)
    assert int(seen.max()) == most
    assert capacity == 1.0 or int(seen[:, 4].max()) == 0
