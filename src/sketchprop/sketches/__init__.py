"""Every method of the paper, one small class each, and the planners that serve them."""

from .base import Sketch
from .columns import L1, L2, ColumnMask, ColumnSketch, Diagonal, Variance
from .elements import ElementMask
from .planners import Every, Planner
from .rows import ForwardRows, Rows, RowSketch, SampleMask
from .spectral import GradientSVD, RankConstrained, SpectralSketch
from .split import AnySketch, LayerSketch, Split
from .tokens import Tokens

__all__ = [
    "L1", "L2", "AnySketch", "ColumnMask", "ColumnSketch", "Diagonal", "ElementMask", "Every",
    "ForwardRows", "GradientSVD", "LayerSketch", "Planner", "RankConstrained", "RowSketch", "Rows",
    "SampleMask", "Sketch", "SpectralSketch", "Split", "Tokens", "Variance",
]  # fmt: skip
