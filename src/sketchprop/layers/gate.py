"""A node of a graph as a layer, so that sketches and meters find it by its name."""

from __future__ import annotations

from torch import Tensor, nn

from ..ops import gate
from ..ops.gate import unfit
from ..sketches import LayerSketch
from .known import sketchable
from .sketched import SketchedModule


class Gate(nn.Module):
    """An identity layer: it marks a place in a model where ``sketch_`` sketches the gradient.

    ``columns``: the size of dimension ``dim``, the columns of G; all other dimensions are rows.
    It has no weight and saves no time: use it to add noise at a node, and to measure it.

    >>> from sketchprop import L1, sketch_
    >>> sketch_(nn.Sequential(nn.Conv2d(3, 8, 3), Gate(8, dim=1), nn.ReLU()), {"1": L1(0.5)})[1]
    SketchedGate(8, dim=1, sketch=L1(0.5))
    """

    def __init__(self, columns: int, dim: int = -1) -> None:
        super().__init__()
        self.columns, self.dim = columns, dim

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[self.dim] != self.columns:
            raise ValueError(
                f"x of shape {tuple(x.shape)} has {x.shape[self.dim]} columns in dim={self.dim}, "
                f"not {self.columns}: type Gate({x.shape[self.dim]}, dim={self.dim}), or say "
                "which dim are the columns"
            )
        return x

    def extra_repr(self) -> str:
        return f"{self.columns}, dim={self.dim}"


@sketchable(Gate)
class SketchedGate(SketchedModule, Gate):
    """``Gate`` with a sketched gradient in training mode; otherwise ``Gate`` itself."""

    def forward(self, x: Tensor) -> Tensor:
        x, state = super().forward(x), self.sketching
        if not self.is_sketching():
            return x
        return gate(x, state.sketch, dim=self.dim, planner=state.planner)

    @classmethod
    def left_exact(cls, layer: nn.Module, sketch: LayerSketch) -> str:
        blind = f"{sketch!r} looks at a layer's weight, and a gate has none; use L1(0.1)"
        return unfit(sketch) or (blind if "W" in sketch.sees else "")

    @classmethod
    def matrices(cls, layer: nn.Module) -> tuple[tuple[int, int], ...]:
        assert isinstance(layer, Gate)
        return ((layer.columns, 0),)
