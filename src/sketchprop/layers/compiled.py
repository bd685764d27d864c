"""Blocks compiled in place: one compiled function for each kind of block, shared by all of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

MOST_GRAPHS = 24
"""Of one kind of block: for each budget, exact, and for each shape."""

QUICK = {"size_asserts": False, "alignment_asserts": False}
"""Inductor asks of each tensor that torch hands it whether it is what torch said: a tenth of the
time of a small block's backward."""


@cache
def _compiled(kind: Any) -> Callable[..., Any]:
    from torch._dynamo.backends.registry import get_default_backend  # takes long to import

    # Called as a plain function of the module, weights are inputs: equal blocks share one graph.
    # How many rows are kept is rounded from shapes: these cannot be symbols.
    how: Any = {"recompile_limit": MOST_GRAPHS, "isolate_recompiles": True, "dynamic": False}
    if get_default_backend() == "inductor":
        how["options"] = QUICK
    compiled: Callable[..., Any] = torch.compile(kind.call, fullgraph=True, **how)
    return compiled


def can_compile(block: Any) -> bool:
    """Whether a call of this block is to be compiled, now.

    A batch that proves a block runs as it is, and so does what checkpointing recomputes of it.
    """
    state = block.sketching
    # A mode that watches operations sees none inside of a compiled function.
    watched = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
    if watched or not (block.training and torch.is_grad_enabled()):
        return False
    if torch._C._current_graph_task_id() == -1:  # not within backward, which recomputes
        state.warm = True
    return bool(state.warm)


def run_compiled(block: Any, *args: Any, **kwargs: Any) -> Any:
    """The block's call, compiled; where that fails the block runs as it is from then on."""
    kind: Any = type(block)
    try:
        return _compiled(kind)(block, *args, **kwargs)
    except Exception as error:
        from torch._dynamo import exc  # loaded by now; it takes long to import

        limit = isinstance(error, exc.FailOnRecompileLimitHit)
        if not (limit or isinstance(error, exc.TorchDynamoException)):
            raise
        result = block.call(*args, **kwargs)  # what is wrong with the call itself is said here
        if limit:  # what was compiled before still serves
            why = (
                f"{MOST_GRAPHS} budgets and shapes of batches were compiled; others run as they "
                "are: pad to few lengths, or leave out compile=True"
            )
        else:
            block.sketching.compiled = False
            reason = next(iter(str(error).strip().splitlines()), "")
            why = f"does not compile and runs as it is: {type(error).__name__}: {reason}"
        warnings.warn(f"{kind.__name__}: {why}", stacklevel=3)
        return result
