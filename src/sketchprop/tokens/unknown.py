"""A row-wise function whose steps are not known: it runs again from its input, on the kept rows.

Any Python will do that takes each row by itself and draws no random numbers, which is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .function import Tree
from .rowwise import NOTHING, as_rows, not_finite

RowFunction = Callable[[Tensor], Tensor]
_MIXING = ("Attention", "BatchNorm", "Conv", "RNN", "LSTM", "GRU", "Softmax", "Pool", "Flatten")


@dataclass(frozen=True)
class Unknown:
    """f itself; ``check``: try it on some rows by themselves."""

    f: RowFunction
    check: bool = True

    def forward(self, x: Tensor, P: tuple[Tensor, ...], save: bool) -> tuple[Tensor, Tree]:
        """f(x); nothing is saved, whether or not one may ``save``."""
        y = self.f(x)
        if self.check:
            check_rows(self.f, x, y)
        return y, NOTHING

    def back(
        self,
        g: Tensor,
        x: Tensor,
        P: tuple[Tensor, ...],
        saved: Tree,
        wants_x: bool,
        wants: tuple[bool, ...],
    ) -> tuple[Tensor | None, Tree]:
        """dX at the rows, and the gradients of P; NaN where g is not finite and f cut that off."""
        flags, mark = (wants_x, *wants), not_finite(g)
        x.requires_grad_(wants_x)
        inputs = [t for t, want in zip((x, *P), flags, strict=True) if want]
        with torch.enable_grad():
            y = on_rows(self.f, x)
        grads = iter(torch.autograd.grad(y, inputs, g, allow_unused=True))
        made = [next(grads) if want else None for want in flags]
        dX, *dP = (None if t is None else t + mark.to(t.dtype) for t in made)
        return dX, tuple(dP)


def on_rows(f: RowFunction, rows: Tensor) -> Tensor:
    """``f`` of ``rows: [r, d]``, as one sample: modules written for three axes take that."""
    return f(rows.unsqueeze(0)).squeeze(0)


def check_rows(f: RowFunction, x: Tensor, y: Tensor) -> None:
    """Refuses f unless f(x)[b] = f(x[b]) each time: for the first, a middle, the last row."""
    n = x.numel() // x.shape[-1]
    index = torch.tensor(sorted({0, n // 2, n - 1}), device=x.device)
    devices = [x.device] if x.device.type != "cpu" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        once, again = (on_rows(f, as_rows(x).index_select(0, index)) for _ in range(2))
    if not _close(once, again):
        raise ValueError(
            f"{_culprit(f, ('Drop',))} draws random numbers, and would draw others where it runs "
            "again; give branch an nn.Sequential of plain torch layers, whose masks it keeps"
        )
    fits = y.shape[:-1] == x.shape[:-1]
    if not fits or not _close(once, as_rows(y).index_select(0, index)):
        raise ValueError(
            f"{_culprit(f, _MIXING)} mixes rows: f(x)[b] is not f(x[b]); use branch for norms, "
            "linear layers and activations only"
        )


def _close(a: Tensor, b: Tensor) -> bool:
    tolerance = 1e-2 if a.dtype in (torch.bfloat16, torch.float16) else 1e-4
    atol = tolerance * max(float(b.detach().abs().amax()) if b.numel() else 0.0, 1e-12)
    return a.shape == b.shape and torch.allclose(a, b, tolerance, atol, equal_nan=True)


def _culprit(f: RowFunction, words: tuple[str, ...]) -> str:
    """f by its name, with the module in it that is probably meant."""
    for name, module in f.named_modules() if isinstance(f, nn.Module) else ():
        if name and any(word in type(module).__name__ for word in words):
            return f"{name_of(f)}, probably because of {name} ({module!r}),"
    return name_of(f)


def name_of(f: object) -> str:
    return type(f).__name__ if isinstance(f, nn.Module) else getattr(f, "__name__", repr(f))
