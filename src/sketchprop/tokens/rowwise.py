"""Row-wise maps that can go through some of their rows again and pull a gradient back.

Why not autograd? Hooks on saved tensors cannot gather rows, because the engine checks gradients
against the shapes of the full graph; and ``torch.func.vjp`` on gathered rows computes all products
again, about a tenth of a step at a budget of 0.3. So a map is spelled out: steps without tensors,
frozen and hashable, with their parameters beside them, a tuple for each step. A step has

    forward(x, P, save)           y, and what its rows need later
    again(x, P, saved, needed)    the same for some rows, from the rows of what was saved, and its
                                  pullback; y may be ``None`` where it is not ``needed``
    reads                         whether ``again`` looks at x

What is saved is decided in ``Chain`` alone: the result of a product if a later step reads it, and
the mask of a dropout. Norms and activations are computed again, which costs less than keeping them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .function import Tree, any_of, leaves, like, nothing_like

Parameters = Tree
"""The parameters of a step, or of the steps of a chain, in order."""
Pulled = tuple[Tensor | None, Tree]
Pull = Callable[[Tensor, bool, Tree], Pulled]
"""``pull(g, wants_x, wants)``: dx, and gradients like the parameters; ``None`` if not wanted."""
Again = tuple[Any, Pull]
NOTHING: Tree = ()

_aten = torch.ops.aten


@dataclass(frozen=True)
class Linear:
    """y = x Wᵀ + b, parameters W and b; ``transposed``: W is [d, n], as in GPT-2."""

    transposed: bool = False

    reads = True

    def forward(self, x: Tensor, P: Parameters, save: bool) -> tuple[Tensor, Tree]:
        W, b = P
        y = F.linear(x, W.mT if self.transposed else W, b)
        return y, ((y,) if save else NOTHING)

    def again(self, x: Tensor, P: Parameters, saved: Tree, needed: bool) -> Again:
        y = None
        if needed:
            y = saved[0] if saved else self.forward(x, P, False)[0]

        def pull(g: Tensor, wants_x: bool, wants: Tree) -> Pulled:
            W, wants_bias = P[0], wants[1]
            dx = (g @ W.mT if self.transposed else g @ W) if wants_x else None
            dW = None
            if wants[0]:
                dW = x.mT @ g if self.transposed else g.mT @ x
            return dx, (dW, g.sum(0) if wants_bias else None)

        return y, pull


@dataclass(frozen=True)
class LayerNorm:
    """``F.layer_norm`` over the last axis, parameters γ and β."""

    eps: float = 1e-5

    reads = True

    def forward(self, x: Tensor, P: Parameters, save: bool) -> tuple[Tensor, Tree]:
        return F.layer_norm(x, x.shape[-1:], P[0], P[1], self.eps), NOTHING

    def again(self, x: Tensor, P: Parameters, saved: Tree, needed: bool) -> Again:
        size = x.shape[-1:]
        y, *moments = torch.native_layer_norm(x, size, P[0], P[1], self.eps)

        def pull(g: Tensor, wants_x: bool, wants: Tree) -> Pulled:
            flags = [wants_x, *wants]
            grads = _aten.native_layer_norm_backward(g.to(x.dtype), x, size, *moments, *P, flags)
            dx, *made = (t if want else None for t, want in zip(grads, flags, strict=True))
            return dx, tuple(made)

        return y, pull


@dataclass(frozen=True)
class RMSNorm:
    """y = γ · x/√(mean x² + ε), computed in float32 or better, parameter γ."""

    eps: float = 1e-6

    reads = True

    def forward(self, x: Tensor, P: Parameters, save: bool) -> tuple[Tensor, Tree]:
        return F.rms_norm(x, x.shape[-1:], P[0], self.eps), NOTHING

    def again(self, x: Tensor, P: Parameters, saved: Tree, needed: bool) -> Again:
        w = P[0]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        unit = wide * rstd

        def pull(g: Tensor, wants_x: bool, wants: Tree) -> Pulled:
            g = g.to(wide.dtype)
            dw = (g * unit).sum(0) if wants[0] else None
            dx = None
            if wants_x:
                s = g if w is None else g * w
                dx = (rstd * (s - unit * (s * unit).mean(-1, keepdim=True))).to(x.dtype)
            return dx, (dw,)

        return (unit if w is None else unit * w).to(x.dtype), pull


@dataclass(frozen=True)
class Activation:
    """An elementwise function by its name in ``ACTIVATIONS``."""

    name: str

    reads = True

    def forward(self, x: Tensor, P: Parameters, save: bool) -> tuple[Tensor, Tree]:
        return ACTIVATIONS[self.name][0](x), NOTHING

    def again(self, x: Tensor, P: Parameters, saved: Tree, needed: bool) -> Again:
        function, back = ACTIVATIONS[self.name]
        y = function(x)
        return y, lambda g, wants_x, _: (back(g, x, y) if wants_x else None, ())


@dataclass(frozen=True)
class Dropout:
    """``F.dropout`` in training mode; its mask is saved, one byte an element."""

    p: float

    reads = False

    def forward(self, x: Tensor, P: Parameters, save: bool) -> tuple[Tensor, Tree]:
        y, mask = torch.native_dropout(x, self.p, True)
        return y, (mask,)

    def again(self, x: Tensor | None, P: Parameters, saved: Tree, needed: bool) -> Again:
        (mask,) = saved
        scale = 0.0 if self.p == 1 else 1 / (1 - self.p)

        def pull(g: Tensor, wants_x: bool, wants: Tree) -> Pulled:
            return (_aten.native_dropout_backward(g, mask, scale) if wants_x else None), ()

        return (x * mask * scale if needed and x is not None else None), pull


@dataclass(frozen=True)
class Scale:
    """y = γ x, parameter γ: a layer scale."""

    reads = True

    def forward(self, x: Tensor, P: Parameters, save: bool) -> tuple[Tensor, Tree]:
        return x * P[0], NOTHING

    def again(self, x: Tensor, P: Parameters, saved: Tree, needed: bool) -> Again:
        (w,) = P

        def pull(g: Tensor, wants_x: bool, wants: Tree) -> Pulled:
            dw = (g * x).sum(0).sum_to_size(w.shape) if wants[0] else None
            return (g * w if wants_x else None), (dw,)

        return x * w, pull


@dataclass(frozen=True)
class Chain:
    """One step after the other; P has a tuple for each step."""

    steps: tuple[Any, ...] = ()

    @property
    def reads(self) -> bool:
        return any(step.reads for step in self.steps)

    def forward(
        self, x: Tensor, P: Parameters, save: bool, needed: bool = False
    ) -> tuple[Tensor, Tree]:
        """``needed``: whether anybody looks at the result of the chain again."""
        saved = []
        for i, (step, own) in enumerate(zip(self.steps, P, strict=True)):
            # The one rule: a product is saved if its result is looked at again.
            keeps = save and self._read_behind(i, needed) and isinstance(step, COSTLY)
            x, rows = step.forward(x, own, keeps)
            saved.append(rows)
        return x, tuple(saved)

    def again(self, x: Any, P: Parameters, saved: Tree, needed: bool = False) -> Again:
        pulls: list[Pull] = []
        saved = saved or (NOTHING,) * len(self.steps)
        for i, (step, own, rows) in enumerate(zip(self.steps, P, saved, strict=True)):
            x, pull_step = step.again(x, own, rows, self._read_behind(i, needed))
            pulls.append(pull_step)

        def pull(g: Tensor | None, wants_x: bool, wants: Tree) -> Pulled:
            grads: list[Tree] = []  # of the steps from the last to the first
            below = [wants_x]  # whether a gradient is wanted of the input of each step
            for flags in wants:
                below.append(below[-1] or any_of(flags))
            for i in reversed(range(len(pulls))):
                if g is None or not below[i + 1]:
                    return None, (*nothing_like(P[: i + 1]), *reversed(grads))
                g, own_grads = pulls[i](g, below[i], wants[i])
                grads.append(own_grads)
            return g, tuple(reversed(grads))

        return x, pull

    def back(
        self, g: Tensor, x: Tensor, P: Parameters, saved: Tree, wants_x: bool, wants: Tree
    ) -> tuple[Any, Tree]:
        """dx and the gradients of P, for rows g of the gradient of the result."""
        return self.again(x, P, saved)[1](g, wants_x, wants)

    def _read_behind(self, i: int, needed: bool) -> bool:
        return needed or any(step.reads for step in self.steps[i + 1 :])


@dataclass(frozen=True)
class Pair:
    """y = left(x) · right(x), a gated branch; or with a ``factor`` left(x) + factor · right(x), a
    layer and its low-rank adapter. P and what is saved are pairs."""

    left: Chain
    right: Chain
    factor: float | None = None

    @property
    def reads(self) -> bool:
        return self.factor is None or self.left.reads or self.right.reads

    def forward(self, x: Tensor, P: Parameters, save: bool) -> tuple[Tensor, Tree]:
        a, first = self.left.forward(x, P[0], save, save)
        b, second = self.right.forward(x, P[1], save, save)
        return self._join(a, b), (first, second)

    def again(self, x: Any, P: Parameters, saved: Tree, needed: bool) -> Again:
        needed = needed or self.factor is None
        first, second = saved or (NOTHING, NOTHING)
        a, pull_left = self.left.again(x, P[0], first, needed)
        b, pull_right = self.right.again(x, P[1], second, needed)

        def pull(g: Tensor, wants_x: bool, wants: Tree) -> Pulled:
            da, db = (g * b, g * a) if self.factor is None else (g, g * self.factor)
            dx, left = pull_left(da, wants_x, wants[0])
            other, right = pull_right(db, wants_x, wants[1])
            total = other if dx is None else dx if other is None else dx + other
            return total, (left, right)

        return (self._join(a, b) if needed else None), pull

    def _join(self, a: Any, b: Any) -> Tensor:
        y: Tensor = a * b if self.factor is None else a + b * self.factor
        return y


COSTLY = (Linear, Pair)
"""Steps that save results of products, if told to."""


class RowWise(NamedTuple):
    """A row-wise function spelled out: its steps, and a tuple of parameters for each."""

    chain: Chain
    parameters: Parameters

    @classmethod
    def of(cls, *pairs: tuple[Any, Parameters]) -> RowWise:
        """From steps with their parameters."""
        return cls(Chain(tuple(step for step, _ in pairs)), tuple(P for _, P in pairs))

    def __add__(self, other: RowWise) -> RowWise:  # type: ignore[override]
        """One after the other."""
        steps = (*self.chain.steps, *other.chain.steps)
        return RowWise(Chain(steps), (*self.parameters, *other.parameters))

    def __call__(self, x: Tensor) -> Tensor:
        return self.chain.forward(x, self.parameters, False)[0]


def drops(step: Any) -> bool:
    """Whether a step draws a mask."""
    inner = (step.left, step.right) if isinstance(step, Pair) else getattr(step, "steps", ())
    return isinstance(step, Dropout) or any(drops(part) for part in inner)


def with_residual(x: Tensor, y: Tensor, made_by: Chain) -> Tensor:
    """x + y, in the memory of y where a step of ``made_by`` made that. It is no view, which what
    follows could not change in place. (A mode, as of selective checkpointing, may keep y.)"""
    watched = not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack()
    if not made_by.steps or y.dtype != x.dtype or watched:
        return x + y
    whole: Tensor = _aten._unsafe_view(y, y.shape)
    return whole.add_(x)


def as_rows(x: Tensor) -> Tensor:
    """``[*, d]`` as ``[B, d]``."""
    return x.reshape(-1, x.shape[-1])


def rows_of(saved: Tree, rows: Tensor | None) -> Tree:
    """Some rows, or all, of everything that was saved."""
    tensors = map(as_rows, leaves(saved))
    return like(saved, (t if rows is None else t.index_select(0, rows) for t in tensors))


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
    "gelu_none": (F.gelu, lambda g, x, y: _aten.gelu_backward(g, x)),
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


def read(module: nn.Module) -> RowWise | None:
    """``module`` as steps with their parameters, or ``None`` where it is not known.

    Plain torch layers in any nesting of ``nn.Sequential``. A layer of a subclass may compute
    something else; who asks must see to it that none was altered.
    """
    if type(module) is not nn.Sequential:
        step = _STEPS.get(type(module))
        return None if step is None else step(module)
    whole = RowWise.of()
    for child in module:
        part = read(child)
        if part is None:
            return None
        whole += part
    return whole


def _norm(layer: Any) -> RowWise | None:
    if len(layer.normalized_shape) != 1:
        return None
    if type(layer) is nn.LayerNorm:
        return RowWise.of((LayerNorm(layer.eps), (layer.weight, layer.bias)))
    eps = layer.eps
    if eps is None and layer.weight is not None and layer.weight.dtype.itemsize >= 4:
        eps = torch.finfo(layer.weight.dtype).eps  # as torch has it, where nothing is narrow
    return None if eps is None else RowWise.of((RMSNorm(eps), (layer.weight,)))


def is_plain(kind: type) -> bool:
    """Whether products with weights of a class are torch's own."""
    return kind is Tensor or kind.__name__ == "FakeTensor"  # its module takes long to import


def _linear(layer: Any) -> RowWise | None:
    # Weights of other classes, quantised for example, have products of their own.
    plain = is_plain(type(layer.weight.data)) and layer.weight.is_floating_point()
    return RowWise.of((Linear(), (layer.weight, layer.bias))) if plain else None


def _dropout(layer: Any) -> RowWise:
    drops = layer.training and layer.p > 0
    return RowWise.of((Dropout(layer.p), ())) if drops else RowWise.of()


def activation(name: str) -> Callable[[Any], RowWise]:
    return lambda layer: RowWise.of((Activation(name), ()))


_STEPS: dict[type, Callable[[Any], RowWise | None]] = {
    nn.Identity: lambda layer: RowWise.of(),
    nn.Dropout: _dropout,
    nn.Linear: _linear,
    nn.LayerNorm: _norm,
    nn.RMSNorm: _norm,
    nn.GELU: lambda layer: activation(f"gelu_{layer.approximate}")(layer),
    nn.ReLU: activation("relu"),
    nn.SiLU: activation("silu"),
    nn.Tanh: activation("tanh"),
    nn.Sigmoid: activation("sigmoid"),
}
