"""A linear layer whose backward multiplies only what is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.compact import InputRowAtoms
from ..core.samples import Samples
from ..core.sampling import Uniforms, draw_uniforms
from ..core.vjp import Vjp
from ..sketches import LayerSketch, Planner, Sketch, Split
from .backward import Form, Method, as_rows, autocast, drawable, records, serving, sketched


def sketched_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sketch: LayerSketch,
    *,
    planner: Planner | None = None,
    samples: Samples | None = None,
    uniforms: Uniforms = draw_uniforms,
) -> Tensor:
    """``F.linear(x, weight, bias)``, with dX and dW from a sketch of the output gradient.

    ``x: [*, d]``, ``weight: [n, d]``, ``bias: [n]``. Or a stack of independent layers, each with
    its own draw: ``weight: [*stack, n, d]``, ``bias: [*stack, n]``, ``x: [*stack, *, d]``.
    Where the sketch would keep everything, or no gradient is wanted, this is ``F.linear`` itself
    and nothing is drawn. ``planner`` makes the atoms, by default they are new in each step; each
    layer needs its own. ``samples``: which rows belong to one sample, for sketches that keep whole
    samples; by default as the sketch reads the shape. Draws come from torch's default generator
    (``uniforms`` replaces it, for tests), in backward. Sketches of rows of x draw in every forward
    pass, also under ``no_grad``, so that both passes of a checkpoint draw alike.

    >>> from sketchprop import L1
    >>> W = torch.randn(64, 784, requires_grad=True)
    >>> sketched_linear(torch.randn(128, 784), W, None, L1(0.1)).sum().backward()
    >>> int((W.grad.abs().sum(1) > 0).sum())  # rows of dW that this draw kept
    6
    """
    x, weight, bias = autocast(x, weight, bias)
    stack = weight.shape[:-2]
    if x.shape[: len(stack)] != stack or x.dim() <= len(stack) or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"x of shape {tuple(x.shape)} does not fit weight of shape {tuple(weight.shape)}: "
            f"x must be [{', '.join([*map(str, stack), '*', str(weight.shape[-1])])}]"
        )
    n, d = weight.shape[-2:]
    rows = x.numel() // max(1, d * stack.numel())
    form = Form(x.shape, stack)
    if not drawable(x, weight) or rows == 0 or sketch.keeps_all(rows, n, d):
        return form.forward(x, weight, bias)
    if torch.compiler.is_compiling():
        planner = None  # a step that is compiled may have no side effects
    if samples is None:
        samples = sketch.samples_of(tuple(x.shape[len(stack) : -1]))
    pair: LayerSketch = sketch
    if isinstance(sketch, Sketch) and "G" not in sketch.sees:
        pair = Split(input=None, weight=sketch)
    rule, kept = drawn_in_forward(sketch), None
    if rule is not None and not rule.keeps_all(rows, n, d):
        with torch.no_grad():
            X = as_rows(x.detach(), stack)
            vjp = Vjp(X[..., :0], None, X, samples)
            plans = serving(planner, rule)
            atoms = rule.atoms(vjp) if plans is None else plans.atoms(rule, vjp)
            assert isinstance(atoms, InputRowAtoms)
            kept = atoms.of_input(X, uniforms)
    if not records(x, weight, bias):
        return form.forward(x, weight, bias)
    if kept is not None and not weight.requires_grad:  # no dW, no rows to save
        assert isinstance(pair, Split)
        if pair.input is None:
            return form.forward(x, weight, bias)
        pair, kept = pair.input, None
    form = Form(x.shape, stack, samples)
    return sketched(x, weight, bias, form, Method(pair, planner, uniforms), kept)


def drawn_in_forward(sketch: object) -> Sketch | None:
    """What of a layer's sketch draws rows of X in forward, if anything does."""
    if isinstance(sketch, Split):
        return sketch.forward
    return sketch if isinstance(sketch, Sketch) and "G" not in sketch.sees else None
