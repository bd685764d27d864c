"""Linear layers."""

from __future__ import annotations

from torch import Tensor, nn

from ..ops import sketched_linear
from .state import SketchedModule


class SketchedLinear(SketchedModule, nn.Linear):
    """``nn.Linear`` with a sketched backward in training mode; otherwise ``nn.Linear`` itself."""

    plain = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        if not self.sketching(input):
            return super().forward(input)
        return sketched_linear(
            input,
            self.weight,
            self.bias,
            self.sketch,
            memory=self.memory,
            accumulate=self.accumulate,
        )
