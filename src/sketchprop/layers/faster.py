"""Sketch only where it is faster: a layer times both ways on its real shapes and keeps one.

Decisions are remembered in a file, so that the next run on the same machine need not time again.
"""

from __future__ import annotations

import json
import math
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from .._version import __version__
from ..core.cache import cache_folder
from ..core.stopwatch import cpu_name, in_turns
from ..sketches import AnySketch, Every
from .isolation import alone, random_state_kept, twin
from .sketched import SketchedModule

MARGIN = 0.97
"""A layer is sketched where that takes less than this share of the exact time."""

_SECONDS = 0.3
_ROUNDS = (5, 40)


def cache_file() -> Path:
    """``faster.json`` in the user's cache folder, or in ``$SKETCHPROP_CACHE``."""
    return cache_folder() / "faster.json"


@dataclass(frozen=True)
class Decision:
    """Forward and backward of one layer on one shape, sketched over exact."""

    ratio: float
    exact_ms: float
    sketched_ms: float
    error: float = field(default=0.0, compare=False)
    """Of the ratio; not remembered."""

    @property
    def sketch(self) -> bool:
        return self.ratio < MARGIN

    @property
    def sure(self) -> bool:
        """Whether another timing would decide alike: not where a busy machine blurs it."""
        return abs(self.ratio - MARGIN) > 2 * self.error

    def __str__(self) -> str:
        verdict = "faster" if self.sketch else "exact is faster"
        return f"{verdict}: {self.sketched_ms:.3g} ms sketched, {self.exact_ms:.3g} ms exact"


class Judge:
    """Says for one layer whether a forward pass shall be sketched; asked in each."""

    def __init__(self, timer: Callable[[nn.Module, Sequence[Any]], Decision] | None = None) -> None:
        self.decisions: dict[tuple[Any, ...], Decision] = {}
        self.latest = False
        """The last decision: what a graph that is being compiled takes for good."""
        self.decided = False
        self._sketch: AnySketch | None = None
        self._timer = timer

    def __call__(self, layer: SketchedModule, inputs: Sequence[Any]) -> bool:
        if torch.compiler.is_compiling():
            if not self.decided:
                _nothing_decided()
            return self.latest
        x = inputs[0]
        if layer.sketch is not self._sketch:  # another sketch, other times
            self._sketch = layer.sketch
            self.decisions.clear()
            self.latest = self.decided = False
        # What may change from call to call; the rest of the key is fixed for a run.
        key = (x.shape, x.dtype, x.requires_grad)
        decision = self.decisions.get(key)
        if decision is None:
            decision = self.decisions[key] = self._decide(layer, inputs)
            self.latest, self.decided = decision.sketch, True
        return decision.sketch

    def describe(self) -> str:
        """For ``summary``: the latest decision, or that there is none yet."""
        if not self.decisions:
            return "exact until timed: run one training step (before torch.compile)"
        key, decision = next(reversed(self.decisions.items()))
        return f"{decision} at {' × '.join(map(str, key[0]))}"

    def _decide(self, layer: SketchedModule, inputs: Sequence[Any]) -> Decision:
        assert isinstance(layer, nn.Module)
        name = _key(layer, inputs)
        known = _read_cache().get(name)
        if known is not None:
            return Decision(**known)
        decision = (self._timer or time_layer)(layer, inputs)
        if decision.sure:
            _write_cache(name, decision)
        return decision


def _nothing_decided() -> bool:
    """Said while a graph is traced, once for each."""
    warnings.warn(
        "where='faster' has timed nothing yet, so that a layer is compiled exact, for good; run "
        "one training step of the plain model before torch.compile",
        stacklevel=2,
    )
    return True


# What torch.compiler.assume_constant_result does, which would import all of torch._dynamo now.
_nothing_decided._dynamo_marked_constant = True  # type: ignore[attr-defined]


def time_layer(layer: nn.Module, inputs: Sequence[Any]) -> Decision:
    """Times forward and backward of ``layer`` both ways, in turns, on inputs like these.

    A twin is timed, so that nothing is left behind: no gradient, no hook run, no remembered atoms,
    the generators as before.
    """
    assert isinstance(layer, SketchedModule)
    device = inputs[0].device
    with random_state_kept(), alone():
        other = twin(layer)
        state = other.sketching
        state.judge, state.accumulate = None, False
        state.forget()
        copies = [_like(x) for x in inputs]
        leaves = [x for x in (*copies, *other.parameters()) if _differentiable(x)]
        if not leaves:
            return Decision(1.0, 0.0, 0.0)

        def run(exact: bool) -> None:
            state.exact = exact
            out = other.forward(*copies)
            out = out[0] if isinstance(out, tuple) else out
            torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)

        def run_with_new_atoms() -> None:
            state.forget()
            run(False)

        both = [partial(run, True), partial(run, False)]
        exact, sketched = in_turns(both, _ROUNDS, device, _SECONDS)
        extra = 0.0
        if isinstance(state.planner, Every):  # new atoms, spread over the steps that they serve
            (new,) = in_turns([run_with_new_atoms], 1, device)
            extra = max(0.0, new[0] - median(sketched)) / state.planner.steps
    ratios = [s / max(e, 1e-9) for e, s in zip(exact, sketched, strict=True)]
    middle = median(ratios)
    # As in meters.cost.timing: a median's error from the spread of the pairs.
    error = 1.2533 * 1.4826 * median(abs(r - middle) for r in ratios) / len(ratios) ** 0.5
    ratio = middle + extra / max(median(exact), 1e-9)
    return Decision(ratio, 1e3 * median(exact), 1e3 * (median(sketched) + extra), error)


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _like(x: Any) -> Any:
    """Random numbers of the same shape: a timing must not depend on what is in a batch."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return torch.randn_like(x).requires_grad_(x.requires_grad)


def _key(layer: SketchedModule, inputs: Sequence[Any]) -> str:
    """All that a time depends on, as text."""
    assert isinstance(layer, nn.Module)
    device = inputs[0].device
    hardware = cpu_name()
    if device.type != "cpu":
        hardware = torch.get_device_module(device).get_device_name(device)
    wanted = [name for name, p in layer.named_parameters() if p.requires_grad]
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    return " | ".join(
        [
            type(layer).__name__,
            layer.extra_repr(),
            repr(layer.sketching.planner),
            "trains " + " ".join(wanted),
            *(f"{tuple(x.shape)} {x.stride()} {x.dtype} {x.requires_grad}" for x in tensors),
            f"{device.type} {hardware} {torch.get_num_threads()} threads",
            f"autocast {torch.is_autocast_enabled(device.type)}",
            f"torch {torch.__version__} sketchprop {__version__}",
        ]
    )


def _read_cache() -> dict[str, dict[str, float]]:
    try:
        content = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {name: entry for name, entry in content.items() if _is_decision(entry)}


def _is_decision(entry: Any) -> bool:
    if not isinstance(entry, dict) or set(entry) != {"ratio", "exact_ms", "sketched_ms"}:
        return False
    return all(type(x) in (int, float) and math.isfinite(x) and x >= 0 for x in entry.values())


def _write_cache(name: str, decision: Decision) -> None:
    """Adds one decision; a reader never sees half a file."""
    path = cache_file()
    numbers = {key: value for key, value in vars(decision).items() if key != "error"}
    content = {**_read_cache(), name: numbers}
    partial_file: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
        ) as file:
            partial_file = Path(file.name)
            json.dump(content, file, indent=1)
        partial_file.replace(path)
    except OSError as error:
        if partial_file is not None:
            with suppress(OSError):
                partial_file.unlink(missing_ok=True)
        warnings.warn(
            f"timings of sketched layers are not remembered: {error}; name a folder that can be "
            "written in SKETCHPROP_CACHE",
            stacklevel=2,
        )
