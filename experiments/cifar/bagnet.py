"""BagNet-17, the paper's convolutional network."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1×1 down, one convolution of ``kernel`` without padding, 1×1 up; a residual beside it."""

    def __init__(self, inputs: int, width: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel, stride, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut: nn.Module = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        # A kernel without padding makes the picture smaller: the residual loses its last rows.
        residual = self.shortcut(x)[..., : y.shape[-2], : y.shape[-1]]
        return F.relu(y + residual)


class BagNet(nn.Module):
    """BagNet-17 (Brendel & Bethge, 2019): a ResNet-50 whose outputs see patches of 17 pixels.

    Nearly all convolutions are 1×1, which are linear layers over channels; the first block of
    each of the first three stages has a 3×3, and so has the stem: 3 + 2 + 4 + 8 = 17 pixels.
    ``width`` and ``blocks`` make it smaller. Unlike the published code all normalisations keep
    the usual momentum; there the first has 0.001, made for long training.
    """

    def __init__(
        self,
        channels: int = 3,
        width: int = 64,
        blocks: tuple[int, ...] = (3, 4, 6, 3),
        strides: tuple[int, ...] = (2, 2, 2, 1),
        kernels: tuple[int, ...] = (3, 3, 3, 1),
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, width, 1, bias=False)
        self.conv = nn.Conv2d(width, width, 3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        stages: list[nn.Module] = []
        inputs = width
        for i, (count, stride, kernel) in enumerate(zip(blocks, strides, kernels, strict=True)):
            inner, outputs = width * 2**i, 4 * width * 2**i
            stage = [Bottleneck(inputs, inner, outputs, kernel, stride)]
            stage += [Bottleneck(outputs, inner, outputs, 1, 1) for _ in range(count - 1)]
            stages.append(nn.Sequential(*stage))
            inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(self.project(images))))
        logits: Tensor = self.head(self.stages(x).mean((-2, -1)))
        return logits
