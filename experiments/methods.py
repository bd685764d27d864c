"""All methods that are compared, one line each: series of figures and ways to make a gradient."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from sketchprop.cli.expressions import UsageError, parse_sketch
from sketchprop.sketches import AnySketch, Sketch, Tokens

from .lab import ExperimentError

BUDGET = "{p}"
EXACT = "exact"
PLACES = ("all", "first", "last")
"""Which layers are sketched; the first is the one next to the data."""


@dataclass(frozen=True)
class Method:
    """What is run, how it looks, and the figures that show it."""

    name: str
    label: str
    sketch: str
    """A sketch as the command line takes it, ``{p}`` for the budget; empty for exact training."""
    colour: str = ""
    figures: tuple[str, ...] = ()
    """``location`` stands for its panel: ``location-masks`` and so on."""
    line: str = "-"
    places: tuple[str, ...] = ("all",)
    sketched: str = ""
    """The layers that are sketched under the place ``all``, if not all of them."""
    control: bool = False
    """Not in the paper: what a method has to beat."""

    def expression(self, budget: float) -> str:
        """The sketch at a budget, as text: part of a run's identity.

        >>> METHODS["l1"].expression(0.1), METHODS["l1"].expression(1.0)
        ('L1(0.1, exact_bias=False)', 'L1(1.0, exact_bias=False)')
        """
        share = isinstance(budget, float) and budget.is_integer()
        return self.sketch.replace(BUDGET, f"{budget:.1f}" if share else f"{budget:g}")

    def layers(self, place: str) -> str:
        return self.sketched if place == "all" and self.sketched else place


COLOURS = {
    "element": (156, 39, 176), "sample": (0, 188, 212), "uniform": (120, 144, 156),
    "l1": (230, 81, 0), "l2": (0, 150, 136), "var": (255, 193, 7), "ds": (27, 94, 32),
    "gsv": (63, 81, 181), "rcs": (233, 30, 99), "control columns": (93, 64, 55),
    "control samples": (33, 33, 33), "rows": (121, 85, 201), "baseline": (0, 0, 0),
}  # fmt: skip
"""The paper's colours (RGB), and more for what it lacks."""


def colour(name: str) -> tuple[float, ...]:
    return tuple(channel / 255 for channel in COLOURS[name])


_FL = ("all", "first", "last")
_A, _B, _P, _S = "1a", "1b", "2a", "2b"
_LM, _LC, _LS, _C = "location-masks", "location-coordinate", "location-spectral", "cifar"
_EVERY = (_A, _B, _P, _S, _LM, _LC, _LS, _C)
_IND = 'sampling="independent", exact_bias=False'
_PAPER = "paper=True, exact_bias=False"

# The paper's formulas are taken literally (paper=True), and the bias gradient from Ĝ as there.
# Its figures 1a and 1b show `diag_optimal_sec_mom` under the legend RCS and `optimal_sec_mom`
# under DS; the legends here follow what is run.
_METHODS = (
    Method("l1", "ℓ1", "L1({p}, exact_bias=False)", "l1", (_A, _P, _S, _LC, _C), places=_FL),
    Method("l1-independent", "ℓ1, independent", f"L1({{p}}, {_IND})", "l1", (_A,), "--"),
    Method("ds", "DS", f"Diagonal({{p}}, {_PAPER})", "ds", (_A, _B, _S, _LC, _C), places=_FL),
    Method("ds-independent", "DS, independent", f"Diagonal({{p}}, {_IND}, paper=True)", "ds",
           (_A,), "--"),
    Method("gsv", "G-SV", "GradientSVD({p}, exact_bias=False)", "gsv", (_A, _S, _LS, _C),
           places=_FL),
    Method("gsv-independent", "G-SV, independent", f"GradientSVD({{p}}, {_IND})", "gsv", (_A,),
           "--"),
    Method("rcs", "RCS", f"RankConstrained({{p}}, {_PAPER})", "rcs", (_A, _B, _S, _LS, _C),
           places=_FL),
    Method("rcs-independent", "RCS, independent", f"RankConstrained({{p}}, {_IND}, paper=True)",
           "rcs", (_A,), "--"),
    Method("element", "per element", f"ElementMask({{p}}, {_IND})", "element", (_B, _LM, _C),
           places=_FL),
    Method("sample", "per sample", f"SampleMask({{p}}, {_IND})", "sample", (_B, _LM, _C),
           places=_FL),
    Method("column", "per column", f"ColumnMask({{p}}, {_IND})", "uniform", (_B,)),
    Method("l1-root", "√ℓ1", "L1({p}, root=True, exact_bias=False)", "l1", (_P,), "--"),
    Method("l2", "ℓ2", "L2({p}, exact_bias=False)", "l2", (_P,)),
    Method("l2-root", "√ℓ2", "L2({p}, root=True, exact_bias=False)", "l2", (_P,), "--"),
    Method("var", "Var", f"Variance({{p}}, {_PAPER})", "var", (_P,)),
    Method("var-root", "√Var", f"Variance({{p}}, root=True, {_PAPER})", "var", (_P,), "--"),
    Method("gsv-root", "√G-SV", "GradientSVD({p}, root=True, exact_bias=False)", "gsv", (_S,),
           "--"),
    Method("control-columns", "control: uniform columns", "ColumnMask({p}, exact_bias=False)",
           "control columns", _EVERY, ":", _FL, control=True),
    # Rows that the last layer drops are zero in every layer below: one mask shared by all.
    Method("control-samples", "control: one sample mask", "SampleMask({p}, exact_bias=False)",
           "control samples", _EVERY, ":", sketched="last", control=True),
    # Not in the paper: rows of G by ‖g_b‖; those that the last layer keeps are kept by all.
    Method("rows", "rows by importance", "Rows({p}, exact_bias=False)", "rows", (_B, _S), "-."),
    Method(EXACT, "baseline", "", "baseline", _EVERY),
)  # fmt: skip
METHODS = {method.name: method for method in _METHODS}


def find_method(name: str) -> Method:
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(str(name), METHODS, n=3, cutoff=0.3)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ExperimentError(f"method {name!r} is unknown; {hint}Known: {', '.join(METHODS)}")


def make_sketch(expression: str) -> AnySketch | None:
    """The sketch of a run's layers; ``None`` for exact ones. Budgets are even, as they were in the
    runs that are stored, unless it says ``share``."""
    if not expression:
        return None
    try:
        sketch = parse_sketch(expression)
    except UsageError as error:
        raise ExperimentError(f"{expression}: {error}") from error
    if isinstance(sketch, Tokens) and "share" not in expression:
        return replace(sketch, share="even")
    return sketch


def layer_sketch(expression: str) -> Sketch | None:
    """The same, for what knows single layers only."""
    sketch = make_sketch(expression)
    if not (sketch is None or isinstance(sketch, Sketch)):
        raise ExperimentError(f"{expression} is for whole blocks; give a sketch of one layer")
    return sketch
