"""What every sketched layer is: a layer's class, plus a sketch. No new parameters or state."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from ..sketches import Sketch


class SketchedModule:
    """Mixed into a layer's class by ``sketch_``; the layer's ``__dict__`` gains two entries."""

    plain: ClassVar[type[nn.Module]]
    """The class that this one stands in for."""

    sketch: Sketch
    exact: bool
    """True while ``sketchprop.exact`` is in force."""

    training: bool

    def sketching(self) -> bool:
        """Whether this forward pass records a sketched backward."""
        return self.training and not self.exact and torch.is_grad_enabled()

    def extra_repr(self) -> str:
        own = super().extra_repr()  # type: ignore[misc]
        return f"{own}, sketch={self.sketch!r}" if own else f"sketch={self.sketch!r}"

    @classmethod
    def left_exact(cls, layer: nn.Module, sketch: Sketch) -> str:
        """Why ``sketch`` cannot take this very layer; empty if it can."""
        return ""

    @classmethod
    def matrices(cls, layer: nn.Module) -> tuple[tuple[int, int], ...]:
        """(n, d), outputs and inputs, of each weight matrix whose backward is sketched."""
        weight = layer.weight
        assert isinstance(weight, Tensor)
        return ((weight.shape[0], weight[0].numel()),)
