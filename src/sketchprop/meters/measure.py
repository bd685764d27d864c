"""What a sketch costs and what it saves, measured on your model, data and machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import nn

from ..core.table import Cells, table
from ..layers.transform import exact
from ..sketches import Sketch
from .cost.flops import FlopsReport, measure_flops
from .cost.memory import MemoryReport, saved_bytes
from .cost.timing import Times, step_times
from .noise.estimate import Estimate
from .noise.nodes import NodeVariance
from .noise.passes import Loss
from .noise.variance import VarianceReport, measure_variance
from .restore import sketched
from .verdict import Verdict, criterion


@dataclass(frozen=True)
class MeasureReport:
    """The answer of ``measure``: printable, ``.pays``, ``.as_dict()``."""

    variance: VarianceReport
    flops: FlopsReport
    exact_memory: MemoryReport
    sketched_memory: MemoryReport
    times: Times | None
    by_flops: Verdict
    by_time: Verdict | None

    @property
    def sigma2(self) -> Estimate:
        """σ², the variance of the minibatch gradient."""
        return self.variance.sigma2

    @property
    def added(self) -> Estimate:
        """V, the variance that the sketches add."""
        return self.variance.added

    @property
    def relative(self) -> Estimate:
        """V/σ²."""
        return self.variance.relative

    @property
    def nodes(self) -> tuple[NodeVariance, ...]:
        """Prop. 2.2 at each tensor that feeds sketched layers."""
        return self.variance.nodes

    @property
    def verdict(self) -> Verdict:
        """By measured time; by FLOPs where no time was measured."""
        return self.by_time or self.by_flops

    @property
    def pays(self) -> bool:
        """Whether ρ(V)(σ² + V) ≤ ρ(0)σ², by a V that is not merely a lower bound."""
        return self.verdict.pays and self.variance.reliable

    @property
    def equivalent_batch(self) -> float:
        """The share of the batch that, computed exactly, would be as noisy: σ²/(σ² + V).

        The control: dropping samples costs in proportion and breaks even by definition.
        """
        return 1 / (1 + self.relative.value)

    def as_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = plain_data(self)
        return {
            **plain,
            "pays": self.pays,
            "reliable": self.variance.reliable,
            "equivalent_batch": self.equivalent_batch,
            "kept_flops": self.flops.kept,
        }

    def __str__(self) -> str:
        return "\n".join([self.headline(), "", self.layer_table(), "", self.node_table()]).rstrip()

    def headline(self) -> str:
        """The figures that are not per layer, and the verdict."""
        v = self.variance
        lines = [
            f"σ² (between {v.batches} batches)   {v.sigma2}",
            f"V  (added by sketches, {v.draws} draws each)   {v.added}",
            f"V/σ²   {v.relative}   as noisy as {self.equivalent_batch:.3f} of the batch, exact",
            f"backward FLOPs   {self.flops.kept:.3f} of exact, {self.flops.overhead:.3g} of them "
            "not in products",
            f"saved for backward   {self.sketched_memory.total / 1e6:.3f} MB, exact "
            f"{self.exact_memory.total / 1e6:.3f} MB",
        ]
        if self.times is not None:
            lines.append(
                f"step   {1e3 * self.times.sketched:.2f} ms, exact {1e3 * self.times.exact:.2f} ms"
            )
        if not v.reliable:
            lines.append(
                f"NOT RELIABLE: the mean of the draws misses the gradient of {len(v.missed)} "
                f"parameters, {', '.join(list(v.missed)[:3])}, … Either a sketch is biased (see "
                "check), or V comes from draws too rare to be met and is larger than shown"
            )
        lines += [str(verdict) for verdict in (self.by_time, self.by_flops) if verdict is not None]
        return "\n".join(lines)

    def layer_cells(self) -> Cells:
        """A line for each sketched layer: header and cells."""
        flops = {line.layer: line.sketched / max(1, line.exact) for line in self.flops.layers}
        memory = {line.layer: line for line in self.sketched_memory.layers}
        total = self.added.value
        header = ("layer", "sketch", "V injected", "share", "V/σ²", "FLOPs", "saved kB", "shared")
        rows = []
        for line in self.variance.layers:
            saved = memory.get(line.layer)
            rows.append(
                (
                    line.layer or "(model)",
                    line.sketch,
                    str(line.injected),
                    f"{line.injected.value / total:.3f}" if total else "-",
                    str(line.relative),
                    f"{flops.get(line.layer, math.nan):.3f}",
                    "" if saved is None else f"{saved.saved / 1e3:.1f}",
                    "" if saved is None or not saved.saved else f"{saved.shared / saved.saved:.2f}",
                )
            )
        return header, rows

    def layer_table(self) -> str:
        header, rows = self.layer_cells()
        return table(header, rows, "<<>>>>>>") if rows else ""

    def node_cells(self) -> Cells:
        """Prop. 2.2, a line for each node: header and cells."""
        header = ("node", "variance", "local", "propagated", "remainder")
        rows = [
            (
                node.node,
                *map(str, (s.total, s.local, s.propagated)),
                f"{s.remainder.value:.1e} ± {s.remainder.draw_error:.1e}",
            )
            for node in self.nodes
            for s in (node.samples,)
        ]
        return header, rows

    def node_table(self) -> str:
        header, rows = self.node_cells()
        return table(header, rows, "<>>>>") if rows else ""


def measure(
    model: nn.Module,
    loss_fn: Loss,
    batches: Iterable[Any],
    sketch: Sketch | Mapping[str, Sketch | None] | None = None,
    *,
    draws: int | None = None,
    split: bool = True,
    nodes: bool = True,
    rounds: int = 7,
    times: Times | tuple[float, float] | None = None,
    overhead: float = 0.0,
    seed: int = 0,
) -> MeasureReport:
    """Measures σ², V and their origin, FLOPs, saved bytes and step times, and gives the verdict.

    ``loss_fn(model, batch)`` returns the scalar loss of a training step; ``batches`` are at least
    two, better eight, as training draws them. ``sketch`` is tried as ``sketch_`` would apply it
    and taken off again; ``None`` measures the sketches that the model has.

    σ² = E‖g - ∇F‖² over batches, V = E‖ĝ - g‖² over draws, split by the layer that injected it
    (``split``; see ``sketchprop.meters.noise.variance``) and at each node by Prop. 2.2
    (``nodes``). Sketching pays if ρ(V)(σ² + V) ≤ ρ(0)σ²: the verdict, by time and by FLOPs.
    ``draws`` for each batch; ``None`` lets a pilot choose. ``rounds`` of exact and sketched steps
    are timed in turns (0: none); ``times=(exact, sketched)`` are seconds measured elsewhere;
    ``overhead``: seconds of a step that are not in ``loss_fn`` and backward (optimizer, data).

    Costs about draws × batches × (sketched layers) steps; without ``split`` draws × batches.
    Parameters, ``.grad``, buffers, flags, sketches and the random state are left as they were,
    also when ``loss_fn`` raises.

        report = measure(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batches, L1(0.1))
        print(report)
    """
    batches = list(batches)
    if isinstance(times, tuple):
        times = Times.given(*times)
    with sketched(model, sketch):
        variance = measure_variance(
            model, loss_fn, batches, draws=draws, split=split, nodes=nodes, seed=seed
        )
        flops = measure_flops(model, loss_fn, batches[0])
        with exact(model):
            exact_memory = saved_bytes(model, loss_fn, batches[0])
        sketched_memory = saved_bytes(model, loss_fn, batches[0])
        if times is None and rounds:
            times = step_times(model, loss_fn, batches[0], rounds)
    if times is not None:
        times = times.with_overhead(overhead)
    relative = variance.relative
    return MeasureReport(
        variance=variance,
        flops=flops,
        exact_memory=exact_memory,
        sketched_memory=sketched_memory,
        times=times,
        by_flops=criterion(relative, flops.step_ratio, basis="FLOPs"),
        by_time=None if times is None else criterion(relative, times.ratio, times.ratio_error),
    )


def plain_data(value: Any) -> Any:
    """Reports as dicts, lists and numbers that JSON knows; what is not finite becomes None."""
    if hasattr(value, "as_dict") and not isinstance(value, MeasureReport):
        return plain_data(value.as_dict())
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_data(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
