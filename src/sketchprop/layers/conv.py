"""Convolutions."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import sketched_conv
from ..ops.conv import conv_refusal
from ..sketches import LayerSketch
from .sketched import SketchedModule


class _SketchedConv(SketchedModule):
    """What the two have in common; ``nn.Conv1d`` or ``nn.Conv2d`` comes behind it."""

    def forward(self: Any, input: Tensor) -> Tensor:
        if not self.is_sketching():
            return super().forward(input)  # type: ignore[no-any-return, misc]
        padding = self.padding
        if self.padding_mode != "zeros":
            around = self._reversed_padding_repeated_twice
            input, padding = F.pad(input, around, mode=self.padding_mode), 0
        return sketched_conv(
            input,
            self.weight,
            self.bias,
            self.sketch,
            stride=self.stride,
            padding=padding,
            dilation=self.dilation,
            planner=self.sketching.planner,
        )

    @classmethod
    def left_exact(cls, layer: nn.Module, sketch: LayerSketch) -> str:
        assert isinstance(layer, nn.Conv1d | nn.Conv2d)
        if layer.groups > 1:
            return f"groups={layer.groups}: only convolutions without groups are sketched"
        # With kernel 1 both "same" and "valid" add nothing.
        no_padding = isinstance(layer.padding, str) or max(layer.padding) == 0
        return conv_refusal(sketch, pointwise=max(layer.kernel_size) == 1 and no_padding)


class SketchedConv1d(_SketchedConv, nn.Conv1d):
    """``nn.Conv1d`` with a sketched backward in training mode; otherwise ``nn.Conv1d`` itself."""

    plain = nn.Conv1d


class SketchedConv2d(_SketchedConv, nn.Conv2d):
    """``nn.Conv2d`` with a sketched backward in training mode; otherwise ``nn.Conv2d`` itself."""

    plain = nn.Conv2d
