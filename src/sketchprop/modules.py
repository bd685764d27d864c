"""Sketched layers: a torch layer's class, plus a sketch. No new parameters, no new state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .ops import sketched_linear
from .sketches import Sketch


class SketchedModule:
    """Mixed into a layer's class by ``sketch_``; the layer's ``__dict__`` gains two entries."""

    sketch: Sketch
    exact: bool
    """True while ``sketchprop.exact`` is in force."""

    training: bool

    def sketching(self) -> bool:
        """Whether this forward pass records a sketched backward."""
        return self.training and not self.exact and torch.is_grad_enabled()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sketch={self.sketch!r}"  # type: ignore[misc]


class SketchedLinear(SketchedModule, nn.Linear):
    """``nn.Linear`` with a sketched backward in training mode; otherwise ``nn.Linear`` itself."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.sketching():
            return super().forward(input)
        return sketched_linear(input, self.weight, self.bias, self.sketch)


SKETCHED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: SketchedLinear}
"""Which class a layer's class becomes. One shared class per type, never one per layer."""
