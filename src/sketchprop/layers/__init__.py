"""Sketched layers: a torch layer's class, plus a sketch. No new parameters, no new state."""

from .attention import SketchedMultiheadAttention
from .conv import SketchedConv1d, SketchedConv2d
from .known import BUILT_IN, sketchable, sketched_class
from .linear import SketchedLinear
from .state import SketchedModule

__all__ = [
    "BUILT_IN",
    "SketchedConv1d",
    "SketchedConv2d",
    "SketchedLinear",
    "SketchedModule",
    "SketchedMultiheadAttention",
    "sketchable",
    "sketched_class",
]
