"""Row-wise maps that can go through a few of their rows again and pull a gradient back.

A map is described by steps without tensors, frozen and hashable; its parameters travel beside it,
in order, so that they can be inputs of an autograd Function. A step has

    forward(x, P, tape, needed)    y, with what its rows need later put on the tape
    again(x, P, tape, needed)      the same for some rows, from the tape's rows, and its pullback

``needed``: whether anybody looks at y. On the tape are the results of products and the masks of
dropout only: norms and activations are computed again, which costs less than keeping them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Parameters = tuple[Tensor | None, ...]
Grads = tuple[Tensor | None, ...]
Wants = tuple[bool, ...]
"""Whether dx is wanted, and then for each parameter whether its gradient is."""
Pulled = tuple[Tensor | None, Grads]
Pull = Callable[[Tensor, Wants], Pulled]
"""``pull(g, wants)``: dx, and the gradients of the parameters."""
Again = tuple[Tensor | None, Pull]

_aten = torch.ops.aten


class Tape:
    """What a forward pass keeps for its rows; ``products``: the results of products too.

    ``moments``: mean and deviation of a layer norm, two numbers a row, where its backward will
    run on all rows and its result is not looked at again.
    """

    def __init__(self, products: bool, moments: bool = False) -> None:
        self.products, self.moments = products, moments
        self.kept: list[Tensor] = []


class KeptTape(NamedTuple):
    """A tape as backward reads it: the kept rows, in order."""

    products: bool
    kept: Iterator[Tensor]
    moments: bool = False


class Step(Protocol):
    """One row-wise map: see the head of this file."""

    @property
    def count(self) -> int: ...
    @property
    def reads(self) -> bool: ...
    def forward(self, x: Tensor, P: Parameters, tape: Tape, needed: bool) -> Tensor: ...
    def again(self, x: Tensor | None, P: Parameters, rows: KeptTape, needed: bool) -> Again: ...


@dataclass(frozen=True)
class Linear:
    """y = x Wᵀ + b, parameters W and b; ``transposed``: W is [d, n], as in GPT-2."""

    transposed: bool = False

    count = 2
    reads = True

    def forward(self, x: Tensor, P: Parameters, tape: Tape, needed: bool) -> Tensor:
        y = self._product(x, P)
        if needed and tape.products:
            tape.kept.append(y)
        return y

    def again(self, x: Tensor | None, P: Parameters, rows: KeptTape, needed: bool) -> Again:
        assert x is not None
        y = None
        if needed:
            y = next(rows.kept) if rows.products else self._product(x, P)

        def pull(g: Tensor, wants: Wants) -> Pulled:
            W = P[0]
            assert W is not None
            dx = (g @ W.mT if self.transposed else g @ W) if wants[0] else None
            dW = None
            if wants[1]:
                dW = x.mT @ g if self.transposed else g.mT @ x
            return dx, (dW, g.sum(0) if wants[2] else None)

        return y, pull

    def _product(self, x: Tensor, P: Parameters) -> Tensor:
        W, b = P
        assert W is not None
        return F.linear(x, W.mT if self.transposed else W, b)


@dataclass(frozen=True)
class LayerNorm:
    """``F.layer_norm`` over the last axis, parameters γ and β."""

    eps: float = 1e-5

    count = 2
    reads = True

    def forward(self, x: Tensor, P: Parameters, tape: Tape, needed: bool) -> Tensor:
        if not tape.moments:
            return F.layer_norm(x, x.shape[-1:], P[0], P[1], self.eps)
        y, *moments = torch.native_layer_norm(x, x.shape[-1:], P[0], P[1], self.eps)
        tape.kept += moments
        return y

    def again(self, x: Tensor | None, P: Parameters, rows: KeptTape, needed: bool) -> Again:
        assert x is not None
        size = x.shape[-1:]
        y = None
        if rows.moments:
            mean, rstd = next(rows.kept), next(rows.kept)
        else:
            y, mean, rstd = torch.native_layer_norm(x, size, P[0], P[1], self.eps)

        def pull(g: Tensor, wants: Wants) -> Pulled:
            dx, dw, db = _aten.native_layer_norm_backward(
                g.to(x.dtype), x, size, mean, rstd, P[0], P[1], list(wants)
            )
            return dx, (dw if wants[1] else None, db if wants[2] else None)

        return y, pull


@dataclass(frozen=True)
class RMSNorm:
    """y = γ · x/√(mean x² + ε), computed in float32 or better, parameter γ."""

    eps: float = 1e-6

    count = 1
    reads = True

    def forward(self, x: Tensor, P: Parameters, tape: Tape, needed: bool) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], P[0], self.eps)

    def again(self, x: Tensor | None, P: Parameters, rows: KeptTape, needed: bool) -> Again:
        assert x is not None
        w = P[0]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        unit = wide * rstd
        y = unit.to(x.dtype) if w is None else (unit * w).to(x.dtype)

        def pull(g: Tensor, wants: Wants) -> Pulled:
            g = g.to(wide.dtype)
            dw = (g * unit).sum(0) if wants[1] else None
            dx = None
            if wants[0]:
                s = g if w is None else g * w
                dx = (rstd * (s - unit * (s * unit).mean(-1, keepdim=True))).to(x.dtype)
            return dx, (dw,)

        return y, pull


@dataclass(frozen=True)
class Activation:
    """An elementwise function by its name in ``ACTIVATIONS``."""

    name: str

    count = 0
    reads = True

    def forward(self, x: Tensor, P: Parameters, tape: Tape, needed: bool) -> Tensor:
        return ACTIVATIONS[self.name][0](x)

    def again(self, x: Tensor | None, P: Parameters, rows: KeptTape, needed: bool) -> Again:
        assert x is not None
        run, back = ACTIVATIONS[self.name]
        y = run(x)

        def pull(g: Tensor, wants: Wants) -> Pulled:
            return (back(g, x, y) if wants[0] else None), ()

        return y, pull


@dataclass(frozen=True)
class Dropout:
    """``F.dropout`` in training mode; its mask is kept, one byte an element."""

    p: float

    count = 0
    reads = False

    def forward(self, x: Tensor, P: Parameters, tape: Tape, needed: bool) -> Tensor:
        y, mask = torch.native_dropout(x, self.p, True)
        tape.kept.append(mask)
        return y

    def again(self, x: Tensor | None, P: Parameters, rows: KeptTape, needed: bool) -> Again:
        mask = next(rows.kept)
        scale = 0.0 if self.p == 1 else 1 / (1 - self.p)
        y = None if x is None else x * mask * scale

        def pull(g: Tensor, wants: Wants) -> Pulled:
            return (_aten.native_dropout_backward(g, mask, scale) if wants[0] else None), ()

        return y, pull


@dataclass(frozen=True)
class Scale:
    """y = γ x, parameter γ: a layer scale."""

    count = 1
    reads = True

    def forward(self, x: Tensor, P: Parameters, tape: Tape, needed: bool) -> Tensor:
        assert P[0] is not None
        return x * P[0]

    def again(self, x: Tensor | None, P: Parameters, rows: KeptTape, needed: bool) -> Again:
        assert x is not None
        w = P[0]
        assert w is not None

        def pull(g: Tensor, wants: Wants) -> Pulled:
            dw = (g * x).sum(0).sum_to_size(w.shape) if wants[1] else None
            return (g * w if wants[0] else None), (dw,)

        return x * w, pull


@dataclass(frozen=True)
class Times:
    """y = c x for a number c."""

    factor: float

    count = 0
    reads = False

    def forward(self, x: Tensor, P: Parameters, tape: Tape, needed: bool) -> Tensor:
        return x * self.factor

    def again(self, x: Tensor | None, P: Parameters, rows: KeptTape, needed: bool) -> Again:
        def pull(g: Tensor, wants: Wants) -> Pulled:
            return (g * self.factor if wants[0] else None), ()

        return (None if x is None else x * self.factor), pull


@dataclass(frozen=True)
class Chain:
    """One step after the other."""

    steps: tuple[Any, ...] = ()

    @property
    def count(self) -> int:
        return sum(step.count for step in self.steps)

    @property
    def reads(self) -> bool:
        return any(step.reads for step in self.steps)

    def forward(self, x: Tensor, P: Parameters, tape: Tape, needed: bool) -> Tensor:
        for step, mine, is_needed in self._parts(P, needed):
            x = step.forward(x, mine, tape, is_needed)
        return x

    def again(self, x: Tensor | None, P: Parameters, rows: KeptTape, needed: bool) -> Again:
        pulls: list[tuple[Pull, int]] = []
        for step, mine, is_needed in self._parts(P, needed):
            x, pull_one = step.again(x, mine, rows, is_needed)
            pulls.append((pull_one, step.count))

        def pull(g: Tensor, wants: Wants) -> Pulled:
            grads: Grads = ()
            end = len(wants)
            for i in reversed(range(len(pulls))):
                pull_one, count = pulls[i]
                start = end - count
                below = any(wants[:start])
                dx, own = pull_one(g, (below, *wants[start:end]))
                grads = (*own, *grads)
                end = start
                if dx is None or not below:
                    return None, ((None,) * (start - 1) + grads)
                g = dx
            return g, grads

        return x, pull

    def _parts(self, P: Parameters, needed: bool) -> list[tuple[Any, Parameters, bool]]:
        """Each step with its parameters, and whether anybody looks at its result."""
        parts = []
        start = 0
        for i, step in enumerate(self.steps):
            later = needed or any(other.reads for other in self.steps[i + 1 :])
            parts.append((step, P[start : start + step.count], later))
            start += step.count
        return parts


@dataclass(frozen=True)
class Product:
    """y = left(x) · right(x): gated branches."""

    left: Chain
    right: Chain

    reads = True

    @property
    def count(self) -> int:
        return self.left.count + self.right.count

    def forward(self, x: Tensor, P: Parameters, tape: Tape, needed: bool) -> Tensor:
        n = self.left.count
        return self.left.forward(x, P[:n], tape, True) * self.right.forward(x, P[n:], tape, True)

    def again(self, x: Tensor | None, P: Parameters, rows: KeptTape, needed: bool) -> Again:
        n = self.left.count
        a, pull_left = self.left.again(x, P[:n], rows, True)
        b, pull_right = self.right.again(x, P[n:], rows, True)
        assert a is not None
        assert b is not None

        def pull(g: Tensor, wants: Wants) -> Pulled:
            dx, first = pull_left(g * b, wants[: 1 + n])
            other, second = pull_right(g * a, (wants[0], *wants[1 + n :]))
            return _sum(dx, other), (*first, *second)

        return a * b, pull


@dataclass(frozen=True)
class Sum:
    """y = left(x) + right(x): a layer with its low-rank adapter; an empty chain is x itself."""

    left: Chain
    right: Chain

    @property
    def reads(self) -> bool:
        return self.left.reads or self.right.reads

    @property
    def count(self) -> int:
        return self.left.count + self.right.count

    def forward(self, x: Tensor, P: Parameters, tape: Tape, needed: bool) -> Tensor:
        n = self.left.count
        return self.left.forward(x, P[:n], tape, needed) + self.right.forward(
            x, P[n:], tape, needed
        )

    def again(self, x: Tensor | None, P: Parameters, rows: KeptTape, needed: bool) -> Again:
        n = self.left.count
        a, pull_left = self.left.again(x, P[:n], rows, needed)
        b, pull_right = self.right.again(x, P[n:], rows, needed)

        def pull(g: Tensor, wants: Wants) -> Pulled:
            dx, first = pull_left(g, wants[: 1 + n])
            other, second = pull_right(g, (wants[0], *wants[1 + n :]))
            return _sum(dx, other), (*first, *second)

        return (a + b if a is not None and b is not None else None), pull


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def not_finite(g: Tensor) -> Tensor:
    """0, or NaN where a kept row is not finite, which a dropped one makes of all that are kept.

    It is added to gradients that went through a function that cuts NaN off, as ReLU does: what
    was seen of a dropped row would be gone with the kept ones.
    """
    return (0 * g[:, :1]).sum()


def _relu_back(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = _aten.threshold_backward(g, y, 0)
    out[:, :1] += not_finite(g)  # a NaN draw may keep one row twice: in each of them
    return out


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]] = {
    "gelu": (F.gelu, lambda g, x, y: _aten.gelu_backward(g, x)),
    "gelu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda g, x, y: _aten.gelu_backward(g, x, approximate="tanh"),
    ),
    "relu": (F.relu, _relu_back),
    "silu": (F.silu, lambda g, x, y: _aten.silu_backward(g, x)),
    "tanh": (torch.tanh, lambda g, x, y: _aten.tanh_backward(g, y)),
    "sigmoid": (torch.sigmoid, lambda g, x, y: _aten.sigmoid_backward(g, y)),
}
"""The function, and its vjp from g, x and y."""


def read(module: nn.Module) -> tuple[Chain, Parameters] | None:
    """``module`` as a chain of steps with its parameters, or ``None`` where it is not known.

    Plain torch layers in any nesting of ``nn.Sequential``. A layer with hooks, or of a subclass,
    is not taken apart: it may do more than its class does.
    """
    if _has_hooks(module):
        return None
    if type(module) is nn.Sequential:
        parts = [read(child) for child in module]
        if any(part is None for part in parts):
            return None
        known = [part for part in parts if part is not None]
        steps = tuple(step for chain, _ in known for step in chain.steps)
        return Chain(steps), tuple(p for _, P in known for p in P)
    entry = _read_layer(module)
    return None if entry is None else (Chain(entry[0]), entry[1])


def _read_layer(module: nn.Module) -> tuple[tuple[Any, ...], Parameters] | None:
    layer: Any = module
    kind = type(module)
    name = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}.get(kind)
    if kind is nn.GELU:
        name = "gelu" if layer.approximate == "none" else "gelu_tanh"
    if name is not None:
        return (Activation(name),), ()
    if kind in (nn.Identity, nn.Dropout):
        drops = kind is nn.Dropout and layer.training and layer.p > 0
        return ((Dropout(layer.p),) if drops else ()), ()
    if kind is nn.Linear:
        return (Linear(),), (layer.weight, layer.bias)
    one_axis = kind in (nn.LayerNorm, nn.RMSNorm) and len(layer.normalized_shape) == 1
    if not one_axis or layer.eps is None:
        return None
    if kind is nn.RMSNorm:
        return (RMSNorm(layer.eps),), (layer.weight,)
    return (LayerNorm(layer.eps),), (layer.weight, layer.bias)


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
