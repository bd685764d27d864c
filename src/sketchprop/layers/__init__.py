"""Sketched layers: a torch layer's class, plus a sketch. No new parameters, no new state."""

from .attention import SketchedMultiheadAttention
from .conv import SketchedConv1d, SketchedConv2d
from .known import BUILT_IN, sketchable, sketched_class
from .sketched import SketchedLinear, SketchedModule, Sketching

__all__ = [
    "BUILT_IN",
    "SketchedConv1d",
    "SketchedConv2d",
    "SketchedLinear",
    "SketchedModule",
    "SketchedMultiheadAttention",
    "Sketching",
    "sketchable",
    "sketched_class",
]
