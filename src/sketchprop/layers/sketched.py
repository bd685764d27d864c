"""What every sketched layer is - a layer's class, plus one entry - and the plainest of them."""

from __future__ import annotations

import os.path
import sys
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from inspect import isfunction
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
    _has_any_global_hook,
)
from torch.utils.module_tracker import ModuleTracker

from ..core.cost import Cost, Size
from ..ops import sketched_linear
from ..ops.linear import drawn_in_forward
from ..sketches import LayerSketch, Planner


@dataclass(eq=False)
class Sketching:
    """The state of one sketched layer: all that ``sketch_`` adds and ``unsketch_`` takes away."""

    sketch: Any
    """A sketch; in a block ``Tokens``."""
    planner: Planner | None = None
    """Makes the atoms; ``None``: new ones in each step."""
    exact: bool = False
    """True while ``sketchprop.exact`` is in force."""
    note: str = ""
    """What of a block stayed exact in the last forward pass, and why."""
    whole: frozenset[str] = frozenset()
    """The roles of these parts: their backward is the exact one."""
    proof: str | None = None
    """Of a block, from its first batch: empty if kept tokens are right, else why they are not."""
    looked: tuple[Any, ...] | None = None
    """Of a block: how parts that run again from their input looked in its first batch."""
    compiled: bool = False
    """Of a block: whether it is compiled; False again where it could not be."""
    warm: bool = False
    """Whether a forward pass was compiled: only then what checkpointing recomputes may be."""
    idle: bool = False
    """True while a tuner leaves the layer exact: nothing of the sketch is asked."""
    tuned: str = ""
    """What a tuner decided, and why."""
    shares: Any = None
    """Of a block: the ``Shares`` by which one budget is shared out."""
    parts: dict[int, Planner] = field(init=False, default_factory=dict, repr=False)
    """The planners of a layer's second, third, … weight matrix."""

    def planner_of(self, part: int = 0) -> Planner | None:
        """The planner of one of the layer's weight matrices; each has its own."""
        if self.planner is None or part == 0:
            return self.planner
        return self.parts.setdefault(part, self.planner.anew())

    def cost(self, size: Size) -> Cost:
        """FLOPs of one product's backward, as this layer would run it when it is sketched."""
        if size.part in self.whole or self.sketch.keeps_all(size.B, size.n, size.d):
            return Cost(size.exact_flops)
        if self.planner is None:
            cost: Cost = self.sketch.cost(size)
            return cost
        return self.planner.cost(self.sketch, size)

    def forget(self) -> None:
        """Drops what the planners remember."""
        for planner in (self.planner, *self.parts.values()):
            if planner is not None:
                planner.forget()

    def copied(self) -> Sketching:
        """The same state, with memories of its own; it shares its budget with no other block."""
        twin = deepcopy(self, {id(self.shares): None})
        twin.exact = self.exact
        return twin

    def __getstate__(self) -> dict[str, Any]:
        # A copy made inside an `exact` block is not in that block.
        return {**self.__dict__, "exact": False}


class SketchedModule:
    """Mixed into a layer's class by ``sketch_``; its one entry leaves the ``__dict__`` with it."""

    plain: ClassVar[type[nn.Module]]
    """The class that this one stands in for."""

    sketching: Sketching
    training: bool

    @property
    def sketch(self) -> Any:
        """What the layer's backward is sketched by."""
        return self.sketching.sketch

    def is_sketching(self) -> bool:
        """Whether a forward pass now records a sketched backward, or has to draw its rows."""
        state = self.sketching
        on = self.training and not (state.exact or state.idle)
        return on and (torch.is_grad_enabled() or drawn_in_forward(state.sketch) is not None)

    def extra_repr(self) -> str:
        own = super().extra_repr()  # type: ignore[misc]
        return f"{own}, sketch={self.sketch!r}" if own else f"sketch={self.sketch!r}"

    @classmethod
    def left_exact(cls, layer: nn.Module, sketch: LayerSketch) -> str:
        """Why ``sketch`` cannot take this very layer; empty if it can."""
        return ""

    @classmethod
    def matrices(cls, layer: nn.Module) -> tuple[tuple[int, int], ...]:
        """(n, d), outputs and inputs, of each weight matrix whose backward is sketched."""
        weight = layer.weight
        assert isinstance(weight, Tensor)
        return ((weight.shape[0], weight[0].numel()),)

    @classmethod
    def sizes(
        cls, layer: nn.Module, rows: int, from_below: bool = True, trains: bool = True
    ) -> tuple[Size, ...]:
        """The backward of each of them: whether a gradient flows on below, and whether W trains."""
        matrices = cls.matrices(layer)
        last = len(matrices) - 1
        return tuple(
            # The last of several reads what the others made of trainable weights.
            Size(rows, n, d, from_below or (0 < i == last and trains), trains)
            for i, (n, d) in enumerate(matrices)
        )


class SketchedLinear(SketchedModule, nn.Linear):
    """``nn.Linear`` with a sketched backward in training mode; otherwise ``nn.Linear`` itself."""

    plain = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        if not self.is_sketching():
            return super().forward(input)
        state = self.sketching
        return sketched_linear(input, self.weight, self.bias, state.sketch, planner=state.planner)


def watched(part: object) -> bool:
    """Whether what is not called in a module would be missed: see ``altered``."""
    return isinstance(part, nn.Module) and any(altered(module) for module in part.modules())


def altered(module: nn.Module) -> bool:
    """Whether a module does more than its class as shipped: by hooks, or by a method that was
    replaced, on it or on its class."""
    entries = vars(module)
    if any(entries[name] for name in _HOOKS) or _hooked_everywhere():
        return True
    if any(collecting(hook) is not False for hook in entries["_forward_hooks"].values()):
        return True
    return rewritten(module, type(module))


def rewritten(module: nn.Module, kind: Any, but: str = "") -> bool:
    """Whether a method of ``kind`` was replaced, on the class or, ``but`` one, on the module."""
    methods = _methods(kind)
    # Walked through: a compiled graph is then guarded by the names of all that a module has.
    return any(n in methods and n != but for n in vars(module)) or not as_shipped(kind)


def collecting(hook: Any) -> bool | None:
    """Whether a hook by which transformers collects outputs has to now; ``None``: another hook.

    One forward pass with ``output_hidden_states=True`` leaves such hooks on a model for good.
    """
    if getattr(hook, "__module__", "") != "transformers.utils.output_capturing":
        return None
    wanted = sys.modules[hook.__module__]._active_collector.get()
    if not wanted or torch.compiler.is_compiling():
        return bool(wanted)
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return "key" not in cells or cells["key"].cell_contents in wanted


def _hooked_everywhere() -> bool:
    """Whether a hook for all modules is more than torch's own tracker, by which FLOPs are told."""
    if not _has_any_global_hook():  # type: ignore[no-untyped-call]
        return False
    hooks = (*_global_forward_pre_hooks.values(), *_global_forward_hooks.values())
    others = (_global_backward_pre_hooks, _global_backward_hooks)
    return any(others) or any(
        not isinstance(getattr(hook, "__self__", None), ModuleTracker) for hook in hooks
    )


def constant_in_graphs(function: Any) -> Any:
    """``torch.compiler.assume_constant_result``, which would import the whole compiler."""
    function._dynamo_marked_constant = True
    return function


@constant_in_graphs
def as_shipped(kind: Any) -> bool:
    """Whether all methods of a class are those of its library: torch, transformers, PEFT, this."""
    return _are_shipped(kind, tuple(getattr(kind, name) for name in _names_of_methods(kind)))


@constant_in_graphs
def file_as_shipped(kind: Any) -> bool:
    """Whether the functions in the file of a library's class are all a library's."""
    entries = vars(sys.modules[kind.__module__]).values() if of_library(kind) else ()
    own = [f for f in entries if isfunction(f) and f.__module__ != "dataclasses"]
    return all(map(_is_shipped, own))


@constant_in_graphs
def _methods(kind: Any) -> tuple[str, ...]:
    return _names_of_methods(kind)


@cache
def _names_of_methods(kind: Any) -> tuple[str, ...]:
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    return tuple({n for base in bases for n, f in vars(base).items() if isfunction(f)})


@cache
def _are_shipped(kind: Any, methods: tuple[Any, ...]) -> bool:
    bases = filter(of_library, kind.__mro__[: kind.__mro__.index(nn.Module)])
    shipped = all(_is_shipped(f) for base in bases for f in vars(base).values() if isfunction(f))
    return shipped and all(map(isfunction, methods))


@cache
def _is_shipped(function: Any) -> bool:
    loaded = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    roots = tuple(os.path.dirname(str(library.__file__)) + os.sep for library in loaded)
    if not function.__code__.co_filename.startswith(roots):
        return False
    inner = getattr(function, "__wrapped__", None)
    return not isfunction(inner) or _is_shipped(inner)


def of_library(kind: Any) -> bool:
    """Whether a class is of a library whose blocks and layers are known."""
    return str(kind.__module__).partition(".")[0] in _LIBRARIES


_HOOKS = ("_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LIBRARIES = ("torch", "transformers", "peft", "sketchprop")
