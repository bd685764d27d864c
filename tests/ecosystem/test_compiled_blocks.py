"""sketch_(model, Tokens(…), compile=True): each kind of block compiled once; never a crash."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.registry import set_default_backend
from torch.utils.checkpoint import checkpoint

import sketchprop as sp
from sketchprop import Tokens, zoo
from sketchprop.layers import compiled
from stack_helpers import Z_LIMIT, gradients, largest_z

Counter = torch._dynamo.testing.CompileCounterWithBackend


@pytest.fixture
def graphs() -> Iterator[Counter]:
    """Counts graphs; by a backend that compiles fast."""
    counter = Counter("aot_eager")
    torch._dynamo.reset()
    compiled._compiled.cache_clear()
    set_default_backend(counter)
    yield counter
    set_default_backend(None)
    compiled._compiled.cache_clear()


def vit(depth: int = 3, **options: Any) -> Any:
    torch.manual_seed(0)
    model = zoo.ViT(image=16, dim=16, depth=depth, heads=2, hidden=32)
    return sp.sketch_(model, Tokens(0.3, share="even"), compile=True, **options)


class Breaking(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def loss_of(model: nn.Module, size: int = 4) -> Tensor:
    x = torch.randn(size, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return F.cross_entropy(model(x), torch.arange(size))


def step(model: nn.Module, size: int = 4) -> Tensor:
    loss = loss_of(model, size)
    loss.backward()
    return loss.detach()


def test_equal_blocks_and_budgets_compile_once(graphs: Counter) -> None:
    """The first batch proves the blocks; a budget that comes back is there already."""
    model = vit()
    seen = []
    for budget in (0.3, 0.3, 0.5, 0.2, 0.5, 0.3):
        sp.set_budget_(model, budget)
        step(model)
        seen.append(graphs.frame_count)
    assert seen == [0, 1, 2, 3, 3, 3]
    with sp.exact(model):
        found = [step(model) for _ in range(2)]
    assert graphs.frame_count == 4  # compiled exact blocks, which kept tokens are compared with
    plain = sp.unsketch_(copy.deepcopy(model))
    torch.testing.assert_close(found[0], step(plain))
    keys = model.state_dict().keys()
    assert keys == plain.state_dict().keys()
    step(model.eval())
    step(pickle.loads(pickle.dumps(copy.deepcopy(model.train()))))
    torch.compile(model, fullgraph=True)(torch.randn(4, 3, 16, 16))  # the outer one alone
    step(sp.unsketch_(model))
    assert graphs.frame_count == 5


def test_exact_blocks_compile_before_their_budget_is_shared_out(graphs: Counter) -> None:
    """Kept tokens are compared with them, and what is exact never measures shares."""
    torch.manual_seed(0)
    model = zoo.ViT(image=16, dim=16, depth=2, heads=2, hidden=32)
    sp.sketch_(model, Tokens(0.3), compile=True)
    with sp.exact(model):
        step(model)
        assert graphs.frame_count == 1
    step(model)  # proves and measures
    assert graphs.frame_count == 1
    step(model)
    assert graphs.frame_count > 1


def test_under_checkpointing(graphs: Counter) -> None:
    model = vit()
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for _ in range(3):
        step(model)
    assert graphs.frame_count == 1


def test_what_does_not_compile_runs_with_a_word(
    graphs: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vit(check=False)
    model.blocks[1].mlp[1] = Breaking()
    with pytest.warns(UserWarning, match="SketchedZooBlock: does not compile.*graph_break"):
        step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model)
    assert [block.sketching.compiled for block in model.blocks] == [True, False, True]
    monkeypatch.setattr(compiled, "MOST_GRAPHS", 2)
    compiled._compiled.cache_clear()
    model = vit(depth=1, check=False)
    for size in (4, 5):
        step(model, size)
    with pytest.warns(UserWarning, match="2 budgets and shapes of batches were compiled"):
        step(model, 6)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        model.blocks[0](torch.randn(2, 4, 7))


def test_layers_are_compiled_by_torch() -> None:
    with pytest.raises(ValueError, match=r"torch.compile\(model\)"):
        sp.sketch_(zoo.mlp(), sp.Rows(0.3), compile=True)


def test_kernels_have_the_exact_mean() -> None:
    """Inductor draws by its own numbers; z ≤ 5 over 400 draws."""
    torch._dynamo.reset()
    model = vit(depth=1)
    compiled._compiled.cache_clear()
    plain = sp.unsketch_(copy.deepcopy(model))
    truth = gradients(plain.parameters(), lambda: loss_of(plain), 0)
    gradients(model.parameters(), lambda: loss_of(model), 0)  # proves

    def draw(seed: int) -> list[Tensor]:
        return gradients(model.parameters(), lambda: loss_of(model), seed)

    first, second = draw(0), draw(1)
    assert any(not torch.allclose(a, b) for a, b in zip(first, second, strict=True))
    assert largest_z(truth, draw, 400) <= Z_LIMIT
    assert model.blocks[0].sketching.compiled


def test_advice_against_compiled_exact_blocks(graphs: Counter) -> None:
    model = sp.unsketch_(vit(depth=1))
    batches = list(torch.randn(3, 4, 3, 16, 16))
    advice = sp.advise(model, _loss_on, batches, minutes=0.2, control=False, compile=True)
    assert 2 <= graphs.frame_count <= 4  # exact, and three budgets if there is time
    assert {o.name for o in advice.options} == {f"Tokens({p})" for p in (0.2, 0.3, 0.5)}
    assert all("compile=True" in option.line for option in advice.options)
    tried = [option.note for option in advice.options if option.sound]
    assert all(note.startswith(("compiled in", "its noise drowns")) for note in tried)
    with pytest.raises(ValueError, match="no block is known"):
        sp.advise(zoo.mlp(), _loss_on, batches, compile=True)


def _loss_on(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), torch.arange(4))


def test_a_part_that_is_changed_later_is_seen_sketched_and_exact(graphs: Counter) -> None:
    """torch's own guards do not look at hooks, nor at methods of its classes."""
    model = vit()
    for _ in range(2):
        step(model)
    with sp.exact(model):
        before = step(model)
    activation = model.blocks[0].mlp[1]
    hook = activation.register_forward_hook(lambda module, args, y: 3 * y)
    with sp.exact(model):
        after = step(model)
    torch.testing.assert_close(step(model), after)
    assert not torch.equal(after, before)
    hook.remove()
    torch.testing.assert_close(step(model), before)
