"""Convolutions whose backward multiplies only what is kept.

A convolution is a linear layer on patches: its rows are (batch, position), its columns are the
output channels, its weight matrix has a flattened filter in each row.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.checks import check_local, solve_dtype
from ..core.compact import KeptRows, scaled
from ..core.importance import column_sums
from ..core.samples import Samples
from ..core.sampling import draw_uniforms
from ..sketches import ColumnSketch, Rows, Sketch
from .linear import _autocast, refuse_second_backward
from .passes import asked, one_draw

Sizes = tuple[int, ...]
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class Geometry(NamedTuple):
    """How a convolution walks: one number for each spatial dimension."""

    kernel: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes

    @property
    def pointwise(self) -> bool:
        """Kernel 1 without padding: a linear layer over the channels of a (strided) view."""
        return max(self.kernel) == 1 and max(self.padding) == 0

    def output(self, spatial: Sizes) -> Sizes:
        return tuple(
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, k, s, p, d in zip(spatial, *self, strict=True)
        )

    def visited(self, x: Tensor) -> Tensor:
        """The positions of ``x`` that a kernel of 1 looks at, as a view."""
        if max(self.stride) == 1:
            return x
        steps = [slice(None, None, s) for s in self.stride]
        return x[(slice(None), slice(None), *steps)]


def sketched_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sketch: Sketch,
    *,
    stride: int | Sizes = 1,
    padding: int | Sizes | str = 0,
    dilation: int | Sizes = 1,
    u: Tensor | None = None,
) -> Tensor:
    """``F.conv1d``, ``F.conv2d`` or ``F.conv3d``, with dX and dW from a sketch of the gradient.

    ``x: [B, C, *spatial]`` or ``[C, *spatial]``, ``weight: [n, C, *kernel]``, ``bias: [n]``.
    A column sketch keeps output channels: the backward convolution has r of n of them, cost
    4·B·L·r·C·k + O(B·L·n). ``Rows`` by samples keeps r of B images. With kernel 1 and no padding
    any sketch works, on rows (batch, position). As in ``sketched_linear`` draws are made in
    backward, ``u`` replaces them, and where everything would be kept this is the exact
    convolution.

    >>> from sketchprop import L1
    >>> x, filters = torch.randn(8, 16, 32, 32), torch.randn(64, 16, 3, 3)
    >>> sketched_conv(x, filters, None, L1(0.1), padding=1).shape
    torch.Size([8, 64, 32, 32])
    """
    x, weight, bias = _autocast(x, weight, bias)
    spatial = weight.dim() - 2
    if spatial not in _CONV or x.dim() not in (spatial + 1, spatial + 2):
        raise ValueError(
            f"x of shape {tuple(x.shape)} does not fit weight of shape {tuple(weight.shape)}: "
            "weight must be [n, C, *kernel] with one to three kernel sizes, x [B, C, *spatial]"
        )
    if x.dim() == spatial + 1:
        options: Any = {"stride": stride, "padding": padding, "dilation": dilation}
        return sketched_conv(x.unsqueeze(0), weight, bias, sketch, u=u, **options).squeeze(0)
    if x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x has {x.shape[1]} channels and the filters have {weight.shape[1]}; they must be "
            "equal: grouped convolutions are not sketched, use F.conv2d"
        )
    x, geometry = _geometry(x, weight, stride, padding, dilation)
    if sketch.draws_forward:
        raise TypeError(only_linear(sketch))
    if not geometry.pointwise and not fits_kernels(sketch):
        raise TypeError(only_columns(sketch))
    n, d = weight.shape[0], weight[0].numel()
    rows = x.shape[0] * math.prod(geometry.output(tuple(x.shape[2:])))
    wanted = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if not wanted or not torch.is_grad_enabled() or rows <= 0 or sketch.keeps_all(rows, n, d):
        return _conv(x, weight, bias, geometry)
    check_local(weight, sketch)
    return _SketchedConv.apply(x, weight, bias, sketch, geometry, u)  # type: ignore[no-any-return, no-untyped-call]


def fits_kernels(sketch: Sketch) -> bool:
    """Whether ``sketch`` keeps whole channels or whole samples, as kernels need."""
    if isinstance(sketch, Rows):
        return sketch.whole_samples(pixels=True) and sketch.then is None and not sketch.needs_input
    return isinstance(sketch, ColumnSketch)


def only_linear(sketch: Sketch) -> str:
    """Why ``sketch`` cannot take any convolution."""
    return f"{sketch!r} keeps rows of the input: it takes linear layers and attention only"


def only_columns(sketch: Sketch) -> str:
    """Why ``sketch`` cannot take a convolution with a kernel."""
    return (
        f"{sketch!r} does not keep whole output channels or samples: it takes convolutions of "
        "kernel 1 without padding; for others use a column sketch, for example L1, or whole "
        "samples, Rows(0.1, unit='sample')"
    )


def _geometry(
    x: Tensor,
    weight: Tensor,
    stride: int | Sizes,
    padding: int | Sizes | str,
    dilation: int | Sizes,
) -> tuple[Tensor, Geometry]:
    """Plain numbers; an uneven ``"same"`` padding is put around ``x`` itself, as torch does."""
    kernel = tuple(weight.shape[2:])
    spread = _each(dilation, kernel)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
        if any(t % 2 for t in total):
            sides = [side for t in reversed(total) for side in (t // 2, t - t // 2)]
            x, total = F.pad(x, sides), [0] * len(total)
        padding = tuple(t // 2 for t in total)
    elif isinstance(padding, str):
        padding = 0
    return x, Geometry(kernel, _each(stride, kernel), _each(padding, kernel), spread)


def _each(value: int | Sizes, kernel: Sizes) -> Sizes:
    return (value,) * len(kernel) if isinstance(value, int) else tuple(value)


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    kernel, stride, padding, dilation = geometry
    return _CONV[len(kernel)](x, weight, bias, stride, padding, dilation)


class _SketchedConv(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sketch: Sketch,
        geometry: Geometry,
        u: Tensor | None,
    ) -> Tensor:
        return _conv(x, weight, bias, geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, sketch, geometry, u = inputs
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        # As in sketched_linear: a frozen weight needs no input, a frozen input no weight.
        ctx.save_for_backward(
            x if wants_weight or sketch.needs_input else None,
            weight if wants_x or sketch.needs_weight else None,
            u,
        )
        ctx.sketch = sketch
        ctx.geometry = geometry
        ctx.input_shape = x.shape
        ctx.weight_shape = weight.shape
        ctx.channels_first = x.is_contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, u = ctx.saved_tensors
        with torch.no_grad():
            ctx.asked = asked(ctx)
            pointwise = ctx.geometry.pointwise
            as_linear = pointwise and (
                not isinstance(ctx.sketch, ColumnSketch) or rows_are_a_view(grad)
            )
            gradients = _linear_gradients if as_linear else _channel_gradients
            if not pointwise and isinstance(ctx.sketch, Rows):
                gradients = _sample_gradients
            grads: tuple[Tensor | None, ...] = gradients(ctx, grad, x, weight, u)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            grads = refuse_second_backward(grads, grad, x, weight)
        return (*grads, None, None, None)


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _linear_gradients(
    ctx: Any, grad: Tensor, x: Tensor | None, weight: Tensor | None, u: Tensor | None
) -> Gradients:
    """Kernel 1 as a linear layer on rows (batch, position): views in channels_last."""
    wants_x, wants_weight, wants_bias = ctx.asked
    sketch: Sketch = ctx.sketch
    G = channel_rows(grad)
    W = None if weight is None else weight.flatten(1)
    dX = dW = db = None
    if wants_bias and sketch.exact_bias:
        db = column_sums(G).to(grad.dtype)
    if wants_x or wants_weight or (wants_bias and db is None):
        compact = one_draw(ctx, grad, ctx.asked, lambda: _draw(ctx, G, x, W, u, grad.shape[0]))
        if wants_x:
            assert W is not None
            rows = compact.input_grad(W)
            dX = rows.view(grad.shape[0], *grad.shape[2:], -1).movedim(-1, 1)
            dX = _spread(ctx, dX.contiguous() if ctx.channels_first else dX)
        if wants_weight:
            assert x is not None
            dW = compact.weight_grad(channel_rows(ctx.geometry.visited(x))).view(ctx.weight_shape)
        if wants_bias and db is None:
            db = compact.bias_grad()
    return dX, dW, db


def _draw(
    ctx: Any, G: Tensor, x: Tensor | None, W: Tensor | None, u: Tensor | None, samples: int
) -> Any:
    sketch: Sketch = ctx.sketch
    if not sketch.by_rows:
        return sketch(G, W, u)
    layout = Samples(1, samples, G.shape[0] // samples, pixels=True)
    X = None
    if x is not None and sketch.needs_input:
        X = channel_rows(ctx.geometry.visited(x))
    return sketch(G, W, u, X=X, layout=layout)


def _sample_gradients(
    ctx: Any, grad: Tensor, x: Tensor | None, weight: Tensor | None, u: Tensor | None
) -> Gradients:
    """Whole samples: torch's own backward convolution over a smaller batch."""
    wants_x, wants_weight, wants_bias = ctx.asked
    sketch: Rows = ctx.sketch
    G = grad.flatten(1)
    dX = dW = db = None
    if wants_bias and sketch.exact_bias:
        db = grad.flatten(2).sum((0, 2), dtype=solve_dtype(grad)).to(grad.dtype)
    if wants_x or wants_weight or (wants_bias and db is None):
        kept: KeptRows = one_draw(ctx, grad, ctx.asked, lambda: sketch(G, None, u))  # type: ignore[assignment]
        part = kept.values.view(-1, *grad.shape[1:])
        few = None if x is None else x.index_select(0, kept.index)
        shape = (part.shape[0], *ctx.input_shape[1:])
        dX, dW = _kernel_products(ctx, part, few, weight, shape)
        if dX is not None:
            dX = dX.new_zeros(ctx.input_shape).index_copy_(0, kept.index, dX)
        if wants_bias and db is None:
            db = part.flatten(2).sum((0, 2))
    return dX, dW, db


def _channel_gradients(
    ctx: Any, grad: Tensor, x: Tensor | None, weight: Tensor | None, u: Tensor | None
) -> Gradients:
    """A column sketch on the channels of G as they lie in memory."""
    wants_x, wants_weight, wants_bias = ctx.asked
    sketch: ColumnSketch = ctx.sketch
    in_rows = rows_are_a_view(grad)
    G = channel_rows(grad) if in_rows else grad.flatten(2)
    dX = dW = db = None
    if wants_bias and sketch.exact_bias:
        db = column_sums(G) if in_rows else G.sum(-1, dtype=solve_dtype(G)).sum(0)
        db = db.to(grad.dtype)
    if wants_x or wants_weight or (wants_bias and db is None):
        index, scale = one_draw(
            ctx,
            grad,
            ctx.asked,
            lambda: _choose(sketch, G if in_rows else sketch.fold(G), weight, u),
        )
        # The kept channels, in the memory format of G.
        if in_rows:
            kept = scaled(G.index_select(1, index), scale)
            kept = kept.view(grad.shape[0], *grad.shape[2:], -1).movedim(-1, 1)
        else:
            kept = scaled(G.index_select(1, index), scale.unsqueeze(-1))
            kept = kept.view(*kept.shape[:2], *grad.shape[2:])
        filters = None if weight is None else weight.index_select(0, index)
        products = _pointwise_products if ctx.geometry.pointwise else _kernel_products
        dX, filter_grads = products(ctx, kept, x, filters, ctx.input_shape)
        if wants_weight:
            assert filter_grads is not None
            dW = filter_grads.new_zeros(ctx.weight_shape).index_copy_(0, index, filter_grads)
        if wants_bias and db is None:
            sums = kept.flatten(2).sum((0, 2))
            db = sums.new_zeros(grad.shape[1]).index_copy_(0, index, sums)
    return dX, dW, db


def _choose(
    sketch: ColumnSketch, S: Tensor, weight: Tensor | None, u: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The kept channels and their 1/p, from a matrix ``S`` with the column weights of G."""
    W = None if weight is None else weight.flatten(1)
    if u is None:
        u = draw_uniforms(S, sketch.uniform_shape(S, W))
    return sketch.draw(sketch.plan(S, W).probabilities, u)


def _pointwise_products(
    ctx: Any, kept: Tensor, x: Tensor | None, filters: Tensor | None, shape: Sizes
) -> tuple[Tensor | None, Tensor | None]:
    """dX_b = W_keptᵀ G_b and dW_kept = Σ_b G_b X_bᵀ, positions last: nothing is transposed."""
    wants_x, wants_weight = ctx.asked[:2]
    G = kept.flatten(2)
    B, r, L = G.shape
    dX = dW = None
    if wants_x:
        assert filters is not None
        dX = torch.bmm(filters.flatten(1).mT.expand(B, -1, -1), G)
        dX = _spread(ctx, dX.view(B, -1, *kept.shape[2:]))
    if wants_weight:
        assert x is not None
        X = ctx.geometry.visited(x).flatten(2)
        if r <= L:  # the smaller temporary: B products [r, C], or a copy of X
            dW = torch.bmm(G, X.mT).sum(0)
        else:
            dW = G.transpose(0, 1).flatten(1) @ X.transpose(0, 1).flatten(1).mT
        dW = dW.view(r, *ctx.weight_shape[1:])
    return dX, dW


def _kernel_products(
    ctx: Any, kept: Tensor, x: Tensor | None, filters: Tensor | None, shape: Sizes
) -> tuple[Tensor | None, Tensor | None]:
    """torch's own backward convolution, with the kept channels or samples; x has ``shape``."""
    wants_x, wants_weight = ctx.asked[:2]
    if not (wants_x or wants_weight):
        return None, None
    if kept.numel() == 0:  # an independent draw may keep nothing, which torch would refuse
        dX = kept.new_zeros(shape) if wants_x else None
        some = (kept.shape[1], *ctx.weight_shape[1:])
        return dX, kept.new_zeros(some) if wants_weight else None
    # Of what was not saved only the shape is looked at.
    if x is None:
        x = kept.new_empty(1).expand(shape)
    if filters is None:
        filters = kept.new_empty(1).expand(kept.shape[1], *ctx.weight_shape[1:])
    _, stride, padding, dilation = ctx.geometry
    mask = [wants_x, wants_weight, False]
    dX, dW, _ = torch.ops.aten.convolution_backward(
        kept, x, filters, None, stride, padding, dilation, False, [0] * len(stride), 1, mask
    )
    return dX, dW


def _spread(ctx: Any, dX: Tensor) -> Tensor:
    """dX at the visited positions; zero at those that a stride jumps over."""
    if dX.shape == ctx.input_shape:
        return dX
    full = torch.zeros(ctx.input_shape, dtype=dX.dtype, device=dX.device)
    if not ctx.channels_first and dX.dim() == 4:
        full = full.contiguous(memory_format=torch.channels_last)
    ctx.geometry.visited(full).copy_(dX)
    return full


def channel_rows(x: Tensor) -> Tensor:
    """``[B, C, *spatial]`` as ``[B·L, C]``: a view where the channels lie innermost."""
    return x.movedim(1, -1).reshape(-1, x.shape[1])


def rows_are_a_view(x: Tensor) -> bool:
    """Whether ``channel_rows`` copies nothing."""
    return x.movedim(1, -1).is_contiguous()
