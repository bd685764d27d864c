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
    FIXED,
    GRADIENTS,
    INDEPENDENT,
    METHODS,
    PAPER,
    SINGLE,
    SKETCHES,
    all_coins,
    by_shape,
    exact_gradients,
    fixed,
    layer,
    of_member,
    products,
    relative_error,
)
from sketchprop import sketches
from sketchprop.core.compact import LowRank, MaskedElements, TwoSided, Whole
from sketchprop.core.enumeration import every_draw, expectation
from sketchprop.core.probabilities import optimal_probabilities
from sketchprop.core.vjp import Vjp
from sketchprop.meters.unbiased import TOLERANCE, check_unbiased, expected_gradients
from sketchprop.sketches import ColumnSketch, RowSketch, SpectralSketch

every_sketch = pytest.mark.parametrize("variant", SKETCHES, ids=str)


def test_every_public_sketch_is_in_the_table():
    exported = {
        thing
        for thing in (getattr(sketches, name) for name in sketches.__all__)
        if isinstance(thing, type)
        and issubclass(thing, sp.Sketch | sp.Split)
        and not getattr(thing, "__abstractmethods__", None)
    }
    assert exported == {variant.method for variant in SKETCHES} == {*METHODS, sp.Split}


def expected(variant, sketch, G, W, X):
    """E[dX], E[dW], E[db] over every draw."""
    return expectation(lambda uniforms: variant.gradients(sketch, G, W, X, uniforms))


# --- 1: the expectation is the exact gradient ---


@pytest.mark.parametrize("budget", BUDGETS)
@every_sketch
def test_the_mean_over_the_draw_is_the_exact_gradient(variant, budget):
    sketch = variant(budget)
    for case in CASES.values():
        means = expected(variant, sketch, case.G, case.W, case.X)
        truths = exact_gradients(case.G, case.W, case.X)
        for name, mean, true in zip(GRADIENTS, means, truths, strict=True):
            error = float((mean - true).norm() / (true.norm() or 1))
            assert error <= TOLERANCE == 1e-10, (case.name, name)


@every_sketch
def test_the_checker_says_so_too(variant):
    report = check_unbiased(variant(0.3))
    assert {e.case for e in report.entries} == set(CASES)
    assert {e.gradient for e in report.entries} == set(GRADIENTS)
    assert max(e.error for e in report.entries) <= TOLERANCE, str(report)
    assert report.ok


@pytest.mark.parametrize("budget", [0.3, 1])
@pytest.mark.parametrize(
    "variant", INDEPENDENT + tuple(v for v in PAPER if v.sampling == "independent"), ids=str
)
def test_the_enumeration_agrees_with_all_outcomes_of_the_coins(variant, budget):
    # 2ⁿ outcomes, weighted by their probabilities: no breakpoints, nothing of the library's sums.
    shape = (1, 2, 3) if variant.method is sp.ElementMask else (4, 5, 3)
    G, W, X = layer(*shape)
    W[0] = 0
    sketch = variant(budget)
    totals = [torch.zeros_like(t) for t in exact_gradients(G, W, X)]
    chances = 0.0
    for chance, drawn in all_coins(variant, sketch, Vjp(G, W, X)):
        chances += chance
        for total, part in zip(totals, products(drawn, W, X), strict=True):
            total.add_(chance * part)
    assert chances == pytest.approx(1, abs=1e-12)
    for together in (True, False):
        means = expectation(
            lambda uniforms: variant.gradients(sketch, G, W, X, uniforms), together=together
        )
        for total, mean in zip(totals, means, strict=True):
            torch.testing.assert_close(total, mean, rtol=0, atol=1e-11)
    if variant in SKETCHES:
        for total, true in zip(totals, exact_gradients(G, W, X), strict=True):
            torch.testing.assert_close(total, true, rtol=0, atol=1e-11)


@pytest.mark.parametrize("budget", [0.3, 0.5, 1])
@pytest.mark.parametrize(
    "variant",
    FIXED + tuple(v for v in PAPER if v.sampling == "fixed"),
    ids=str,
)
def test_the_enumeration_agrees_with_a_fine_grid_of_uniforms(variant, budget):
    # A stack of equal layers with u on a grid: the midpoint rule, whose error for a function
    # with k jumps is at most k/2 steps of the grid times the height of the jumps.
    G, W, X = layer(6, 5, 4)
    W[0] = 0
    sketch = variant(budget)
    N = 4096
    grid = (torch.arange(N, dtype=torch.float64) + 0.5) / N
    smallest = []

    def uniforms(p, shape):
        # Several uniforms: each runs over the whole grid, in an order of its own.
        smallest.append(float(p[p > 0].min()))
        lines = [grid[torch.randperm(N)] for _ in range(math.prod(shape[1:]))]
        return torch.stack(lines, -1).view(shape)

    many = [t.expand(N, -1, -1) for t in (G, W, X)]
    means = [part.mean(0) for part in variant.gradients(sketch, *many, uniforms)]
    jump = 4 / (N * min(smallest))
    assert jump < 0.1
    truths = exact_gradients(G, W, X)
    for mean, checked in zip(means, expected(variant, sketch, G, W, X), strict=True):
        assert (mean - checked).norm() <= jump * max(t.norm() for t in truths)
    if variant in SKETCHES:
        for mean, true in zip(means, truths, strict=True):
            assert (mean - true).norm() <= jump * max(t.norm() for t in truths)


def test_the_enumeration_follows_a_draw_that_depends_on_another():
    # By hand: a coin of 1/4, then after heads a coin of 1/2, after tails one of 1/8.
    def run(uniforms):
        first = uniforms(torch.tensor([0.25]), (1,)) < 0.25
        p = torch.where(first, 0.5, 0.125)
        return bool(first), bool(uniforms(p, (1,)) < p)

    chances = dict.fromkeys([(True, True), (True, False), (False, True), (False, False)], 0.0)
    for chance, outcome in every_draw(run):
        chances[outcome] += chance
    assert list(chances.values()) == pytest.approx([1 / 8, 1 / 8, 3 / 32, 21 / 32], abs=1e-15)


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


@pytest.mark.parametrize("sampling", ["fixed", "independent"])
def test_a_zero_initialised_layer_trains(sampling):
    moved, losses = _train_from_zero(sp.Diagonal(0.25, sampling=sampling))
    assert moved.all()
    assert losses[-1] < 0.7 * losses[0]


def test_a_zero_initialised_layer_does_not_train_with_the_literal_formula():
    # The first draw is of all-zero weights. From then on rows that are still zero have p = 0.
    moved, _ = _train_from_zero(sp.Diagonal(2, paper=True))
    assert moved.sum() == 2


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
                    grads = variant.gradients(sketch, broken, W, X, fixed(u))
                    for name, grad in zip(GRADIENTS, grads, strict=True):
                        assert not grad.isfinite().all(), (name, budget, (b, i), u)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("variant", SKETCHES, ids=str)
def test_non_finite_stays_in_its_member_of_a_stack(variant, bad):
    G, W, X = layer(6, 5, 4, stack=(3,))
    G[1, 2, 3] = bad
    for budget in (1, 0.5):
        for grad in variant.gradients(variant(budget), G, W, X):
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


def _assert_size(compact, sketch, B, n, d):
    if isinstance(compact, TwoSided):
        weight = sketch.weight if isinstance(sketch, sp.Split) else sketch
        sides = [(compact.weight, weight)]
        if isinstance(sketch, sp.Split):
            sides.append((compact.input, sketch.input))
        for side, own in sides:
            if own is None:
                assert isinstance(side, Whole)
            else:
                inner = side.weight if isinstance(side, TwoSided) else side
                _assert_size(inner, own, B, n, d)
        return
    rank = sketch.rank_of(B, n, d)
    if isinstance(compact, MaskedElements):
        for mask in (compact.weight_mask, compact.input_mask):
            assert ((mask != 0).sum(-1) == rank).all()
    else:
        assert _kept(compact) == rank


@pytest.mark.parametrize("variant", FIXED, ids=str)
def test_fixed_sampling_has_a_fixed_size(variant):
    for case in CASES.values():
        vjp = Vjp(case.G, case.W, case.X)
        sizes = *case.G.shape, case.W.shape[1]
        if not variant.is_pair:
            atoms = variant(1).atom_count(*sizes)
            # Of directions the budget is a share of n, as the paper's r/n, up to the rank.
            whole = sizes[1] if isinstance(variant(1), SpectralSketch) else atoms
            half = min(atoms, max(1, round(0.5 * whole)))
            for budget, rank in [(1, 1), (3, min(3, atoms)), (0.5, half), (1.0, atoms)]:
                assert variant(budget).rank_of(*sizes) == rank
        for budget in (1, 3, 0.5):
            sketch = variant(budget)
            for _ in range(5):
                drawn = variant.draw(sketch, vjp)
                if isinstance(drawn, LowRank) and variant.planner is not None:
                    # Lasting atoms fit any number of rows: there are n of them.
                    assert _kept(drawn) == sketch.rank(case.G.shape[1])
                else:
                    _assert_size(drawn, sketch, *sizes)


@pytest.mark.parametrize("variant", INDEPENDENT, ids=str)
def test_independent_sampling_has_the_budget_as_its_mean_size(variant):
    G, W, X = layer(6, 5, 4)
    for budget in (0.3, 2):
        sketch = variant(budget)
        rank = budget if isinstance(budget, int) else budget * sketch.atom_count(6, 5, 4)
        assert sketch.rank_of(6, 5, 4) == pytest.approx(rank)
        sums = variant.atoms(sketch, Vjp(G, W, X)).probabilities.sum(-1)
        torch.testing.assert_close(sums, torch.full_like(sums, rank), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variant", [v for v in SINGLE if v.method is not sp.ElementMask], ids=str)
def test_every_atom_that_is_not_zero_has_a_positive_probability(variant, dtype):
    for case in CASES.values():
        vjp = Vjp(case.G.to(dtype), case.W.to(dtype), case.X.to(dtype))
        # Rows drawn in forward are atoms of dW, all others are atoms of G.
        whole = vjp.G if variant in ATOMS else vjp.G.mT @ vjp.X
        for budget in (1, 0.5):
            sketch = variant(budget)
            atoms = variant.atoms(sketch, vjp)
            p = atoms.probabilities
            assert ((p >= 0) & (p <= 1)).all()
            assert float(p.sum()) == pytest.approx(atoms.rank, rel=1e-5)
            rebuilt = torch.zeros_like(whole)
            for i in range(p.numel()):
                kept = atoms.keep(vjp, torch.tensor([i]), p.new_ones(1))
                atom = kept.dense() if variant in ATOMS else kept.weight_grad(vjp.X)
                rebuilt += atom
                if atom.norm() > 1e-20 * whole.norm():
                    assert p[i] > 0
            # The atoms add up to the whole: with p > 0 for each of them this is unbiasedness.
            # (A remembered RCS goes through Γ^½ and Γ^-½, whose condition a ridge bounds.)
            eps = torch.finfo(dtype).eps * (50 if variant.planner is None else 2000)
            torch.testing.assert_close(rebuilt, whole, rtol=0, atol=eps * float(whole.abs().max()))


@pytest.mark.parametrize("variant", SINGLE + PAPER, ids=str)
def test_roots_are_the_roots_of_the_importance(variant):
    sketch = variant(2)
    if isinstance(sketch, ColumnSketch | RowSketch):
        for case in CASES.values():
            vjp = Vjp(case.G, case.W, case.X)
            weights = sketch.importance(vjp)
            torch.testing.assert_close(sketch.roots(vjp), weights.sqrt())
            assert torch.equal(
                sketch.atoms(vjp).probabilities > 0,
                optimal_probabilities(weights, sketch.rank(weights.numel())) > 0,
            )


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("variant", ATOMS, ids=str)
def test_probabilities_do_not_depend_on_the_scale_of_the_gradient(variant, scale):
    G, W, X = layer(6, 5, 4)
    sketch = variant(2)
    one, two = (variant.atoms(sketch, Vjp(g, W, X)).probabilities for g in (G, scale * G))
    torch.testing.assert_close(one, two)


@every_sketch
def test_budget_one_is_exact_for_every_draw(variant):
    for case in CASES.values():
        G, W, X = case.G, case.W, case.X
        for budget in (1.0, 10_000):
            sketch = variant(budget)
            assert sketch.keeps_all(*G.shape, W.shape[1])
            vjp = Vjp(G, W, X)
            if not variant.is_pair:
                assert (variant.atoms(sketch, vjp).probabilities == 1).all()
            drawn = variant.draw(sketch, vjp)
            for grad, true in zip(products(drawn, W, X), exact_gradients(G, W, X), strict=True):
                torch.testing.assert_close(grad, true, rtol=0, atol=1e-12 * max(1, true.norm()))
            spectral = isinstance(drawn, LowRank) or (
                isinstance(drawn, TwoSided) and isinstance(drawn.input, LowRank)
            )
            if not spectral:
                assert torch.equal(drawn.dense(), G)


# --- stacks ---


@pytest.mark.parametrize("stack", [(3,), (2, 2), (1,)])
@pytest.mark.parametrize("variant", SKETCHES + PAPER, ids=str)
def test_a_stack_gives_what_each_member_gives_alone(variant, stack):
    for B, n, d in [(6, 5, 4), (3, 5, 2)]:
        G, W, X = layer(B, n, d, stack=stack)
        for budget in (1, 0.5):
            sketch = variant(budget)
            uniforms = by_shape(3)
            # A direction that G hardly has is known to √eps only, and stale atoms keep those too.
            spectral = variant.method in (sp.GradientSVD, sp.RankConstrained)
            tolerance = 1e-6 if spectral and variant.planner is not None else 1e-10
            whole = variant.gradients(sketch, G, W, X, uniforms)
            for member in [tuple(map(int, m)) for m in torch.ones(stack).nonzero()]:
                own = G[member], W[member], X[member]
                alone = variant.gradients(sketch, *own, of_member(uniforms, stack, member))
                for grad, part in zip(whole, alone, strict=True):
                    torch.testing.assert_close(grad[member], part, rtol=tolerance, atol=tolerance)
                if not variant.is_pair:
                    torch.testing.assert_close(
                        variant.atoms(sketch, Vjp(G, W, X)).probabilities[member],
                        variant.atoms(sketch, Vjp(*own)).probabilities,
                    )


@pytest.mark.parametrize("variant", [v for v in ATOMS if v.sampling == "fixed"], ids=str)
def test_members_of_a_stack_draw_for_themselves(variant):
    many = Vjp(*(t.expand(40, -1, -1) for t in layer(16, 12, 4)))
    drawn = variant.draw(variant(2), many).dense()
    assert any(not torch.allclose(drawn[0], other) for other in drawn[1:])
