"""How many kernels a training step launches, forward and backward: a count, not a time.

Eager: a launch is a call that the dispatcher sees below autograd (aten), unless it computes
nothing: views, ``detach``, ``empty`` and its kin, ``_unsafe_view``. A call that launches several
kernels inside, a sort for example, counts once. Compiled: calls of generated kernels, of library
kernels and of operators that inductor leaves to aten, in the code that it writes. ``.grad`` is
absent, as after ``zero_grad()``. The optimizer is not counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils._python_dispatch import TorchDispatchMode

import sketchprop as sp

from . import tokens
from .tokens import loss_of

MODELS = {
    name: tokens.MODELS[name]
    for name in ("ViT 96 × 4, 16 × 64 tokens", "MiniLM-L6, 2 × 512 tokens")
}
SKETCH = sp.Tokens(0.2)
TARGET = "at most 400 in the ViT's backward and 600 in MiniLM's, eager"
COUNTED = "calls that compute something (no views, no empty tensors), .grad absent, no optimizer"
BOUND = 691
"""Of the ViT's backward on kept tokens, eager, with draws in torch: what a GPU launches."""
BOUND_IN_C = 360
"""With draws in C, on a CPU."""
CALL = re.compile(r"\b(?:(?:cpp|triton)_\w+(?:\.run)?|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(")
"""A launch in the code that inductor writes."""


class Launches(TorchDispatchMode):
    """Counts calls below autograd that compute something, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if not _computes_nothing(func, name):
            self.calls[name] += 1
        return func(*args, **kwargs or {})


def _computes_nothing(func: Any, name: str) -> bool:
    aliases = [r.alias_info for r in func._schema.returns]
    view = any(alias is not None and not alias.is_write for alias in aliases)
    question = func.namespace == "prim"  # fake tensors are asked for their device
    return view or question or "empty" in name or name == "aten._unsafe_view.default"


class Counts(NamedTuple):
    forward: int
    backward: int


def eager(model: nn.Module, inputs: Tensor) -> Counts:
    """Of the second step: in the first one blocks are proven."""
    labels = torch.zeros(inputs.shape[0], dtype=torch.int64, device=inputs.device)
    for _ in range(2):
        model.zero_grad()
        with Launches() as forward:
            loss = loss_of(model(inputs), labels)
        with Launches() as backward:
            loss.backward()  # type: ignore[no-untyped-call]
    return Counts(forward.calls.total(), backward.calls.total())


def compiled(model: nn.Module, inputs: Tensor) -> Counts:
    """Of the model and its loss in one graph, read off the code of both passes, which is not run.

    A compiler of C++ would take minutes.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    labels = torch.zeros(inputs.shape[0], dtype=torch.int64, device=inputs.device)
    counts: dict[bool, int] = {}

    def note(code: str) -> None:
        counts[V.graph.is_backward] = len(CALL.findall(code[code.index("def call(") :]))
        if len(counts) == 2:
            raise _EnoughWrittenError

    loss_of(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
    torch.compiler.reset()
    step = torch.compile(lambda x: loss_of(model(x), labels), fullgraph=True, dynamic=False)
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        mock.patch.object(GraphLowering, "save_output_code", note),
        mock.patch.multiple(AsyncCompile, cpp_pybinding=mock.Mock(), triton=mock.Mock()),
        suppress(_EnoughWrittenError, BackendCompilerFailed),
    ):
        step(inputs).backward()
    return Counts(counts[False], counts[True])


class _EnoughWrittenError(Exception):
    """The code of forward and backward is there."""


def launches(names: list[str], modes: list[str], device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each model, mode and step."""
    ways = {"eager": eager, "compiled": compiled}
    for name in names:
        for mode in modes:
            for sketch in (None, SKETCH):
                counts = ways[mode](*MODELS[name].prepared(sketch, device))
                step = "exact" if sketch is None else repr(sketch)
                yield {"model": name, "mode": mode, "step": step, **counts._asdict()}
