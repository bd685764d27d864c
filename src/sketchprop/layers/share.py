"""What of the backward pass of a model is left, by the sketches' own formulas."""

from __future__ import annotations

from torch import nn

from .known import block_class, sketched_class
from .select import units_of
from .sketched import SketchedModule


def kept_flops(model: nn.Module, rows: int) -> float:
    """Backward FLOPs as a share of the exact ones, over all layers that can be sketched.

    By the sketches' own formulas, scoring and solving included; no pass over the model is made.
    """
    exact = kept = 0.0
    for unit in units_of(model).values():
        known = sketched_class(type(unit)) or block_class(type(unit))
        for size in () if known is None else known.sizes(unit, rows):
            state = unit.sketching if isinstance(unit, SketchedModule) else None
            exact += size.exact_flops
            kept += size.exact_flops if state is None else state.cost(size).total
    return kept / exact if exact else 1.0
