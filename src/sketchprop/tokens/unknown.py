"""A row-wise function whose steps are not known: it runs again from its input, on the kept rows.

Any Python will do that takes each row by itself and draws no random numbers, which is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from ..core.proof import close, has_numbers, learned_by, no_gradient_hooks
from ..core.random import random_state_kept
from .function import Tree, leaves, like
from .rowwise import NOTHING, RowWise, as_rows, not_finite

RowFunction = Callable[[Tensor], Tensor]
_MIXING = ("Attention", "BatchNorm", "Conv", "RNN", "LSTM", "GRU", "Softmax", "Pool", "Flatten")


@dataclass(frozen=True)
class Unknown:
    """Functions one after the other, with a tuple of parameters for each; ``check``: try them on
    some rows by themselves."""

    parts: tuple[Any, ...]
    check: bool = True

    def forward(self, x: Tensor, P: Tree, save: bool) -> tuple[Tensor, Tree]:
        """The result; nothing is saved, whether or not one may ``save``."""
        f = partial(self._call, P=P)
        y = checked(self.parts, f, x, leaves(P)) if self.check and has_numbers(x) else f(x)
        return y, NOTHING

    def back(
        self, g: Tensor, x: Tensor, P: Tree, saved: Tree, wants_x: bool, wants: Tree
    ) -> tuple[Tensor | None, Tree]:
        """dX at the rows, and the gradients of P; NaN where g is not finite and f cut that off."""
        tensors, flags = (x, *leaves(P)), (wants_x, *leaves(wants))
        x.requires_grad_(wants_x)
        with torch.enable_grad():
            y = on_rows(partial(self._call, P=P), x)
        if learned_by(y) - learned_by(x, *leaves(P)):
            raise RuntimeError(
                f"{_culprit(self.parts, ())} runs again with other parameters than in its forward "
                "pass, as a function does under functional_call; give branch a module"
            )
        inputs = [t for t, want in zip(tensors, flags, strict=True) if want]
        with no_gradient_hooks(inputs):  # the outer pass calls them
            grads = iter(torch.autograd.grad(y, inputs, g, allow_unused=True))
        made = [next(grads) if want else None for want in flags]
        mark = not_finite(g)
        dX, *dP = (None if t is None else t + mark.to(t.dtype) for t in made)
        return dX, like(P, iter(dP))

    def _call(self, x: Tensor, P: Tree) -> Tensor:
        for f, given in zip(self.parts, P, strict=True):
            if isinstance(f, nn.Module):  # with the very tensors, as functional_call gave them
                names = [name for name, _ in f.named_parameters()]
                x = functional_call(f, dict(zip(names, given, strict=True)), (x,))
            else:
                x = f.chain.forward(x, given, False)[0] if isinstance(f, RowWise) else f(x)
        return x


def on_rows(f: RowFunction, rows: Tensor) -> Tensor:
    """``f`` of ``rows: [r, d]``, as one sample: modules written for three axes take that."""
    return f(rows.unsqueeze(0)).squeeze(0)


def checked(parts: tuple[object, ...], f: RowFunction, x: Tensor, P: list[Tensor]) -> Tensor:
    """f(x), unless f(x)[b] is not f(x[b]) each time, for the first, a middle and the last row, or
    f learns what is not in P, or by more than its result. Never for all rows: f may mix those as
    it did before."""
    n = x.numel() // x.shape[-1]
    some = sorted({0, n // 2, n - 1})[: max(1, n - 1)]
    index = torch.tensor(some, device=x.device)
    rows = as_rows(x.detach()).index_select(0, index)
    with torch.enable_grad(), random_state_kept(x.device):
        once, again = (on_rows(f, rows.clone()) for _ in range(2))
    name = partial(_culprit, parts)
    if kept := _kept_graphs(parts):
        raise ValueError(
            f"{name(())} keeps {kept}, which would have no gradient; leave this part exact, or "
            "return all that the loss needs"
        )
    y = f(x)
    if not close(once, again):
        raise ValueError(
            f"{name(('Drop',))} draws random numbers, and would draw others where it runs again; "
            "write it as an nn.Sequential of plain torch layers, whose masks are kept"
        )
    fits = y.shape[:-1] == x.shape[:-1]
    if not fits or not close(once, as_rows(y).index_select(0, index)):
        raise ValueError(
            f"{name(_MIXING)} mixes rows: f(x)[b] is not f(x[b]); use branch for norms, linear "
            "layers and activations only"
        )
    if learned_by(once) - learned_by(*P):
        raise ValueError(
            f"{name(())} learns what is not among its parameters, and would get no gradient for "
            "it; give all of it: branch(f, x, budget, parameters=[...])"
        )
    return y


def _kept_graphs(parts: tuple[object, ...]) -> str:
    """An attribute that a module computed in its forward pass, as a loss of its own, and that a
    gradient could be asked of; none of an old ``weight_norm``, which computes a weight."""
    modules = [m for part in parts if isinstance(part, nn.Module) for m in part.modules()]
    for module in modules:
        learned = tuple(name.rpartition("_")[0] for name in module._parameters)
        for name, value in vars(module).items():
            held = tree_leaves(value) if name[0] != "_" and name not in learned else ()
            if any(isinstance(t, Tensor) and t.grad_fn is not None for t in held):
                return f"{type(module).__name__}.{name}"
    return ""


def _culprit(parts: tuple[object, ...], words: tuple[str, ...]) -> str:
    """The parts by their names, with the module in them that is probably meant."""
    whole = ", ".join(name_of(part) for part in parts)
    for part in parts:
        for name, module in part.named_modules() if isinstance(part, nn.Module) else ():
            if any(word in type(module).__name__ for word in words):
                return f"{whole}, probably because of {name or type(module).__name__} ({module!r}),"
    return whole


def name_of(f: object) -> str:
    return type(f).__name__ if isinstance(f, nn.Module) else getattr(f, "__name__", repr(f))
