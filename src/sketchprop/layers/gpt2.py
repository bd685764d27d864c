"""transformers' ``Conv1D``: a linear layer that stores its weight transposed, ``[d, n]``.

The only module that imports transformers at the top; ``sketched_class`` loads it when
transformers is there already, and unpickling a model that has such layers does.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..ops import sketched_linear
from .sketched import SketchedModule


class SketchedConv1D(SketchedModule, Conv1D):
    """``Conv1D`` with a sketched backward in training mode; otherwise ``Conv1D`` itself."""

    plain = Conv1D
    weight: Any
    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // max(1, int(self.nx))
        # Where all is kept its own product is the exact one, to the last bit.
        everything = self.sketch.keeps_all(rows, int(self.nf), int(self.nx))
        if everything or not self.is_sketching():
            return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]
        return sketched_linear(
            x, self.weight.mT, self.bias, self.sketch, planner=self.sketching.planner
        )

    def __repr__(self) -> str:
        return f"SketchedConv1D(nf={self.nf}, nx={self.nx}, sketch={self.sketch!r})"

    @classmethod
    def matrices(cls, layer: nn.Module) -> tuple[tuple[int, int], ...]:
        return ((int(layer.nf), int(layer.nx)),)  # type: ignore[arg-type]
