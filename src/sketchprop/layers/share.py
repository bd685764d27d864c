"""What of the backward pass of a model is left, by the sketches' own formulas."""

from __future__ import annotations

from torch import nn

from .blocks import SketchedBlock
from .known import sketched_class
from .sketched import SketchedModule


def kept_flops(model: nn.Module, rows: int) -> float:
    """Backward FLOPs as a share of the exact ones, over all layers that can be sketched.

    By the sketches' own formulas, scoring and solving included; no pass over the model is made.
    """
    exact = kept = 0.0
    inner: set[nn.Module] = set()
    for module in model.modules():
        known = sketched_class(type(module))
        if isinstance(module, SketchedBlock) and isinstance(module, nn.Module):
            known = type(module)
            inner.update(m for m in module.modules() if m is not module)
        for size in () if known is None or module in inner else known.sizes(module, rows):
            exact += size.exact_flops
            if isinstance(module, SketchedModule):
                kept += module.sketching.cost(size).total
            else:
                kept += size.exact_flops
    return kept / exact if exact else 1.0
