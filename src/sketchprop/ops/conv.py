"""Convolutions whose backward multiplies only what is kept.

A convolution is a linear layer on patches: its rows are (batch, position), its columns are the
output channels, its weight matrix has a flattened filter in each row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.compact import Kept, KeptRows, scaled
from ..core.probabilities import solve_dtype
from ..core.samples import Samples
from ..core.sampling import Uniforms, draw_uniforms
from ..core.vjp import CompactGradient, Vjp
from ..sketches import ColumnSketch, LayerSketch, Planner, Rows, Sketch, Split
from .backward import Form, Method, autocast, records, sketched

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
    sketch: LayerSketch,
    *,
    stride: int | Sizes = 1,
    padding: int | Sizes | str = 0,
    dilation: int | Sizes = 1,
    planner: Planner | None = None,
    uniforms: Uniforms = draw_uniforms,
) -> Tensor:
    """``F.conv1d``, ``F.conv2d`` or ``F.conv3d``, with dX and dW from a sketch of the gradient.

    ``x: [B, C, *spatial]`` or ``[C, *spatial]``, ``weight: [n, C, *kernel]``, ``bias: [n]``.
    A column sketch keeps output channels: the backward convolution has r of n of them, cost
    4·B·L·r·C·k + O(B·L·n). ``Rows`` by samples keeps r of B images. With kernel 1 and no padding
    any sketch works, on rows (batch, position). ``stride``, ``padding`` and ``dilation`` as in
    torch's functions, ``planner`` and ``uniforms`` as in ``sketched_linear``; where everything
    would be kept this is the exact convolution.

    >>> from sketchprop import L1
    >>> x, filters = torch.randn(8, 16, 32, 32), torch.randn(64, 16, 3, 3)
    >>> sketched_conv(x, filters, None, L1(0.1), padding=1).shape
    torch.Size([8, 64, 32, 32])
    """
    x, weight, bias = autocast(x, weight, bias)
    spatial = weight.dim() - 2
    if spatial not in _CONV or x.dim() not in (spatial + 1, spatial + 2):
        raise ValueError(
            f"x of shape {tuple(x.shape)} does not fit weight of shape {tuple(weight.shape)}: "
            "weight must be [n, C, *kernel] with one to three kernel sizes, x [B, C, *spatial]"
        )
    if x.dim() == spatial + 1:
        options: Any = {"stride": stride, "padding": padding, "dilation": dilation}
        options |= {"planner": planner, "uniforms": uniforms}
        return sketched_conv(x.unsqueeze(0), weight, bias, sketch, **options).squeeze(0)
    if x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x has {x.shape[1]} channels and the filters have {weight.shape[1]}; they must be "
            "equal: grouped convolutions are not sketched, use F.conv2d"
        )
    x, geometry = _geometry(x, weight, stride, padding, dilation)
    form = ConvForm(
        x.shape,
        geometry=geometry,
        weight_shape=weight.shape,
        channels_first=x.is_contiguous(),
    )
    if reason := conv_refusal(sketch, geometry.pointwise):
        raise TypeError(reason)
    n, d = weight.shape[0], weight[0].numel()
    rows = x.shape[0] * math.prod(geometry.output(tuple(x.shape[2:])))
    if not records(x, weight, bias) or rows <= 0 or sketch.keeps_all(rows, n, d):
        return form.forward(x, weight, bias)
    if torch.compiler.is_compiling():
        planner = None  # a step that is compiled may have no side effects
    return sketched(x, weight, bias, form, Method(sketch, planner, uniforms))


def conv_refusal(sketch: LayerSketch, pointwise: bool) -> str:
    """Why ``sketch`` cannot take a convolution, with a kernel or ``pointwise``; empty if it can."""
    if "G" not in sketch.sees or (isinstance(sketch, Split) and sketch.forward is not None):
        return f"{sketch!r} keeps rows of the input: it takes linear layers and attention only"
    whole = isinstance(sketch, Rows) and sketch.whole_samples(pixels=True) and sketch.sees == "G"
    if pointwise or whole or isinstance(sketch, ColumnSketch):
        return ""
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


@dataclass(frozen=True)
class ConvForm(Form):
    """Rows are (batch, position) and columns are channels: views in channels_last.

    So it is for kernels of 1, which are linear layers over channels. ``facing`` finds the form in
    which whole channels, or whole samples, are kept without a copy of G.
    """

    geometry: Geometry = field(kw_only=True)
    weight_shape: Sizes = field(kw_only=True)
    channels_first: bool = field(kw_only=True)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        kernel, stride, padding, dilation = self.geometry
        return _CONV[len(kernel)](x, weight, bias, stride, padding, dilation)

    def facing(self, grad: Tensor, sketch: LayerSketch) -> ConvForm:
        if self.geometry.pointwise and (
            not isinstance(sketch, ColumnSketch) or rows_are_a_view(grad)
        ):
            return self
        kind = ChannelForm if isinstance(sketch, ColumnSketch) else SampleForm
        return kind(**{f.name: getattr(self, f.name) for f in fields(self)})

    def vjp(self, grad: Tensor, x: Tensor | None, weight: Tensor | None) -> Vjp:
        G = channel_rows(grad)
        W = None if weight is None else weight.flatten(1)
        X = None if x is None else channel_rows(self.geometry.visited(x))
        samples = grad.shape[0]
        return Vjp(G, W, X, Samples(1, samples, G.shape[0] // samples, pixels=True))

    def as_input(self, dX: Tensor) -> Tensor:
        batch, _, *spatial = self.input_shape
        positions = self.geometry.output(tuple(spatial))
        dX = dX.view(batch, *positions, -1).movedim(-1, 1)
        return self.spread(dX.contiguous() if self.channels_first else dX)

    def as_weight(self, dW: Tensor) -> Tensor:
        return dW.view(self.weight_shape)

    def spread(self, dX: Tensor) -> Tensor:
        """dX at the visited positions; zero at those that a stride jumps over."""
        if dX.shape == self.input_shape:
            return dX
        full = torch.zeros(self.input_shape, dtype=dX.dtype, device=dX.device)
        if not self.channels_first and dX.dim() == 4:
            full = full.contiguous(memory_format=torch.channels_last)
        self.geometry.visited(full).copy_(dX)
        return full

    def convolution_backward(
        self, kept: Tensor, x: Tensor | None, filters: Tensor | None, shape: Sizes
    ) -> Tensor:
        """torch's backward convolution: dX of ``shape`` from filters, dW of ``shape`` from x."""
        if kept.numel() == 0:  # an independent draw may keep nothing, which torch would refuse
            return kept.new_zeros(shape)
        # torch wants both operands and reads one: of the other only the shape counts.
        wants = [filters is not None, x is not None, False]
        x = self._unread(kept, shape) if x is None else x
        filters = kept.new_empty(1).expand(shape) if filters is None else filters
        _, stride, padding, dilation = self.geometry
        no_output_padding = [0] * len(stride)
        grads = torch.ops.aten.convolution_backward(
            kept, x, filters, None, stride, padding, dilation, False, no_output_padding, 1, wants
        )
        dX: Tensor = grads[0] if wants[0] else grads[1]
        return dX

    def _unread(self, kept: Tensor, shape: Sizes) -> Tensor:
        """A tensor of ``shape`` in the input's memory format, which dX takes over."""
        if self.channels_first or len(shape) != 4:
            return kept.new_empty(1).expand(shape)
        return torch.empty(
            shape, dtype=kept.dtype, device=kept.device, memory_format=torch.channels_last
        )


@dataclass(frozen=True)
class ChannelForm(ConvForm):
    """A column sketch on the channels of G as they lie in memory."""

    def vjp(self, grad: Tensor, x: Tensor | None, weight: Tensor | None) -> Vjp:
        return Vjp(grad, weight, x)

    def draw(
        self, sketch: Sketch, vjp: Vjp, planner: Planner | None, uniforms: Uniforms
    ) -> CompactGradient:
        assert isinstance(sketch, ColumnSketch)
        grad = vjp.G
        in_rows = rows_are_a_view(grad)
        G = channel_rows(grad) if in_rows else grad.flatten(2)
        W = None if vjp.W is None else vjp.W.flatten(1)
        folded = Vjp(G if in_rows else sketch.fold(G), W)
        atoms = sketch.atoms(folded) if planner is None else planner.atoms(sketch, folded)
        index, scale = atoms.choose(uniforms)
        # The kept channels, in the memory format of G.
        if in_rows:
            kept = scaled(G.index_select(1, index), scale)
            kept = kept.view(grad.shape[0], *grad.shape[2:], -1).movedim(-1, 1)
        else:
            kept = scaled(G.index_select(1, index), scale.unsqueeze(-1))
            kept = kept.view(*kept.shape[:2], *grad.shape[2:])
        return KeptChannels(index, kept, self)

    def bias_sums(self, G: Tensor) -> Tensor:
        if rows_are_a_view(G):
            return super().bias_sums(channel_rows(G))
        return G.flatten(2).sum(-1, dtype=solve_dtype(G)).sum(0)

    def as_input(self, dX: Tensor) -> Tensor:
        return dX


@dataclass(frozen=True)
class SampleForm(ChannelForm):
    """Whole samples: a backward convolution over a smaller batch."""

    def draw(
        self, sketch: Sketch, vjp: Vjp, planner: Planner | None, uniforms: Uniforms
    ) -> CompactGradient:
        flat = Vjp(vjp.G.flatten(1))
        kept = Form.draw(self, sketch, flat, planner, uniforms)
        assert isinstance(kept, KeptRows)
        return KeptSamples(kept.index, kept.values.view(-1, *vjp.G.shape[1:]), self)


@dataclass(frozen=True)
class KeptChannels(Kept):
    """Some channels of Ĝ: ``values[B, r, *spatial]`` are its channels ``index[r]``."""

    form: ConvForm

    def dense(self) -> Tensor:
        batch, _, *spatial = self.values.shape
        full = self.values.new_zeros(batch, self.form.weight_shape[0], *spatial)
        return full.index_copy_(1, self.index, self.values)

    def input_grad(self, weight: Tensor) -> Tensor:
        filters = weight.index_select(0, self.index)
        if not self.form.geometry.pointwise:
            return self.form.convolution_backward(self.values, None, filters, self.form.input_shape)
        # dX_b = W_keptᵀ G_b, positions last: nothing is transposed.
        G = self.values.flatten(2)
        dX = torch.bmm(filters.flatten(1).mT.expand(G.shape[0], -1, -1), G)
        return self.form.spread(dX.view(G.shape[0], -1, *self.values.shape[2:]))

    def weight_grad(self, x: Tensor) -> Tensor:
        shape = (self.values.shape[1], *self.form.weight_shape[1:])
        if not self.form.geometry.pointwise:
            dW = self.form.convolution_backward(self.values, x, None, shape)
        else:
            G, X = self.values.flatten(2), self.form.geometry.visited(x).flatten(2)
            if G.shape[1] <= G.shape[2]:  # the smaller temporary: B products [r, C], or a copy of X
                dW = torch.bmm(G, X.mT).sum(0).view(shape)
            else:
                dW = G.transpose(0, 1).flatten(1) @ X.transpose(0, 1).flatten(1).mT
                dW = dW.view(shape)
        return dW.new_zeros(self.form.weight_shape).index_copy_(0, self.index, dW)

    def bias_grad(self) -> Tensor:
        sums = self.values.flatten(2).sum((0, 2))
        return sums.new_zeros(self.form.weight_shape[0]).index_copy_(0, self.index, sums)


@dataclass(frozen=True)
class KeptSamples(Kept):
    """Some samples of Ĝ: ``values[r, n, *spatial]`` are its samples ``index[r]``."""

    form: ConvForm

    def dense(self) -> Tensor:
        full = self.values.new_zeros(self.form.input_shape[0], *self.values.shape[1:])
        return full.index_copy_(0, self.index, self.values)

    def input_grad(self, weight: Tensor) -> Tensor:
        shape = (self.values.shape[0], *self.form.input_shape[1:])
        dX = self.form.convolution_backward(self.values, None, weight, shape)
        return dX.new_zeros(self.form.input_shape).index_copy_(0, self.index, dX)

    def weight_grad(self, x: Tensor) -> Tensor:
        few = x.index_select(0, self.index)
        return self.form.convolution_backward(self.values, few, None, self.form.weight_shape)

    def bias_grad(self) -> Tensor:
        return self.values.flatten(2).sum((0, 2))


def channel_rows(x: Tensor) -> Tensor:
    """``[B, C, *spatial]`` as ``[B·L, C]``: a view where the channels lie innermost."""
    return x.movedim(1, -1).reshape(-1, x.shape[1])


def rows_are_a_view(x: Tensor) -> bool:
    """Whether ``channel_rows`` copies nothing."""
    return x.movedim(1, -1).is_contiguous()
