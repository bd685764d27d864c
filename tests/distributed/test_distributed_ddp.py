"""Shared draws in DDP: only kept rows are reduced. Two gloo processes run every case once."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import sketchprop as sp
from distributed_helpers import of, outcome, run_once
from sketchprop.distributed import share_draws_
from stack_helpers import Z_LIMIT, batch, equal, gradients, largest_z, net

DRAWS = 150


def parallel(
    sketch: sp.Sketch | None = None, module: nn.Module | None = None, **options: Any
) -> Any:
    """A wrapped copy of the module, and its shared draws if it is sketched."""
    model = net() if module is None else deepcopy(module)
    if sketch is None:
        return DistributedDataParallel(model, **options), None
    wrapped = DistributedDataParallel(sp.sketch_(model, sketch, sp.select.everything), **options)
    return wrapped, share_draws_(wrapped)


def entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = model(x).square()
    return out.mean()


def step(model: nn.Module, seed: int, loss: Callable[..., Tensor] = entropy) -> list[Tensor]:
    x, y = batch(seed=dist.get_rank() + 1)
    return gradients(model.parameters(), lambda: loss(model, x, y), seed * 2 + dist.get_rank())


def mean_error(model: nn.Module, plain: nn.Module, loss: Callable[..., Tensor] = entropy) -> float:
    """In standard errors, after a first step, which is dense."""
    truth = step(plain, 0, loss)
    step(model, 0, loss)
    return largest_z(truth, lambda k: step(model, k + 1, loss), DRAWS)


def trained(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for seed in range(4):
        step(model, seed)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def budget_one() -> dict[str, Any]:
    own_draws = sp.sketch_(net(), sp.SampleMask(0.5), sp.select.everything)
    return {
        "plain": trained(parallel(None, net(dropout=0.2))[0]),
        "one": trained(parallel(sp.L1(1.0), net(dropout=0.2))[0]),
        # Every layer is refused by the hook: then sharing changes nothing.
        "own draws": trained(DistributedDataParallel(own_draws)),
        "refused": trained(parallel(sp.SampleMask(0.5))[0]),
    }


def unbiased() -> dict[str, Any]:
    truth = step(parallel()[0], 0)
    out: dict[str, Any] = {}
    for sketch in (sp.L1(0.3), sp.Diagonal(0.3), sp.ColumnMask(0.3)):
        model, shared = parallel(sketch)
        first = step(model, 0)
        draw = lambda k, model=model: step(model, k + 1)  # noqa: E731
        out[repr(sketch)] = largest_z(truth, draw, DRAWS)
        out[f"{sketch!r} last"] = draw(0)
        out[f"{sketch!r} shared"] = (shared.sharing(), equal(first, truth))
    return out


def wire_bytes() -> dict[str, Any]:
    """An MLP of width 256: a dense first step, then a tenth."""
    model, shared = parallel(sp.L1(0.1), nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))))
    reports = []
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(32, 256)).square().mean().backward()
        reports.append(shared.counter.take())
    return {"reports": reports, "exact": sum(p.nbytes for p in model.parameters())}


def accumulation() -> dict[str, Any]:
    """Two micro-batches under no_sync share the step's draw: nothing strays, the mean is right."""

    def accumulated(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with model.no_sync():
            entropy(model, *batch(seed=dist.get_rank() + 5)).backward()
        return entropy(model, x, y)

    return {"z": mean_error(parallel(sp.L1(0.3))[0], parallel()[0], accumulated)}


class Odd(nn.Module):
    """A layer used twice, one whose weight is also used exactly, two that are tied, a good one."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("twice", "regular", "tied", "also", "good"):
            self.add_module(name, nn.Linear(12, 12))
        self.also.weight = self.tied.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(torch.tanh(self.twice(x)))
        x = self.also(torch.tanh(self.tied(x)))
        return self.good(torch.tanh(self.regular(x))) + self.regular.weight.square().mean()


def odd_uses() -> dict[str, Any]:
    odd = Odd()
    model, shared = parallel(sp.L1(0.3), odd)
    before = shared.sharing()
    z = mean_error(model, parallel(None, odd)[0], square)
    return {"before": before, "after": shared.sharing(), "z": z}


def surprises() -> dict[str, Any]:
    """An exact step that the draw does not know: an error, or announced by one rank."""
    model, shared = parallel(sp.L1(0.3))
    step(model, 0)
    step(model, 1)
    truth = step(parallel()[0], 0)
    with sp.exact(model):
        if dist.get_rank() == 1:
            shared.reduce_densely_once()
        announced = step(model, 2)
    step(model, 3)
    sharing = shared.sharing()
    with sp.exact(model):
        error = outcome(lambda: step(model, 4))
    return {"announced": equal(announced, truth), "sharing": sharing, "error": error}


def other_budget() -> dict[str, Any]:
    """Ranks that were sketched with different budgets, and ranks that change them apart."""
    rank = dist.get_rank()
    started = outcome(lambda: parallel(sp.L1((0.3, 0.5)[rank])))
    model, _ = parallel(sp.L1(0.3))
    step(model, 0)
    sp.set_budget_(model, (0.3, 0.5)[rank])
    changed = outcome(lambda: step(model, 1))
    return {"started": started, "changed": changed}


def new_budget() -> dict[str, Any]:
    """All ranks change the budget between steps: fewer bytes from the next step on."""
    model, shared = parallel(sp.L1(0.5))
    sent = []
    for seed, budget in enumerate((0.5, 0.5, 0.2, 0.2)):
        sp.set_budget_(model, budget)
        step(model, seed)
        sent.append(shared.counter.take().total.sent)
    return {"sent": sent}


def not_finite() -> dict[str, Any]:
    """A NaN gradient on one rank reaches both, and the next step is finite again."""
    model, _ = parallel(sp.L1(0.3))
    step(model, 0)
    step(model, 1)
    bad = float("nan") if dist.get_rank() == 1 else 1.0
    broken = step(model, 2, lambda model, x, y: (model(x)[:, 0] * bad).mean())
    good = step(model, 3)
    finite = lambda grads: all(bool(g.isfinite().all()) for g in grads)  # noqa: E731
    return {"broken": [finite([g]) for g in broken], "good": finite(good)}


def chained() -> dict[str, Any]:
    """The wrapped model called on its own output: its layers lie above themselves."""

    def twice(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return square(model, model(x), y)

    module = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
    model, shared = parallel(sp.L1(0.3), module)
    z = mean_error(model, parallel(None, module)[0], twice)
    # A model that was used once a step until now: the surprise is an error, not a bias.
    late, _ = parallel(sp.L1(0.3), module)
    for seed in range(2):
        step(late, seed, square)
    return {"z": z, "sharing": shared.sharing(), "late": outcome(lambda: step(late, 3, twice))}


class Repeated(nn.Module):
    """One body twice, each time in a reentrant checkpoint: backward passes inside of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 12), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.body, x, use_reentrant=True)
        return x


def checkpointed() -> dict[str, Any]:
    """Where a layer lies above itself in checkpoints, and where it does not."""
    module = Repeated()
    model, shared = parallel(sp.L1(0.3), module, static_graph=True)
    plain, _ = parallel(None, module, static_graph=True)
    return {"z": mean_error(model, plain, square), "sharing": shared.sharing()}


def joined() -> dict[str, Any]:
    """Ranks with different numbers of batches, under join; then in step again, densely.

    torch does not say that a join has ended.
    """
    model, shared = parallel(sp.L1(0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with model.join():
        for seed in range(4 + 2 * dist.get_rank()):
            step(model, seed)
            optimizer.step()
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    plain, _ = parallel()
    model.module.load_state_dict(plain.module.state_dict())
    z = mean_error(model, plain)
    shared.counter.take()
    last = step(model, 999)
    kinds = set(shared.counter.take().kinds)
    return {"finite": finite, "z": z, "kinds": kinds, "last": last}


def join_is_exact() -> dict[str, Any]:
    """Under join nothing is shared and nothing is lost: the mean is that of plain DDP."""
    model, _ = parallel(sp.L1(0.3))
    plain, _ = parallel()
    with plain.join():
        truth = step(plain, 0)
    with model.join():
        return {"z": largest_z(truth, lambda k: step(model, k), DRAWS)}


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.skip = net(), dist.get_rank() == 1

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.net):
            x = x[:, :20] if self.skip and i == 3 else layer(x)
        return x


def skipped_layer() -> dict[str, Any]:
    """With find_unused_parameters a rank may leave a layer out."""
    model, _ = parallel(sp.L1(0.3), Skips(), find_unused_parameters=True)
    return {"z": mean_error(model, parallel(None, Skips(), find_unused_parameters=True)[0])}


CASES = (
    budget_one, unbiased, wire_bytes, accumulation, odd_uses, surprises, other_budget, new_budget,
    not_finite, skipped_layer, chained, checkpointed, joined, join_is_exact,
)  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory, request) -> list[dict[str, Any]]:
    return run_once(tmp_path_factory, request, "ddp", 2, CASES)


def test_budget_one_trains_bitwise_like_plain_ddp(results) -> None:
    for record in of(results, budget_one):
        assert equal(record["plain"], record["one"])
        assert equal(record["own draws"], record["refused"])


def test_the_mean_is_the_exact_gradient_and_ranks_agree(results) -> None:
    """z ≤ 5 over 150 seeded draws; the shared draw is the same on both ranks."""
    first, second = of(results, unbiased)
    for sketch in ("L1(0.3)", "Diagonal(0.3)", "ColumnMask(0.3)"):
        assert first[sketch] <= Z_LIMIT
        assert equal(first[f"{sketch} last"], second[f"{sketch} last"])
        assert first[f"{sketch} shared"] == (("0", "3", "5"), False)
        rows = [int((g.abs().sum(1) > 0).sum()) for g in first[f"{sketch} last"][::2]]
        assert rows == [7, 6, 1]


def test_bytes_of_a_step(results) -> None:
    for record in of(results, wire_bytes):
        dense, *shared = record["reports"]
        assert dense.total.sent == dense.total.exact == record["exact"]
        for report in shared:
            assert report.total.exact == record["exact"]
            assert 0.1 <= report.total.ratio <= 0.11
            assert report.kinds["weights and draws"].exact == 0


@pytest.mark.parametrize(
    "case",
    [accumulation, odd_uses, skipped_layer, chained, checkpointed, joined, join_is_exact],
    ids=lambda case: case.__name__,
)
def test_the_mean_is_the_exact_gradient_in_unusual_uses(results, case) -> None:
    for record in of(results, case):
        assert record["z"] <= Z_LIMIT


def test_tied_repeated_and_exact_uses_are_dense(results) -> None:
    for record in of(results, odd_uses):
        assert record["before"] == ("twice", "regular", "good")
        assert record["after"] == ("good",)


def test_rows_outside_of_the_draw_are_an_error_unless_announced(results) -> None:
    for record in of(results, surprises):
        assert record["announced"]
        assert record["sharing"] == ("0", "3", "5")
        assert "rows that the shared draw did not keep" in record["error"]
        assert "'5'" in record["error"]


def test_different_budgets_are_errors(results) -> None:
    for record in of(results, other_budget):
        assert "ValueError" in record["started"]
        assert "L1(0.3) on rank 0 and L1(0.5) on rank 1" in record["started"]
        assert "ValueError" in record["changed"]
        assert "on every rank in the same step" in record["changed"]


def test_budgets_may_change_between_steps(results) -> None:
    for record in of(results, new_budget):
        dense, half, fifth, same = record["sent"]
        assert dense > half > fifth == same


def test_what_is_not_finite_reaches_every_rank_and_does_not_stay(results) -> None:
    for record in of(results, not_finite):
        assert not any(record["broken"])
        assert record["good"]


def test_a_model_that_is_not_wrapped_is_refused() -> None:
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        share_draws_(net())


def test_a_layer_above_itself_is_not_shared_or_refused(results) -> None:
    for record in of(results, chained):
        assert record["sharing"] == ()
        assert "has rows that the shared draw did not keep" in record["late"]
    for record in of(results, checkpointed):
        assert record["sharing"] == ()


def test_uneven_inputs_under_join(results) -> None:
    ranks = of(results, joined)
    for record in ranks:
        assert record["finite"]
        assert record["kinds"] == {"gradients, dense"}
    assert equal(ranks[0]["last"], ranks[1]["last"])
