"""Sketched layers: a torch layer's class, plus a sketch. No new parameters, no new state."""

from .attention import SketchedMultiheadAttention
from .blocks import Anatomy, SelfAttention, SketchedBlock
from .conv import SketchedConv1d, SketchedConv2d
from .gate import Gate
from .known import BUILT_IN, block_class, sketchable, sketched_class
from .sketched import SketchedLinear, SketchedModule, Sketching

__all__ = [
    "BUILT_IN",
    "Anatomy",
    "Gate",
    "SelfAttention",
    "SketchedBlock",
    "SketchedConv1d",
    "SketchedConv2d",
    "SketchedLinear",
    "SketchedModule",
    "SketchedMultiheadAttention",
    "Sketching",
    "block_class",
    "sketchable",
    "sketched_class",
]
