"""The laws that every sketch obeys, asked of every variant of every method."""

import math

import pytest
import torch
from torch import nn

import sketchprop as sp
from law_table import (
    ATOMS,
    BUDGETS,
    CASES,
    EXACT,
    GRADIENTS,
    INDEPENDENT,
    METHODS,
    PAPER,
    SKETCHES,
    enumerate_outcomes,
    exact_gradients,
    expectation,
    layer,
    products,
    relative_error,
)
from sketchprop import sketches
from sketchprop.core.compact import LowRank, MaskedElements
from sketchprop.meters.unbiased import TOLERANCE, check_unbiased, expected_gradients

every_sketch = pytest.mark.parametrize("variant", SKETCHES, ids=str)


def test_every_exported_method_is_listed():
    exported = {
        thing
        for thing in (getattr(sketches, name) for name in sketches.__all__)
        if isinstance(thing, type)
        and issubclass(thing, sp.Sketch)
        and not thing.__abstractmethods__
    }
    # What draws in forward, or apart for dX and dW, and the peers for comparison have their own
    # laws and files of tests.
    apart = {sp.ForwardRows, sp.Split, sketches.VCAS, sketches.WTACRS}
    assert exported - apart == set(METHODS)


# --- 1: the expectation is the exact gradient ---


@pytest.mark.parametrize("budget", BUDGETS)
@every_sketch
def test_the_mean_over_the_draw_is_the_exact_gradient(variant, budget):
    report = check_unbiased(variant(budget))
    assert {e.case for e in report.entries} == set(CASES)
    assert {e.gradient for e in report.entries} == set(GRADIENTS)
    assert max(e.error for e in report.entries) <= TOLERANCE == 1e-10, str(report)
    assert report.ok


def test_the_table_of_cases_holds_what_it_names():
    shapes = {(*c.G.shape, c.W.shape[-1]) for c in CASES.values()}
    assert any(n > d for _, n, d in shapes)
    assert any(n > B for B, n, _ in shapes)
    assert any(B == 1 for B, _, _ in shapes)
    assert any(n == 1 for _, n, _ in shapes)
    assert (CASES["zero rows of W"].W.norm(dim=1) == 0).any()
    assert (CASES["zero rows of W"].W != 0).any()
    assert not CASES["W = 0"].W.any()
    assert (CASES["zero columns of G"].G.norm(dim=0) == 0).any()
    constant = CASES["constant columns of G"].G
    assert ((constant.var(0) == 0) & (constant[0] != 0)).any()
    assert all(c.G.dtype == torch.float64 for c in CASES.values())


@pytest.mark.parametrize("budget", [0.3, 1])
@pytest.mark.parametrize(
    "variant", INDEPENDENT + tuple(v for v in PAPER if v.sampling == "independent"), ids=str
)
def test_the_checker_agrees_with_all_outcomes_of_the_coins(variant, budget):
    # 2ⁿ outcomes, weighted by their probabilities: no breakpoints, nothing of the checker.
    shape = (1, 2, 3) if variant.method is sp.ElementMask else (4, 5, 3)
    G, W, X = layer(*shape)
    W[0] = 0
    sketch = variant(budget)
    totals = [torch.zeros_like(t) for t in exact_gradients(G, W, X)]
    chances = 0.0
    for chance, u in enumerate_outcomes(sketch, G, W):
        chances += chance
        for total, part in zip(totals, products(sketch(G, W, u), W, X), strict=True):
            total.add_(chance * part)
    assert chances == pytest.approx(1, abs=1e-12)
    for total, mean in zip(totals, expected_gradients(sketch, G, W, X), strict=True):
        torch.testing.assert_close(total, mean, rtol=0, atol=1e-11)
    if variant in SKETCHES:
        for total, true in zip(totals, exact_gradients(G, W, X), strict=True):
            torch.testing.assert_close(total, true, rtol=0, atol=1e-11)


@pytest.mark.parametrize("budget", [0.3, 0.5, 1])
@pytest.mark.parametrize(
    "variant", EXACT + tuple(v for v in PAPER if v.sampling == "exact"), ids=str
)
def test_the_checker_agrees_with_a_fine_grid_of_uniforms(variant, budget):
    # A stack of equal layers with u on a grid: the midpoint rule, whose error for a function
    # with k jumps is at most k/2 steps of the grid times the height of the jumps.
    G, W, X = layer(6, 5, 4)
    W[0] = 0
    sketch = variant(budget)
    N = 4096
    grid = (torch.arange(N, dtype=torch.float64) + 0.5) / N
    lines = sketch.uniform_shape(G, W)
    # Several uniforms: each runs over the whole grid, in an order of its own.
    u = torch.stack([grid[torch.randperm(N)] for _ in range(math.prod(lines))], -1)
    u = u.view(N, *lines) if lines else grid
    drawn = sketch(G.expand(N, -1, -1), W.expand(N, -1, -1), u)
    means = [part.mean(0) for part in products(drawn, W.expand(N, -1, -1), X.expand(N, -1, -1))]
    p = sketch.probabilities(G, W)
    jump = 4 / (N * float(p[p > 0].min()))
    assert jump < 0.1
    truths = exact_gradients(G, W, X)
    for mean, checked in zip(means, expected_gradients(sketch, G, W, X), strict=True):
        assert (mean - checked).norm() <= jump * max(t.norm() for t in truths)
    if variant in SKETCHES:
        for mean, true in zip(means, truths, strict=True):
            assert (mean - true).norm() <= jump * max(t.norm() for t in truths)


# --- the literal formulas of the paper, and their known biases ---

ALL = frozenset(GRADIENTS)
WITHOUT_DX = frozenset({"dW", "db"})
KNOWN_BIASES = {
    sp.Variance: {"constant columns of G": ALL},
    sp.Diagonal: {"zero rows of W": WITHOUT_DX},
    sp.RankConstrained: {
        "expanding (n > d)": WITHOUT_DX,
        "expanding, B < n": WITHOUT_DX,
        "one input": WITHOUT_DX,
        "zero rows of W": WITHOUT_DX,
        "one heavy atom": WITHOUT_DX,
    },
}


@pytest.mark.parametrize("variant", PAPER, ids=str)
def test_paper_formulas_are_biased_exactly_where_known(variant):
    found = {}
    for entry in check_unbiased(variant(1)).biased:
        found.setdefault(entry.case, set()).add(entry.gradient)
    assert found == KNOWN_BIASES[variant.method]
    default = variant.method(1, sampling=variant.sampling)
    assert check_unbiased(default).ok


@pytest.mark.parametrize("case", ["expanding (n > d)", "expanding, B < n", "one input"])
@pytest.mark.parametrize("sampling", ["exact", "independent"])
def test_literal_rcs_never_biases_dx(case, sampling):
    c = CASES[case]
    sketch = sp.RankConstrained(1, sampling=sampling, paper=True)
    dX, dW, _ = expected_gradients(sketch, c.G, c.W, c.X)
    assert relative_error(dX, c.G @ c.W) <= 1e-10
    assert relative_error(dW, c.G.mT @ c.X) > 0.5


def _softmax_layer(W, X):
    """G of a cross-entropy with random labels; the logits XWᵀ have unit variance."""
    labels = torch.randint(W.shape[0], (X.shape[0],))
    return torch.softmax(X @ W.mT, -1) - nn.functional.one_hot(labels, W.shape[0])


@pytest.mark.parametrize(("kind", "error"), [("softmax", 0.75), ("normal", 0.84)])
def test_literal_rcs_loses_most_of_dw_in_an_expanding_layer(kind, error):
    # W sees d = 16 of the n = 64 directions of G. How much of dW is then missing from its mean
    # depends on G: 75 % at a softmax, 84 % for normal G, W, X; without paper=True nothing.
    errors = []
    for _ in range(10):
        G, W, X = layer(256, 64, 16)
        W /= 4
        if kind == "softmax":
            G = _softmax_layer(W, X)
        dX, dW, _ = expected_gradients(sp.RankConstrained(4, paper=True), G, W, X)
        errors.append(relative_error(dW, G.mT @ X))
        assert relative_error(dX, G @ W) <= 1e-10
    assert sum(errors) / len(errors) == pytest.approx(error, abs=0.03)
    _, dW, _ = expected_gradients(sp.RankConstrained(4), G, W, X)
    assert relative_error(dW, G.mT @ X) <= 1e-10


def _train_from_zero(sketch, steps=60):
    torch.manual_seed(1)
    layer, head = nn.Linear(5, 8), nn.Linear(8, 3)
    nn.init.zeros_(layer.weight)
    model = nn.Sequential(layer, head).double()
    sp.sketch_(model, sketch)
    x, y = torch.randn(16, 5).double(), torch.randn(16, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moved = torch.zeros(8, dtype=torch.bool)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        moved |= layer.weight.detach().abs().sum(1) > 0
    return moved, losses


@pytest.mark.parametrize("sampling", ["exact", "independent"])
def test_a_zero_initialised_layer_trains(sampling):
    moved, losses = _train_from_zero(sp.Diagonal(0.25, sampling=sampling))
    assert moved.all()
    assert losses[-1] < 0.7 * losses[0]


def test_a_zero_initialised_layer_does_not_train_with_the_literal_formula():
    # The first draw is of all-zero weights. From then on rows that are still zero have p = 0.
    moved, _ = _train_from_zero(sp.Diagonal(2, paper=True))
    assert moved.sum() == 2


def test_rows_that_start_at_zero_never_get_a_gradient_with_the_literal_formula():
    G, W, X = layer(8, 6, 5)
    W[[1, 4]] = 0
    u = torch.linspace(0, 0.999, 200, dtype=torch.float64)
    for paper in (True, False):
        sketch = sp.Diagonal(2, paper=paper)
        rows = torch.stack([sketch(G, W, v).weight_grad(X) for v in u]).abs().amax((0, 2)) > 0
        assert rows.tolist() == [True, not paper, True, True, not paper, True]


# --- a non-finite gradient is never hidden ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("variant", SKETCHES + PAPER, ids=str)
def test_non_finite_in_gives_non_finite_out(variant, bad, dtype):
    for B, n in [(6, 5), (3, 5), (1, 4)]:
        G, W, X = layer(B, n, 4, dtype=dtype)
        G[:, 2] = 0  # the bad entry may also sit in a column that is otherwise empty
        for budget in (1, 0.5, 1.0):
            sketch = variant(budget)
            for b, i in {(0, 0), (B - 1, n - 1), (B // 2, 2)}:
                broken = G.clone()
                broken[b, i] = bad
                for u in (0.0, 0.5, 1 - 2**-53):
                    shape = sketch.uniform_shape(broken, W)
                    drawn = sketch(broken, W, torch.full(shape, u, dtype=torch.float64))
                    for name, grad in zip(GRADIENTS, products(drawn, W, X), strict=True):
                        assert not grad.isfinite().all(), (name, budget, (b, i), u)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("variant", SKETCHES, ids=str)
def test_non_finite_stays_in_its_member_of_a_stack(variant, bad):
    G, W, X = layer(6, 5, 4, stack=(3,))
    G[1, 2, 3] = bad
    for budget in (1, 0.5):
        drawn = variant(budget)(G, W)
        for grad in products(drawn, W, X):
            finite = grad.flatten(1).isfinite().all(1)
            assert finite.tolist() == [True, False, True]


# --- size, probabilities, budget 1 ---


def _kept(compact):
    """How many atoms a compact gradient carries."""
    if isinstance(compact, LowRank):
        assert compact.right.shape[-2] == compact.left.shape[-1]
        return compact.left.shape[-1]
    assert compact.index.unique().numel() == compact.index.numel()
    assert compact.index.numel() in compact.values.shape
    return compact.index.numel()


@pytest.mark.parametrize("variant", EXACT, ids=str)
def test_exact_sampling_has_a_fixed_size(variant):
    for case in CASES.values():
        G, W = case.G, case.W
        atoms = variant(1).atom_count(*G.shape, W.shape[1])
        for budget, rank in [(1, 1), (3, min(3, atoms)), (0.5, max(1, round(0.5 * atoms)))]:
            sketch = variant(budget)
            assert sketch.rank(atoms) == rank
            for _ in range(5):
                drawn = sketch(G, W)
                if isinstance(drawn, MaskedElements):
                    for mask in (drawn.weight_mask, drawn.input_mask):
                        assert ((mask != 0).sum(-1) == rank).all()
                else:
                    assert _kept(drawn) == rank


@pytest.mark.parametrize("variant", INDEPENDENT, ids=str)
def test_independent_sampling_has_the_budget_as_its_mean_size(variant):
    G, W, _ = layer(6, 5, 4)
    for budget in (0.3, 2):
        sketch = variant(budget)
        atoms = sketch.atom_count(6, 5, 4)
        rank = budget if isinstance(budget, int) else budget * atoms
        assert sketch.rank(atoms) == pytest.approx(rank)
        assert float(sketch.probabilities(G, W).sum()) == pytest.approx(rank, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variant", ATOMS, ids=str)
def test_every_atom_that_is_not_zero_has_a_positive_probability(variant, dtype):
    for case in CASES.values():
        G, W = case.G.to(dtype), case.W.to(dtype)
        for budget in (1, 0.5):
            sketch = variant(budget)
            plan = sketch.plan(G, W)
            p = plan.probabilities
            assert ((p >= 0) & (p <= 1)).all()
            rank = sketch.rank(p.numel())
            assert float(p.sum()) == pytest.approx(rank, rel=1e-5)
            rebuilt = torch.zeros_like(G)
            for i in range(p.numel()):
                atom = sketch.keep(G, plan, torch.tensor([i]), p.new_ones(1)).dense()
                rebuilt += atom
                if atom.norm() > 1e-20 * G.norm():
                    assert p[i] > 0
            # The atoms add up to G: with p > 0 for each of them this is unbiasedness.
            # (A remembered RCS goes through Γ^½ and Γ^-½, whose condition a ridge bounds.)
            eps = torch.finfo(dtype).eps * (50 if not getattr(sketch, "partial", False) else 2000)
            torch.testing.assert_close(rebuilt, G, rtol=0, atol=eps * float(G.abs().max()))


@pytest.mark.parametrize("variant", SKETCHES + PAPER, ids=str)
def test_roots_are_the_roots_of_the_weights(variant):
    sketch = variant(2)
    if isinstance(sketch, sp.ColumnSketch) and not sketch.partial:
        for case in CASES.values():
            weights = sketch.weights(case.G, case.W)
            torch.testing.assert_close(sketch.roots(case.G, case.W), weights.sqrt())
            assert torch.equal(
                sketch.probabilities(case.G, case.W) > 0,
                sp.optimal_probabilities(weights, sketch.rank(weights.numel())) > 0,
            )


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("variant", ATOMS, ids=str)
def test_probabilities_do_not_depend_on_the_scale_of_the_gradient(variant, scale):
    G, W, _ = layer(6, 5, 4)
    sketch = variant(2)
    torch.testing.assert_close(sketch.probabilities(G, W), sketch.probabilities(scale * G, W))


@every_sketch
def test_budget_one_is_exact_for_every_draw(variant):
    for case in CASES.values():
        G, W, X = case.G, case.W, case.X
        for budget in (1.0, 10_000):
            sketch = variant(budget)
            assert sketch.keeps_all(*G.shape, W.shape[1])
            assert (sketch.probabilities(G, W) == 1).all()
            drawn = sketch(G, W)
            for grad, true in zip(products(drawn, W, X), exact_gradients(G, W, X), strict=True):
                torch.testing.assert_close(grad, true, rtol=0, atol=1e-12 * max(1, true.norm()))
            if not isinstance(drawn, LowRank):
                assert torch.equal(drawn.dense(), G)


# --- stacks ---


@pytest.mark.parametrize("stack", [(3,), (2, 2), (1,)])
@pytest.mark.parametrize("variant", SKETCHES + PAPER, ids=str)
def test_a_stack_gives_what_each_member_gives_alone(variant, stack):
    for B, n, d in [(6, 5, 4), (3, 5, 2)]:
        G, W, X = layer(B, n, d, stack=stack)
        for budget in (1, 0.5):
            sketch = variant(budget)
            u = torch.rand(sketch.uniform_shape(G, W), dtype=torch.float64)
            assert u.shape[: len(stack)] == stack
            whole = products(sketch(G, W, u), W, X)
            p = sketch.probabilities(G, W)
            for member in [tuple(map(int, m)) for m in torch.ones(stack).nonzero()]:
                alone = sketch(G[member], W[member], u[member])
                for grad, part in zip(whole, products(alone, W[member], X[member]), strict=True):
                    torch.testing.assert_close(grad[member], part, rtol=1e-10, atol=1e-10)
                if p.dim() > 1:
                    torch.testing.assert_close(
                        p[member], sketch.probabilities(G[member], W[member])
                    )


@pytest.mark.parametrize("variant", [v for v in ATOMS if v.sampling == "exact"], ids=str)
def test_members_of_a_stack_draw_for_themselves(variant):
    G, W, _ = layer(16, 12, 4)
    drawn = variant(2)(G.expand(40, -1, -1), W.expand(40, -1, -1)).dense()
    assert any(not torch.allclose(drawn[0], other) for other in drawn[1:])


# --- second moments: the helper that other tests rely on ---


@pytest.mark.parametrize("variant", [v for v in ATOMS if v.method is not sp.SampleMask], ids=str)
def test_expectation_of_the_dense_gradient_is_the_gradient(variant):
    G, W, _ = layer(5, 6, 4)
    mean = expectation(variant(2), G, W, lambda c: c.dense())
    torch.testing.assert_close(mean, G, rtol=0, atol=1e-11)
