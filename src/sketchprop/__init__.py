"""sketchprop: cheaper backpropagation that is still right.

    import sketchprop as sp
    print(sp.advise(model, loss_fn, batches))   # what to type for this model, or to stay exact
    sp.sketch_(model, sp.Tokens(0.2))           # backward on two tokens of ten
    ...                                         # train as before

replaces exact vector-Jacobian products by random ones whose mean is exactly the true gradient and
whose cost is a fraction.
"""

import warnings as _warnings

with _warnings.catch_warnings():
    # Torch says so at its import where NumPy is missing, which nothing here needs.
    _warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch as _torch  # noqa: F401

from ._version import __version__
from .core.allocator import keep_pages
from .core.enumeration import every_draw, expectation
from .core.probabilities import optimal_probabilities
from .core.sampling import sample_fixed, sample_independent
from .core.vjp import CompactGradient, Vjp
from .layers import SketchedLinear, SketchedModule, select, sketchable
from .layers.branch import branch
from .layers.schedule import Ladder, set_budget_
from .layers.summary import summary
from .layers.transform import exact, sketch_, unsketch_
from .layers.validate import Finding, validate
from .meters import advise, check_unbiased, measure, plan, trial
from .ops import gate, sketched_conv, sketched_linear
from .sketches import (
    L1,
    L2,
    ColumnMask,
    ColumnSketch,
    Diagonal,
    ElementMask,
    Every,
    ForwardRows,
    Fresh,
    GradientSVD,
    Planner,
    RankConstrained,
    Rows,
    RowSketch,
    SampleMask,
    Sketch,
    Split,
    Tokens,
    Variance,
)
from .tokens.attention import kept_attention
from .tuning import Tuner

__all__ = [
    "L1",
    "L2",
    "ColumnMask",
    "ColumnSketch",
    "CompactGradient",
    "Diagonal",
    "ElementMask",
    "Every",
    "Finding",
    "ForwardRows",
    "Fresh",
    "GradientSVD",
    "Ladder",
    "Planner",
    "RankConstrained",
    "RowSketch",
    "Rows",
    "SampleMask",
    "Sketch",
    "SketchedLinear",
    "SketchedModule",
    "Split",
    "Tokens",
    "Tuner",
    "Variance",
    "Vjp",
    "__version__",
    "advise",
    "branch",
    "check_unbiased",
    "every_draw",
    "exact",
    "expectation",
    "gate",
    "keep_pages",
    "kept_attention",
    "measure",
    "optimal_probabilities",
    "plan",
    "sample_fixed",
    "sample_independent",
    "select",
    "set_budget_",
    "sketch_",
    "sketchable",
    "sketched_conv",
    "sketched_linear",
    "summary",
    "trial",
    "unsketch_",
    "validate",
]
