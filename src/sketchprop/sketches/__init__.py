"""Every method of the paper, one small class each."""

from .amortised import AmortisedSketch, PlanMemory
from .atoms import ColumnSketch, RowSketch
from .base import AtomSketch, Sketch
from .coordinate import L1, L2, Diagonal, Variance
from .forward import ForwardRows, RowMemory
from .masks import ColumnMask, ElementMask, SampleMask
from .rows import VCAS, WTACRS, Rows
from .spectral import GradientSVD, RankConstrained, SpectralSketch
from .split import Split

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
    "ForwardRows",
    "GradientSVD",
    "PlanMemory",
    "RankConstrained",
    "RowMemory",
    "RowSketch",
    "Rows",
    "SampleMask",
    "Sketch",
    "SpectralSketch",
    "Split",
    "Variance",
]
