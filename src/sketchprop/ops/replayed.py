"""Any row-wise function, run again on a few rows without computing its products again.

``recorded`` runs f on all rows and keeps the results of its linear layers and the masks of its
dropouts; ``replayed`` runs f on gathered rows and hands those out, in the order in which they
were made. Everything else (norms, activations, gates) is computed again. So f may be any Python:
adapters, mixtures of branches, layers with hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

RowFunction = Callable[[Tensor], Tensor]


def recorded(f: RowFunction, x: Tensor, *, products: bool) -> tuple[Tensor, list[Tensor]]:
    """``f(x)``, and what a replay needs, each as ``[rows, ·]``."""
    mode = _Record(products)
    with mode:
        y = f(x)
    return y, mode.as_made()


def replayed(
    f: RowFunction, X: Tensor, kept: list[Tensor], *, products: bool, trusted: bool = True
) -> Tensor:
    """``f(X)`` for some rows X, from the same rows of what was kept.

    ``trusted=False``: products are computed again all the same.
    """
    with _Replay(products, iter(kept), trusted):
        return f(X)


def check_rows(f: RowFunction, x: Tensor, y: Tensor, kept: list[Tensor], *, products: bool) -> None:
    """Refuses f unless f(x)[b] = f(x[b]): tried with the first and the last row and one between."""
    wrong = y.shape[:-1] != x.shape[:-1]
    if not wrong:
        X = x.reshape(-1, x.shape[-1])
        n = X.shape[0]
        index = torch.tensor(sorted({0, n // 2, n - 1}), device=x.device)
        parts = [t.index_select(0, index) for t in kept]
        with torch.no_grad(), torch.random.fork_rng(devices=_devices(x)):
            alone = replayed(f, X.index_select(0, index), parts, products=products, trusted=False)
        whole = y.reshape(-1, y.shape[-1]).index_select(0, index)
        wrong = alone.shape != whole.shape or not _close(alone, whole)
    if wrong:
        raise ValueError(_refusal(f))


def _close(a: Tensor, b: Tensor) -> bool:
    tolerance = 1e-2 if a.dtype in (torch.bfloat16, torch.float16) else 1e-4
    size = float(b.detach().abs().amax()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * max(size, 1e-12), equal_nan=True)


def _refusal(f: RowFunction) -> str:
    text = "mixes rows: f(x)[b] is not f(x[b])"
    fix = "use branch for norms, linear layers, activations and dropout only"
    if not isinstance(f, nn.Module):
        return f"{getattr(f, '__name__', repr(f))} {text}; {fix}"
    mixing = ("Attention", "BatchNorm", "Conv", "RNN", "LSTM", "GRU", "Softmax", "Pool", "Flatten")
    for name, module in f.named_modules():
        if name and any(word in type(module).__name__ for word in mixing):
            return f"{type(f).__name__} {text}, probably because of {name} ({module!r}); {fix}"
    return f"{type(f).__name__} {text}; {fix}"


def _devices(x: Tensor) -> list[torch.device]:
    return [x.device] if x.device.type != "cpu" else []


class _Mode(TorchFunctionMode):
    """Calls ``dropout`` and, with ``products``, ``linear`` in place of torch's own."""

    def __init__(self, products: bool) -> None:
        super().__init__()
        self.products = products

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.dropout:
            x, p, training, _ = _dropout_arguments(*args, **kwargs)
            if training and p > 0:
                return self.dropout(x, p)
        if function is F.linear and self.products:
            return self.linear(*_linear_arguments(*args, **kwargs))
        return function(*args, **kwargs)

    def dropout(self, x: Tensor, p: float) -> Tensor:
        raise NotImplementedError

    def linear(self, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        raise NotImplementedError


class _Record(_Mode):
    def __init__(self, products: bool) -> None:
        super().__init__(products)
        self.kept: list[Tensor] = []
        self.versions: list[int] = []

    def as_made(self) -> list[Tensor]:
        """What was kept; nothing of a result that f has changed in place since."""
        made = zip(self.kept, self.versions, strict=True)
        return [t if t._version == version else t[:, :0] for t, version in made]

    def keep(self, t: Tensor) -> None:
        self.kept.append(t.reshape(-1, t.shape[-1]))
        self.versions.append(self.kept[-1]._version)

    def dropout(self, x: Tensor, p: float) -> Tensor:
        y, mask = torch.native_dropout(x, p, True)
        self.keep(mask)
        return y

    def linear(self, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        y = F.linear(x, W, b)
        self.keep(y)
        return y


class _Replay(_Mode):
    def __init__(self, products: bool, kept: Iterator[Tensor], trusted: bool) -> None:
        super().__init__(products)
        self.kept, self.trusted = kept, trusted

    def dropout(self, x: Tensor, p: float) -> Tensor:
        scale = 0.0 if p == 1 else 1 / (1 - p)
        return x * next(self.kept).view(x.shape) * scale

    def linear(self, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        rows = next(self.kept)
        if not self.trusted or rows.shape[-1] != W.shape[0]:
            return F.linear(x, W, b)
        return _SavedProduct.apply(x, W, b, rows.view(*x.shape[:-1], rows.shape[-1]))  # type: ignore[no-any-return, no-untyped-call]


def _dropout_arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool, bool]:
    return input, p, training, inplace


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


class _SavedProduct(torch.autograd.Function):
    """``F.linear`` whose result is known already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, b: Tensor | None, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, W)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, W = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        G = grad.reshape(-1, grad.shape[-1])
        dX = (grad @ W).to(x.dtype) if wants_x else None
        dW = None
        if wants_weight:
            dW = (G.mT @ x.reshape(-1, x.shape[-1]).to(G.dtype)).to(W.dtype)
        return dX, dW, G.sum(0) if wants_bias else None, None
