"""What every sketched layer is: a layer's class, plus a sketch. No new parameters or state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..sketches import PlanMemory, RowMemory, Sketch


class SketchedModule:
    """Mixed into a layer's class by ``sketch_``; its entries leave the ``__dict__`` with it."""

    plain: ClassVar[type[nn.Module]]
    """The class that this one stands in for."""

    sketch: Sketch
    exact: bool
    """True while ``sketchprop.exact`` is in force."""
    judge: Callable[[SketchedModule, Sequence[Any]], bool] | None = None
    """Asked in each forward pass whether to sketch (``where="faster"``); ``None``: always."""
    memory: PlanMemory | RowMemory | None = None
    """What the sketch remembers: a plan (``refresh_every`` above 1) or running norms."""
    accumulate: bool = False
    """Whether kept rows of dW are added to an existing ``.grad`` in place."""

    training: bool

    def sketching(self, *inputs: Any) -> bool:
        """Whether this forward pass, on ``inputs``, records a sketched backward."""
        if not self.training or self.exact or not torch.is_grad_enabled():
            return False
        return self.judge is None or len(inputs) == 0 or self.judge(self, inputs)

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
