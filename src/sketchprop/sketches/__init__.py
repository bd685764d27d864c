"""Every method of the paper, one small class each."""

from .base import AtomSketch, ColumnSketch, RowSketch, Sketch
from .coordinate import L1, L2, Diagonal, Variance
from .masks import ColumnMask, ElementMask, SampleMask
from .spectral import GradientSVD, RankConstrained, SpectralSketch

__all__ = [
    "L1",
    "L2",
    "AtomSketch",
    "ColumnMask",
    "ColumnSketch",
    "Diagonal",
    "ElementMask",
    "GradientSVD",
    "RankConstrained",
    "RowSketch",
    "SampleMask",
    "Sketch",
    "SpectralSketch",
    "Variance",
]
