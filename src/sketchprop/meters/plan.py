"""Which layers are worth sketching, by their times on this machine, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.proof import no_gradient_hooks
from ..core.stopwatch import in_turns
from ..core.table import LAYER, Column, Report, Table, words
from ..layers.choose import choose
from ..layers.isolation import twin
from ..layers.select import Filter
from ..layers.transform import exact, sketch_
from ..sketches import AnySketch, Tokens
from .cost.shapes import Use, recorded_uses
from .cost.timing import Times, compare
from .noise.gradients import Loss, scalar_loss
from .restore import check_real, check_sketchable, restored

NOT_TAKEN = "sketch_ does not take it, unless filter_fn says so"
WORTH = 0.9
"""A layer is worth sketching if its backward takes at most this share of the exact time."""


@dataclass(frozen=True)
class LayerPlan:
    """One layer that could be sketched."""

    ANSWERS: ClassVar[tuple[str, ...]] = ("saved_seconds",)

    layer: str
    kind: str
    rows: int
    """Samples × tokens or positions that pass the layer."""
    shape: tuple[int, ...]
    """Outputs × inputs of its largest weight matrix."""
    uses: int
    seconds: float
    """Its exact backward, all uses together."""
    ratio: float | None
    """Sketched over exact time of this layer; ``None`` if the sketch cannot take it."""
    worth: bool
    note: str

    @property
    def saved_seconds(self) -> float:
        return 0.0 if self.ratio is None else self.seconds * (1 - self.ratio)


@dataclass(frozen=True)
class PlanReport(Report):
    """The answer of ``plan``: printable, ``.worthwhile``, ``.as_dict()``."""

    ANSWERS: ClassVar[tuple[str, ...]] = ("backward_ratio",)

    sketch: AnySketch
    backward_seconds: float
    layers: tuple[LayerPlan, ...]

    @property
    def worthwhile(self) -> dict[str, AnySketch]:
        """What to give to ``sketch_``: the layers that get faster, by name."""
        return {line.layer: self.sketch for line in self.layers if line.worth}

    @property
    def backward_ratio(self) -> float:
        """The backward pass with the worthwhile layers sketched, over the exact one."""
        saved = sum(line.saved_seconds for line in self.layers if line.worth)
        return max(0.0, 1 - saved / self.backward_seconds)

    def as_dict(self) -> dict[str, Any]:
        said = {"sketch": repr(self.sketch), "worthwhile": list(self.worthwhile)}
        return {**super().as_dict(), **said}

    def headline(self) -> str:
        """How many layers, and what the backward pass would take."""
        return (
            f"{len(self.worthwhile)} of {len(self.layers)} layers are worth {self.sketch!r}: the "
            f"backward pass ({1e3 * self.backward_seconds:.2f} ms) would take "
            f"{self.backward_ratio:.2f} ×.\n"
            "Faster is not yet better: measure() says whether the added variance is worth it."
        )

    def tables(self) -> list[Table]:
        """A row for each layer."""
        columns = (
            *(LAYER, words("kind"), Column("rows"), words("n × d"), Column("ms", ".3f", scale=1e3)),
            *(Column("of backward", ".1%"), Column("ratio", ".2f")),
            *(Column("saves ms", ".3f", scale=1e3), words("sketch it?")),
        )
        rows = [
            (
                *(line.layer, line.kind + (f" ×{line.uses}" if line.uses > 1 else "")),
                *(line.rows, line.shape, line.seconds, line.seconds / self.backward_seconds),
                *(line.ratio, line.saved_seconds),
                ("yes" if line.worth else "no") + (f": {line.note}" if line.note else ""),
            )
            for line in self.layers
        ]
        return [Table(f"The plan for {self.sketch!r}, layer by layer", columns, rows)]


def plan(
    model: nn.Module,
    loss_fn: Loss,
    batch: Any,
    *,
    sketch: AnySketch | None = None,
    filter_fn: Filter | None = None,
    rounds: int = 7,
) -> PlanReport:
    """Times the backward pass of each layer, exact and sketched, on this machine.

    ``loss_fn(model, batch)`` is that of ``measure``. ``sketch`` is the one to try, by default
    Tokens(0.3). ``worthwhile`` has only layers that ``sketch_(model, sketch, filter_fn)`` takes, so
    by default not the last one.

    Each layer's backward is timed alone, at the shapes that it has in the model, exact and sketched
    in turns, ``rounds`` times. Layers of equal shapes are timed once. The model is left as it was.

        report = plan(model, loss_fn, batch)
        sketch_(model, report.worthwhile)
    """
    sketch = sketch or Tokens(0.3)
    choice = choose(model, sketch, filter_fn)
    layers = {layer: name for name, layer in choice.layers.items()}
    reasons = {name: choice.refused.get(name, NOT_TAKEN) for name in choice.layers}
    reasons |= dict.fromkeys(choice.taken, "")
    check_sketchable(model)
    check_real(model)
    with restored(model), exact(model):
        with recorded_uses(layers) as recorded:
            value = scalar_loss(loss_fn, model, batch)
            uses = list(recorded)
        parameters = [p for p in model.parameters() if p.requires_grad]
        run = partial(torch.autograd.grad, value, parameters, allow_unused=True, retain_graph=True)
        with no_gradient_hooks(parameters):
            backward = median(in_turns([run], rounds, value.device)[0])
        device = value.device
        del value, run
        uses = [use for use in uses if any(product.sides for product in use.products)]
        if not uses:
            raise ValueError("no layer that can be sketched takes part in this backward pass")
        times: dict[object, Times] = {}
        lines = tuple(
            _line([u for u in uses if u.name == name], sketch, reasons[name], rounds, times, device)
            for name in dict.fromkeys(use.name for use in uses)
        )
    return PlanReport(sketch, backward, lines)


def _line(
    uses: list[Use],
    sketch: AnySketch,
    reason: str,
    rounds: int,
    known: dict[object, Times],
    device: torch.device,
) -> LayerPlan:
    """``reason``: why ``sketch_`` does not take it, empty if it does; ``known``: times so far;
    ``device``: that of the loss, for what has no weight."""
    use = uses[0]
    able = reason in ("", NOT_TAKEN)
    key = (type(use.layer), use.products, _signature(use), able)
    if key not in known:
        device = next((p.device for p in use.layer.parameters()), device)
        # What the sketch cannot take is compared with itself.
        actions = [_backward(use, s, device) for s in (None, sketch if able else None)]
        known[key] = compare(*in_turns(actions, rounds, device))
    times = known[key]
    keeps_all = all(sketch.keeps_all(p.B, p.n, p.d) for p in use.products)
    faster = able and not keeps_all and times.ratio <= WORTH
    note = reason
    if able and keeps_all:
        note = "the budget keeps everything"
    elif able and not faster:
        note = "too small to gain" if times.ratio > 1 else "hardly faster"
    largest = max(use.products, key=lambda product: product.n * product.d)
    return LayerPlan(
        layer=use.name,
        kind=type(use.layer).__name__.removeprefix("Sketched"),
        rows=largest.B,
        shape=(largest.n, largest.d),
        uses=len(uses),
        seconds=times.exact * len(uses),
        ratio=times.ratio if able and not keeps_all else None,
        worth=faster and not reason,
        note=note,
    )


def _backward(use: Use, sketch: AnySketch | None, device: torch.device) -> Callable[[], Any]:
    """The backward pass of one layer, at the shapes of ``use``, with a graph that stays."""

    def real(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        filled = empty.normal_() if x.is_floating_point() else empty.zero_()
        return filled.requires_grad_(x.requires_grad)

    args, kwargs = torch.utils._pytree.tree_map(real, (use.args, use.kwargs))
    layer = twin(use.layer)  # without the user's hooks, and with leaves of its own
    if sketch is not None:
        sketch_(layer, sketch, lambda module, name: module is layer)
        layer.sketching.exact = False
    output = layer.forward(*args, **kwargs)
    outputs = [x for x in torch.utils._pytree.tree_leaves(output) if _differentiable(x)]
    given = torch.utils._pytree.tree_leaves((args, kwargs))
    leaves = [x for x in [*given, *layer.parameters()] if _differentiable(x)]
    grads = [torch.randn_like(x) for x in outputs]

    def backward() -> Any:
        return torch.autograd.grad(outputs, leaves, grads, retain_graph=True, allow_unused=True)

    return backward


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _signature(use: Use) -> object:
    leaves = torch.utils._pytree.tree_leaves((use.args, use.kwargs))
    return tuple(
        (tuple(x.shape), x.stride(), x.dtype, x.requires_grad) if isinstance(x, Tensor) else repr(x)
        for x in leaves
    )
