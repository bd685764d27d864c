"""sketchprop: cheaper backpropagation that is still right.

    import sketchprop as sp
    print(sp.advise(model, loss_fn, batches))   # what to type for this model, or to stay exact
    sp.sketch_(model, sp.Tokens(0.2))           # backward on a fifth of the tokens
    ...                                         # train as before

The backward pass then computes random vector-Jacobian products. They cost a fraction of the exact
ones, and their mean is exactly the true gradient.

Apply: sketch_, unsketch_, exact, set_budget_, summary, validate; select.everything.
Sketches: Tokens for the blocks of a transformer, Rows and the paper's methods for single layers.
Measure: advise, trial, plan, measure, check_unbiased; Tuner measures while a model trains.
Build with: branch, kept_attention, sketched_linear, gate, Gate, sketchable.

Import all else from its module: planners and base classes of sketches from sketchprop.sketches, Vjp
from sketchprop.core.vjp, layers from sketchprop.layers.
"""

import warnings as _warnings

with _warnings.catch_warnings():
    # Torch says so at its import where NumPy is missing, which nothing here needs.
    _warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch as _torch  # noqa: F401

from ._version import __version__ as __version__
from .layers import Gate, select, sketchable
from .layers.branch import branch
from .layers.schedule import set_budget_
from .layers.summary import summary
from .layers.transform import exact, sketch_, unsketch_
from .layers.validate import validate
from .meters import advise, check_unbiased, measure, plan, trial
from .ops import gate, sketched_linear
from .sketches import (
    L1,
    L2,
    ColumnMask,
    Diagonal,
    ElementMask,
    GradientSVD,
    RankConstrained,
    Rows,
    SampleMask,
    Sketch,
    Split,
    Tokens,
    Variance,
)
from .tokens.attention import kept_attention
from .tuning import Tuner

__all__ = [  # noqa: RUF022 - by groups, in the order in which help() shows them
    # apply
    "sketch_", "unsketch_", "exact", "set_budget_", "summary", "validate", "select",
    # sketches
    "Tokens", "Rows", "L1", "L2", "Variance", "Diagonal", "GradientSVD", "RankConstrained",
    "ColumnMask", "SampleMask", "ElementMask", "Sketch", "Split",
    # measure
    "advise", "trial", "plan", "measure", "check_unbiased", "Tuner",
    # build with
    "branch", "kept_attention", "sketched_linear", "gate", "Gate", "sketchable",
]  # fmt: skip
