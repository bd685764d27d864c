"""FLOPs of a backward pass, exact and sketched: counted, not estimated.

Matrix products come from torch's flop counter on a real backward pass; what the counter does not
see of a sketch (scores, sorts, draws, decompositions) is added by the sketch's own formulas. An
operation on single elements counts as much as one inside a product, although it runs slower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ...layers import SketchedModule
from ...layers.transform import exact
from ..noise.gradients import Loss, scalar_loss
from ..restore import restored
from .shapes import recorded_uses


@dataclass(frozen=True)
class FlopsReport:
    """FLOPs of one step of a model."""

    ANSWERS: ClassVar[tuple[str, ...]] = ("kept",)

    forward: float
    exact_backward: float
    sketched_backward: float
    overhead: float
    """The part of the sketched backward that is not matrix products."""

    @property
    def kept(self) -> float:
        """Sketched over exact backward FLOPs."""
        return self.sketched_backward / max(1, self.exact_backward)

    @property
    def step_ratio(self) -> float:
        """Sketched over exact FLOPs of a whole step: ρ(V)/ρ(0) in FLOPs."""
        exact_step = self.forward + self.exact_backward
        return (self.forward + self.sketched_backward) / max(1, exact_step)


def measure_flops(model: nn.Module, loss_fn: Loss, batch: Any) -> FlopsReport:
    """Counts a forward pass, an exact and a sketched backward pass over ``batch``."""
    parameters = [p for p in model.parameters() if p.requires_grad]

    def forward() -> Tensor:
        return scalar_loss(loss_fn, model, batch)

    def backward(loss: Tensor) -> float:
        return _count(lambda: torch.autograd.grad(loss, parameters, allow_unused=True))[0]

    with restored(model):
        with exact(model):
            forward_flops, loss = _count(forward)
            exact_backward = backward(loss)
        active: dict[Any, str] = {
            m: name
            for name, m in model.named_modules()
            if isinstance(m, SketchedModule) and m.training and not m.sketching.exact
        }
        with recorded_uses(active) as uses:
            loss = forward()
            # Recomputation in backward is no further use.
            calls = list(uses)
            products = backward(loss)
    # What the counter does not see.
    overhead = sum(
        float(use.layer.sketching.cost(size).overhead)
        for use in calls
        for size in (use.products if use.sketched else ())
    )
    return FlopsReport(forward_flops, exact_backward, products + overhead, overhead)


def _count(action: Callable[[], Any]) -> tuple[float, Any]:
    """FLOPs, and what came out."""
    with FlopCounterMode(display=False, custom_mapping=_missing_from_the_counter()) as counter:
        result = action()
    return float(counter.get_total_flops()), result


def _missing_from_the_counter() -> dict[Any, Any]:
    """Fused attention on the CPU, which torch's counter does not know: without it the rest of a
    transformer, and so what sketching leaves, would look smaller than it is."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return {
        forward: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),  # type: ignore[no-untyped-call]
        backward: lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(g, q, k, v),  # type: ignore[no-untyped-call]
    }
