"""What a sketch costs and what it saves, measured on your model, data and machine.

Does it pay? ρ(V)(‖g‖² + σ² + V) ≤ ρ(0)(‖g‖² + σ²). The paper's criterion, ρ(V)(σ² + V) ≤ ρ(0)σ², is
its limit for a mean gradient g of zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, ClassVar

from torch import nn

from ..core.random import random_state_kept
from ..core.table import LAYER, Column, Report, Table, words
from ..layers.transform import exact
from ..sketches import AnySketch, Planner
from .cost.flops import FlopsReport, measure_flops
from .cost.memory import MemoryReport, saved_bytes
from .cost.timing import Times, seconds_of_a_pass, step_times
from .noise.amplification import Edge, measure_edges
from .noise.estimate import Estimate
from .noise.gradients import Loss, settle
from .noise.pace import DROWNED
from .noise.variance import Progress, VarianceReport, measure_variance
from .restore import check_minutes, check_model, restored
from .words import amount, change_in_words, ratio, with_error

LEAST_BESIDE = 9
"""Passes of ``measure`` beside a draw for each batch: FLOPs, bytes, two rounds of times."""


@dataclass(frozen=True)
class Verdict:
    """The change of the cost to a given accuracy: SGD needs ∝ ‖g‖² + σ² + V steps of cost ρ."""

    ANSWERS: ClassVar[tuple[str, ...]] = ("pays", "certain")

    basis: str
    """What ρ is: "time" or "FLOPs"."""
    cost: float
    """ρ(V)/ρ(0): a sketched step over an exact one."""
    steps: float
    """(‖g‖² + σ² + V)/(‖g‖² + σ²): how many times the steps."""
    change: float
    """Their product: below 1 sketching pays, 0.8 means a fifth less to the same accuracy."""
    error: float
    """Its standard error."""

    @property
    def pays(self) -> bool:
        return self.change <= 1

    @property
    def certain(self) -> bool:
        """Whether the change differs from 1 by more than two standard errors."""
        return abs(self.change - 1) > 2 * self.error


def criterion(
    relative: Estimate,
    cost: float,
    cost_error: float = 0.0,
    basis: str = "time",
    signal: float = 0.0,
) -> Verdict:
    """The verdict for V/σ², the cost ratio ρ(V)/ρ(0) and ``signal``, ‖g‖²/σ².

    Errors are propagated to first order; that of ``signal`` is not in them.

    >>> criterion(Estimate(0.5, 0.0), 0.6).pays
    True
    >>> criterion(Estimate(0.5, 0.0), 0.7).pays
    False
    >>> criterion(Estimate(0.5, 0.0), 0.7, signal=1.0).pays
    True
    """
    steps = 1 + relative.value / (1 + signal)
    error = math.hypot(cost * relative.error / (1 + signal), steps * cost_error)
    return Verdict(basis, cost, steps, cost * steps, error)


@dataclass(frozen=True)
class MeasureReport(Report):
    """The answer of ``measure``: printable, ``.pays``, ``.as_dict()``."""

    ANSWERS: ClassVar[tuple[str, ...]] = ("pays", "reliable", "equivalent_batch")

    variance: VarianceReport
    flops: FlopsReport
    exact_memory: MemoryReport
    sketched_memory: MemoryReport
    times: Times | None
    by_flops: Verdict
    by_time: Verdict | None
    edges: tuple[Edge, ...] = ()

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
    def verdict(self) -> Verdict:
        """By measured time; by FLOPs where no time was measured."""
        return self.by_time or self.by_flops

    @property
    def pays(self) -> bool:
        """Whether V is reliable and ρ(V)(‖g‖² + σ² + V) ≤ ρ(0)(‖g‖² + σ²)."""
        return self.verdict.pays and self.reliable

    @property
    def reliable(self) -> bool:
        """Whether V is known, and not only a lower bound of it."""
        return self.variance.reliable

    @property
    def equivalent_batch(self) -> float:
        """The share of the batch whose exact gradient would be as noisy: σ²/(σ² + V).

        This is the baseline: a smaller batch costs in proportion and breaks even by definition.
        """
        return 1 / (1 + self.relative.value)

    def answer(self) -> tuple[str, str]:
        """ "yes", "no" or "open", and the same in a few words."""
        verdict = self.verdict
        if not self.reliable:
            if verdict.pays:
                return "open", "Not known: there may be more noise than was measured."
            return "no", "No: it does not pay, and there may be more noise than was measured."
        if not (verdict.certain or verdict.cost == verdict.change == 1):
            if math.isfinite(verdict.error):
                return "open", "Too close to call."
            tendency = "It pays" if verdict.pays else "It does not pay"
            return "open", f"{tendency}, as far as two batches can tell."
        if verdict.pays:
            return "yes", "Yes: it pays."
        drowned = ", the noise drowns the gradient" if verdict.steps > 1 + DROWNED else ""
        return "no", f"No: it does not pay{drowned}."

    def explanation(self) -> list[str]:
        """Sentences below the answer: cost, noise, both together; what to doubt; by FLOPs."""
        verdict = self.verdict
        what = "time" if verdict.basis == "time" else "work (FLOPs)"
        sentences = [
            f"A sketched step takes {ratio(verdict.cost)} the {what} of an exact one. Its gradient "
            f"has {ratio(verdict.steps)} the mean square, so that SGD needs that many times the "
            f"steps. Together {with_error(verdict.change, verdict.error)}: "
            f"{change_in_words(verdict.change, what)} to the same accuracy."
        ]
        if self.reliable and not verdict.certain:
            sentences.append(
                "That is within two standard errors of no change: give more batches, draws and "
                "rounds."
                if math.isfinite(verdict.error)
                else "Two batches cannot show the error of this number: give more."
            )
        missed = list(self.variance.missed)
        if missed:
            more = ", …" if len(missed) > 3 else ""
            noun = "parameter" if len(missed) == 1 else "parameters"
            sentences.append(
                f"NOT RELIABLE: the mean of the draws misses the exact gradient of {len(missed)} "
                f"{noun} ({', '.join(missed[:3])}{more}). Either a sketch is biased (test it with "
                "check_unbiased), or most of V comes from rare draws that did not occur: then V "
                "is larger than shown."
            )
        if self.by_time is not None:
            counted = "it pays" if self.by_flops.pays else "it does not pay"
            change = with_error(self.by_flops.change, self.by_flops.error)
            sentences.append(f"Counted in FLOPs instead of time {counted}: {change}.")
        return sentences

    def headline(self) -> str:
        return "\n".join([self.answer()[1], *self.explanation()])

    def tables(self) -> list[Table]:
        tables = [self.figures(), self.noise_by_layer()]
        return [*tables, self.noise_by_edge()] if self.edges else tables

    def figures(self) -> Table:
        """What a sketched step is over an exact one: time, memory, variance, FLOPs, all in all."""
        verdict, flops = self.verdict, self.flops
        before, after = self.exact_memory.total, self.sketched_memory.total

        def against(sketched: float, exact: float, unit: str) -> str:
            return f"{amount(sketched, unit)}, exact {amount(exact, unit)}"

        noise = f"V/σ² = {self.relative}, ‖g‖²/σ² = {self.variance.relative_signal:.3g}"
        counted = against(flops.sketched_backward, flops.exact_backward, "")
        rows = [
            ("saved for backward", ratio(after / max(1, before)), against(after, before, "B")),
            ("gradient's mean square", ratio(verdict.steps), noise),
            ("backward FLOPs", ratio(flops.kept), counted),
            (f"in all, by {verdict.basis}", ratio(verdict.change), "below 1 it pays"),
        ]
        if self.times is not None:
            seconds = against(self.times.sketched, self.times.exact, "s")
            rows.insert(0, ("time of a step", ratio(self.times.ratio), seconds))
        columns = (words("a sketched step"), Column("over exact"), words("namely"))
        return Table("In short", columns, rows)

    def noise_by_layer(self) -> Table:
        """V by the layer that injected it, and V of its own parameters over their σ²; no rows if
        it was not split."""
        lines, total = self.variance.layers, self.added.value
        felt = {each.layer: each.relative for each in self.variance.felt}
        columns = (
            *(LAYER, Column("V injected"), Column("share", ".3f"), Column("V/σ²")),
            *(Column("felt: V/σ² of its own"), words("sketch")),
        )
        rows = [
            (
                *(line.layer, line.injected, line.injected.value / total if total else None),
                *(line.relative, felt.get(line.layer), line.sketch),
            )
            for line in lines
        ]
        note = (
            f"V = {self.added} ({self.variance.draws} draws for each batch) against σ² = "
            f"{self.sigma2} (between {self.variance.batches} batches); as noisy as "
            f"{self.equivalent_batch:.3g} of the batch, computed exactly. The parts add up to V."
        )
        if total and len(lines) > 1:
            worst = max(lines, key=lambda line: line.injected.value)
            share = 100 * worst.injected.value / total
            note += f" Layer {LAYER.write(worst.layer)} adds most, {share:.0f} % of it."
        if worst_felt := self.variance.worst:
            # Adam moves each layer by its own scale: what drowns in one is lost.
            name = LAYER.write(worst_felt.layer)
            note += f" Relative to its own σ², {name} is noisiest: V/σ² = {worst_felt.relative}."
        title = "Where the noise is made: V by the layer that injected it"
        return Table(title, columns, rows, note)

    def noise_by_edge(self) -> Table:
        """What each layer or block makes of the noise that arrives; no rows without ``edges``."""
        numbers = ("at_output", "at_input", "with_draw", "factor", "noise_gain", "bound")
        rows = [(e.name, *(getattr(e, name) or None for name in numbers)) for e in self.edges]
        note = (
            "E‖ĝ - g‖²/‖g‖² at the output; at the input, through the exact Jacobian J; there with "
            "its own draw. factor: input over output; noise gain: what J multiplies noise by; "
            "bound: ‖J‖²."
        )
        columns = (LAYER, *(Column(name.replace("_", " "), ".3g") for name in numbers))
        return Table("Dampened or amplified: noise over gradient", columns, rows, note)


def measure(
    model: nn.Module,
    loss_fn: Loss,
    batches: Iterable[Any],
    sketch: AnySketch | Mapping[str, AnySketch | None] | None = None,
    *,
    planner: Planner | None = None,
    draws: int | None = None,
    split: bool = True,
    rounds: int = 7,
    edges: bool | Sequence[str] = False,
    seed: int = 0,
    minutes: float | None = None,
    progress: Progress | None = None,
) -> MeasureReport:
    """Says whether a sketch pays: it measures σ², V, FLOPs, saved bytes and step times.

    ``loss_fn(model, batch)`` returns the scalar loss of a training step. ``batches`` are at least
    two, better eight, as training draws them. ``sketch`` (with ``planner``) is applied as
    ``sketch_`` would do it and taken off again; ``None`` measures the sketches that the model has.

    σ² = E‖g - ∇F‖² is the variance over batches, V = E‖ĝ - g‖² that over draws. ``split`` says
    how much of V each layer adds (``sketchprop.meters.noise.variance``). Sketching pays, by time
    or by FLOPs, if ρ(V)(‖g‖² + σ² + V) ≤ ρ(0)(‖g‖² + σ²), g the mean gradient, ρ the cost per step.
    ``draws``: per batch; ``None`` chooses the number by a pilot. ``rounds``: how often exact and
    sketched steps are timed, in turns, without optimizer and data; 0: no timing. For your own
    timings use ``meters.criterion`` with the report's ``relative``.

    ``edges=True`` or names of modules: whether each sketched layer or block, or each named module,
    dampens or amplifies noise, with the bound by operator norms. It uses two batches, in addition
    to ``minutes``.
    It costs about draws × batches × (sketched layers) steps; without ``split`` draws × batches.
    ``minutes``: a time limit, about; it makes fewer draws for it, or leaves out the split.
    ``progress`` is called with the share of the work that is done. ``seed``: of the draws.
    Parameters, ``.grad``, buffers, flags, sketches and the random state are left as they were,
    also when ``loss_fn`` raises and after Ctrl-C.

        report = measure(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batches, Tokens(0.3))
        print(report)
    """
    with random_state_kept():  # a loader that shuffles draws
        batches = list(batches)
    if minutes is not None:
        check_minutes(minutes, 2)
    end = math.inf if minutes is None else monotonic() + 60 * minutes
    with restored(model, sketch, planner) as buffers:
        if minutes is not None:
            _check_time(model, loss_fn, batches, minutes)
            buffers.restore()
        if batches:
            settle(model, loss_fn, batches[0])
            buffers.restore()
        variance = measure_variance(
            model,
            loss_fn,
            batches,
            draws=draws,
            split=split,
            seed=seed,
            # The rest of the time is for FLOPs, bytes and times.
            seconds=0.8 * (end - monotonic()),
            progress=progress,
        )
        flops = measure_flops(model, loss_fn, batches[0])
        with exact(model):
            exact_memory = saved_bytes(model, loss_fn, batches[0])
        sketched_memory = saved_bytes(model, loss_fn, batches[0])
        names = () if isinstance(edges, bool) else edges
        found = measure_edges(model, loss_fn, batches[:2], names, seed=seed) if edges else ()
        times = by_time = None
        if rounds:
            least = rounds if minutes is None else min(rounds, 2)
            remaining = max(0.0, end - monotonic())
            times = step_times(model, loss_fn, batches[0], (least, rounds), remaining)
    relative, signal = variance.relative, variance.relative_signal
    if times is not None:
        by_time = criterion(relative, times.ratio, times.ratio_error, signal=signal)
    return MeasureReport(
        variance=variance,
        flops=flops,
        exact_memory=exact_memory,
        sketched_memory=sketched_memory,
        times=times,
        by_flops=criterion(relative, flops.step_ratio, basis="FLOPs", signal=signal),
        by_time=by_time,
        edges=found,
    )


def _check_time(model: nn.Module, loss_fn: Loss, batches: Sequence[Any], minutes: float) -> None:
    """Whether there is time for a draw on each batch, and for two rounds of times."""
    if not batches:
        return  # said elsewhere
    check_model(model)
    a_pass = seconds_of_a_pass(model, loss_fn, batches[0])
    needed = (2 * len(batches) + LEAST_BESIDE) * a_pass
    if needed > 60 * minutes:
        raise ValueError(
            f"minutes={minutes:g} is too short: one pass takes {a_pass:.2g} s; give at least "
            f"minutes={needed / 30:.2g}, or fewer batches"
        )
