"""A mean budget shared out over blocks: the rule, what one backward pass measures, resuming."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import sketchprop as sp
from sketchprop.layers import depth
from sketchprop.layers.depth import RUNGS, load_shares_, shared_out, shares_in, shares_of
from sketchprop.sketches import Tokens
from sketchprop.zoo import ViT


class FirstToken(nn.Module):
    """An encoder that is read from its first token: near the top few rows have a gradient."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.encoder(x)[:, 0])
        return y


def step(model: nn.Module, seed: int = 0, samples: int = 8) -> list[Tensor]:
    """The gradients of a batch."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 20, 16, generator=source)
    labels = torch.randint(3, (samples,), generator=source)
    model.zero_grad()
    torch.manual_seed(seed)
    F.cross_entropy(model(x), labels).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def budgets(model: nn.Module) -> list[Any]:
    blocks = model.encoder.layers  # type: ignore[union-attr]
    return [(m.sketch.budget, m.sketch.query_budget, m.sketch.key_budget) for m in blocks]


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def numbers(fill: float, felt: float = 1.0, through: float = 1.0) -> list[float]:
    fills = [fill * (1 / b - 1) for b in RUNGS]
    return [*fills, *(0.1, 0.02, 0.02), *(0.1, 0.02, 0.02), felt, through, *(8.0, 2.0, 2.0, 1.0)]


def test_what_is_needed_below_is_taken_from_where_it_is_wasted() -> None:
    blocks = [numbers(1.0), numbers(0.3), numbers(0.0)]
    found = shared_out(blocks, Tokens(0.3))
    assert found[0][0] > 0.3 > found[2][0]
    assert found[2][0] == RUNGS[0]
    assert all(rows <= queries for rows, queries, _ in found)
    mean = sum(8 * r + 2 * q + 2 * k + max(q, min(1.0, r + 0.1)) for r, q, k in found) / 3
    assert mean <= 8 * 0.3 + 2 * 0.4 + 2 * 0.7 + 0.4 + 1e-6


@pytest.mark.parametrize("budget", [0.125, 0.22, 0.55])
def test_budgets_between_two_rungs_cost_what_the_even_ones_cost(budget: float) -> None:
    tokens = Tokens(budget)
    even = (tokens.budget, tokens.query_budget, tokens.key_budget)
    found = shared_out([numbers(1.0), numbers(0.3), numbers(0.0)] * 4, tokens)

    def cost(rows: float, queries: float, keys: float) -> float:
        return 8 * rows + 2 * queries + 2 * keys + max(queries, min(1.0, rows + 0.1))

    assert 0.97 < sum(cost(*own) for own in found) / 12 / cost(*even) < 1 + 1e-6


def test_budgets_that_were_given_stay_and_little_gain_leaves_them_even() -> None:
    blocks = [numbers(1.0), numbers(0.3), numbers(0.0)]
    found = shared_out(blocks, Tokens(0.3, queries=0.62, keys=0.5))
    assert {(q, k) for _, q, k in found} == {(0.62, 0.5)}
    assert len({r for r, _, _ in found}) > 1
    alike = [numbers(1.0, felt=0.0, through=0.0)] * 2
    assert set(shared_out(alike, Tokens(0.3, queries=0.4, keys=0.7))) == {(0.3, 0.4, 0.7)}


def test_the_first_backward_pass_is_as_before_and_the_next_ones_are_shared_out() -> None:
    even = step(sp.sketch_(FirstToken(), Tokens(0.3, share="even")))
    model = sp.sketch_(FirstToken(), Tokens(0.3))
    assert "not measured yet" in sp.summary(model).layers[0].note
    first = step(model)
    after = torch.rand(3)
    torch.manual_seed(0)
    for a, b in zip(first, even, strict=True):
        assert torch.equal(a, b)
    reference = sp.sketch_(FirstToken(), Tokens(0.3, share="even"))
    step(reference)
    assert torch.equal(after, torch.rand(3))  # the random state as without measuring
    shared = budgets(model)
    assert shared[0][0] > 0.3 > shared[-1][0]
    assert "a share of Tokens(0.3)" in sp.summary(model).layers[0].note
    step(model, 1)
    assert budgets(model) == shared
    sp.set_budget_(model, 0.2)
    assert budgets(model)[0][0] < shared[0][0]
    sp.set_budget_(model, 0.3)
    assert budgets(model) == shared
    sp.set_budget_(model, 1.0)
    exact = step(sp.sketch_(FirstToken(), Tokens(1.0)), 2)
    assert all(torch.equal(a, b) for a, b in zip(step(model, 2), exact, strict=True))


def test_nothing_of_the_first_batch_stays_in_memory() -> None:
    def alive() -> int:
        """Other tests of this process may have left some, too."""
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) is Tensor]
        return sum(bool({11, 11 * 20} & set(t.shape)) for t in tensors)

    before = alive()
    step(sp.sketch_(FirstToken(), Tokens(0.3)), samples=11)
    assert alive() <= before


def test_unequal_budgets_are_unbiased() -> None:
    model = sp.sketch_(FirstToken(), Tokens(0.3))
    step(model)
    assert len(set(budgets(model))) > 1
    x, labels = torch.randn(4, 20, 16), torch.randint(3, (4,))
    report = sp.check_unbiased(model, loss_fn, (x, labels))
    assert report.ok


def test_a_resumed_run_goes_on_with_the_same_budgets() -> None:
    model = sp.sketch_(FirstToken(), Tokens(0.3))
    assert shares_of(model) == {}
    step(model)
    resumed = sp.sketch_(FirstToken(), Tokens(0.3))
    load_shares_(resumed, shares_of(model))
    for seed in (1, 2):
        for a, b in zip(step(model, seed), step(resumed, seed), strict=True):
            assert torch.equal(a, b)
    twin = copy.deepcopy(model)
    assert budgets(twin) == budgets(model)
    assert shares_in(twin)[0] is not shares_in(model)[0]


@pytest.mark.parametrize(
    "case", ["eval", "exact", "one block", "rank", "not finite", "no gradient"]
)
def test_what_cannot_be_measured_stays_even(case: str) -> None:
    tokens: Any = Tokens(24) if case == "rank" else Tokens(0.3)
    model = FirstToken()
    if case == "one block":
        del model.encoder.layers[1:]
    sp.sketch_(model, tokens)
    x = torch.randn(4, 20, 16)
    if case == "eval":
        model.eval()(x).sum().backward()
    elif case == "exact":
        with sp.exact(model):
            model(x).sum().backward()
    elif case == "not finite":
        (model(x).sum() * math.inf).backward()
    elif case == "no gradient":
        model(x)
    else:
        model(x).sum().backward()
    assert {m.sketch for m in model.encoder.layers} == {tokens}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("case", "closed", "shared"),
    [("one trains", 1, False), ("hidden state", 3, True), ("reentrant", 1, False)],
)
def test_blocks_that_no_gradient_reaches_are_not_waited_for(
    case: str, closed: int, shared: bool
) -> None:
    model = sp.sketch_(FirstToken(), Tokens(0.3))
    blocks, x = list(model.encoder.layers), torch.randn(4, 20, 16, requires_grad=True)
    if case == "one trains":
        for block in blocks[:-1]:
            block.requires_grad_(False)
    first = x.detach() if case == "one trains" else x
    for passes in range(1, 5):
        y, before = first, first
        for block in blocks:
            before = y
            y = checkpoint(block, y, use_reentrant=True) if case == "reentrant" else block(y)
        (before if case == "hidden state" else y).square().sum().backward()
        (shares,) = shares_in(model)
        assert shares.open == (passes < closed)
    assert (len(set(budgets(model))) > 1) == shared
    assert ("use_reentrant=False" in sp.summary(model).layers[0].note) == (case == "reentrant")


def test_a_block_that_leaves_takes_nothing_of_the_budget(monkeypatch) -> None:
    model = sp.sketch_(FirstToken(), Tokens(0.3))
    loss = model(torch.randn(4, 20, 16)).square().sum()
    sp.unsketch_(model)
    loss.backward()  # it was measured when it came to that, and is no more
    sp.sketch_(model, Tokens(0.3))
    step(model)
    shares = shares_in(model)[0]
    sp.sketch_(model, {"encoder.layers.0": Tokens(0.2)})
    assert list(shares.states) == list(shares.blocks) == [f"encoder.layers.{k}" for k in (1, 2, 3)]
    monkeypatch.setattr(depth, "shared_out", None)
    sp.set_budget_(model, 0.3)  # an equal budget, as of a schedule at each step


def test_measure_shares_first_and_tells_the_noise_by_block() -> None:
    model = FirstToken()
    batches = [(torch.randn(4, 20, 16), torch.randint(3, (4,))) for _ in range(3)]
    report = sp.measure(model, loss_fn, batches, Tokens(0.3), draws=2, rounds=0, split=False)
    names = [f"encoder.layers.{k}" for k in range(4)]
    assert [felt.layer for felt in report.variance.felt] == [*names, "elsewhere"]
    assert report.variance.worst in report.variance.felt[:-1]
    assert report.variance.felt[-1].share < 1e-6  # the head is exact


def test_a_tuner_moves_the_mean_and_measures_the_shares() -> None:
    def tuned() -> tuple[nn.Module, sp.Tuner]:
        model = sp.sketch_(FirstToken(), Tokens(0.3))
        clock = iter(range(10**6)).__next__
        return model, sp.Tuner(model, loss_fn, share=1.0, start=0.25, clock=clock)

    model, tuner = tuned()
    assert len(tuner.groups) == 1
    batch = torch.randn(8, 20, 16), torch.randint(3, (8,))
    entries = [tuner(batch) for _ in range(12)]
    assert any(entries)
    assert len(shares_of(model)) == 4
    again, resumed = tuned()
    resumed.load_state_dict(tuner.state_dict())
    assert budgets(again) == budgets(model)


def test_compiled_after_a_first_step_it_compiles_once() -> None:
    model = sp.sketch_(ViT(dim=16, depth=2, heads=2, hidden=32, patch=8), Tokens(0.3))
    x, labels = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
    F.cross_entropy(model(x), labels).backward()
    assert not shares_in(model)[0].open
    torch._dynamo.reset()
    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=count)
    for _ in range(3):
        F.cross_entropy(compiled(x), labels).backward()
    assert count.frame_count == 1
