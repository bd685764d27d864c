"""Every method of the paper, one small class each."""

from .amortised import AmortisedSketch, PlanMemory
from .atoms import ColumnSketch, RowSketch
from .base import AtomSketch, Sketch
from .coordinate import L1, L2, Diagonal, Variance
from .masks import ColumnMask, ElementMask, SampleMask
from .rows import VCAS, WTACRS, Rows
from .spectral import GradientSVD, RankConstrained, SpectralSketch

__all__ = [
    "L1",
    "L2",
    "VCAS",
    "WTACRS",
    "AmortisedSketch",
    "AtomSketch",
    "ColumnMask",
    "ColumnSketch",
    "Diagonal",
    "ElementMask",
    "GradientSVD",
    "PlanMemory",
    "RankConstrained",
    "RowSketch",
    "Rows",
    "SampleMask",
    "Sketch",
    "SpectralSketch",
    "Variance",
]
