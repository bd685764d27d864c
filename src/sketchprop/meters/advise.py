"""What to type: candidates that fit a model, measured on it, and the one that pays, if any."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean, stdev
from time import monotonic
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..core.stopwatch import in_turns, synchronise
from ..core.table import Column, Table, as_text, words
from ..layers.isolation import no_gradient_hooks
from ..layers.select import blocks_of, everything
from ..layers.transform import sketch_, unsketch_
from ..sketches import L1, AnySketch, Rows, Tokens
from .cost.memory import bytes_of
from .cost.timing import compare, times_of
from .measure import plain_data
from .noise.metric import adaptive, ready, weighted, weights
from .noise.passes import Gradients, Loss, scalar_loss, squared_norm
from .noise.passes import seed as seed_generators
from .noise.variance import Progress, visible_distance
from .restore import Buffers, restored, tensors_in
from .words import change_in_words, ratio, with_error

MOST_BATCHES = 8
NOISE_BATCHES = 3
MOST_DRAWS = 4
MOST_ROUNDS = 9
LEAST_PASSES = 14
"""Passes without which a candidate is not tried: noise on two batches, two rounds of times."""
MARGIN = 0.02
"""What a change has to gain at least, so that it is advised."""
DROWNED = 1 / 3
"""V over ‖g‖² + σ² from which on training is known to stall."""

LABELS = 0.3
"""Noise over that of fewer labels, from which on each token seems to have its own."""

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Option:
    """One candidate and what was measured; over an exact step with the whole batch."""

    name: str
    line: str
    """What to paste; empty for the smaller batch."""
    time: float | None = None
    """ρ: the time of a step."""
    noise: float | None = None
    """V/(‖g‖² + σ²)."""
    change: float | None = None
    """ρ(‖g‖² + σ² + V)/(‖g‖² + σ²): the predicted time to equal quality."""
    error: float = math.inf
    memory: float | None = None
    """Bytes saved for backward."""
    note: str = ""

    @property
    def sound(self) -> bool:
        """Whether it was measured, and its noise does not drown the gradient."""
        return self.change is not None and self.noise is not None and self.noise <= DROWNED


@dataclass(frozen=True)
class Advice:
    """The answer of ``advise``: printable, ``.pays``, ``.line``, ``.reason``, ``.apply_()``."""

    options: tuple[Option, ...]
    control: Option | None
    """Half of the batch, exact; ``None`` if the batch cannot be cut."""
    signal: float
    """‖g‖²/σ²."""
    batches: int
    seconds: float
    warnings: tuple[str, ...]
    sketches: dict[str, tuple[AnySketch, bool]]
    """By the option's name: the sketch, and whether the last layer is taken too."""

    @property
    def best(self) -> Option | None:
        """The sound option with the least change."""
        sound = [option for option in self.options if option.sound]
        return min(sound, key=_change) if sound else None

    @property
    def pays(self) -> bool:
        best = self.best
        if best is None or _change(best) > 1 - max(MARGIN, best.error):
            return False
        return not self._half_is_better

    @property
    def _half_is_better(self) -> bool:
        """Whether half of the batch is ahead of the best option by two standard errors."""
        best, control = self.best, self.control
        if best is None or control is None:
            return False
        ahead = _change(best) - _change(control)
        return ahead > 2 * math.hypot(best.error, control.error)

    @property
    def change(self) -> float:
        """The predicted time to equal quality over that of exact steps; 1 for 'stay exact'."""
        return _change(self.best) if self.best is not None and self.pays else 1.0

    @property
    def line(self) -> str:
        """What to paste; empty for 'stay exact'."""
        return self.best.line if self.best is not None and self.pays else ""

    @property
    def reason(self) -> str:
        best = self.best
        tried = [option for option in self.options if option.time is not None]
        if all((option.time or 1.0) > 1 - MARGIN for option in tried):
            fastest = min(tried, key=lambda option: option.time or 1.0)
            return (
                f"nothing makes a step faster here, as where layers are small; {fastest.name} "
                f"comes closest with {ratio(fastest.time or 1.0)} the time"
            )
        if best is None:
            calmest = min(tried, key=lambda option: option.noise or 0.0)
            return (
                f"the noise of each drowns the gradient; the calmest, {calmest.name}, adds "
                f"{ratio(calmest.noise or 0.0)} its square"
            )
        numbers = (
            f"a step with {best.name} takes {ratio(best.time or 1.0)} the time and "
            f"{ratio(1 + (best.noise or 0.0))} the steps are needed, together "
            f"{with_error(_change(best), best.error)}"
        )
        if self.pays:
            return numbers
        if self._half_is_better and self.control is not None:
            change = with_error(_change(self.control), self.control.error)
            return f"half of the batch, exact, does more, {change}; {numbers}"
        return f"what is saved is not worth the noise, or too close to call; {numbers}"

    def apply_(self, model: Model) -> Model:
        """Sketches ``model`` as advised, in place; leaves it as it is for 'stay exact'."""
        if self.best is not None and self.pays:
            sketch, last = self.sketches[self.best.name]
            sketch_(model, sketch, everything if last else None)
        return model

    def as_dict(self) -> dict[str, Any]:
        answer = {name: getattr(self, name) for name in ("pays", "change", "line", "reason")}
        measured = {name: getattr(self, name) for name in ("signal", "batches", "seconds")}
        options = [plain_data(option) for option in self.options]
        control = plain_data(self.control)
        rest = {"options": options, "control": control, "warnings": list(self.warnings)}
        data: dict[str, Any] = plain_data({**answer, **measured, **rest})
        return data

    def headline(self) -> str:
        if self.pays:
            first = f"It pays: {change_in_words(self.change, 'time')} to the same quality."
            lines = [first, "", f"    {self.line}", "", f"Why: {self.reason}."]
        else:
            lines = ["Stay exact: no sketch pays here.", "", f"Why: {self.reason}."]
        return "\n".join([*lines, *(f"Note: {text}." for text in self.warnings)])

    def tables(self) -> list[Table]:
        columns = (
            *(words("tried"), Column("time", ".3f"), Column("V/(‖g‖²+σ²)", ".3g")),
            *(Column("in all", ".3f"), Column("±", ".2g"), Column("memory", ".3f"), words("note")),
        )
        shown = [*self.options, *([] if self.control is None else [self.control])]
        rows = [
            (o.name, o.time, o.noise, o.change, _finite(o.error), o.memory, o.note) for o in shown
        ]
        note = (
            "Over exact steps: time of a step, noise that is added, time to the same quality, "
            f"bytes saved for backward. {self.batches} batches, {self.seconds:.0f} s; "
            f"‖g‖²/σ² = {self.signal:.3g}."
        )
        return [Table("Candidates", columns, rows, note)]

    def __str__(self) -> str:
        return as_text(self)


def advise(
    model: nn.Module,
    loss_fn: Loss,
    batches: Iterable[Any],
    *,
    optimizer: Any = None,
    minutes: float = 2,
    progress: Progress | None = None,
    seed: int = 0,
) -> Advice:
    """Says what to type for this model, this loss and this machine, or to stay exact, and why.

    Tries the sketches that fit: kept tokens where blocks are known, rows by token, whole samples,
    columns; and half of the batch as the control. For each the time of a step (in turns with
    exact ones) and the noise that it adds, in about ``minutes``. What counts is the time to equal
    quality over exact: ρ(‖g‖² + σ² + V)/(‖g‖² + σ²).

    ``batches``: at least two, better eight, of a list or a loader; no more are taken.
    ``optimizer``: noise as it sees it, divided by √v̂ + ε with Adam. Ask after some hundred steps
    of training, not at the first: noise grows. ``progress`` is told the share that is done.
    The model, gradients, buffers, optimizer and random state are left as they were.

        advice = advise(model, loss_fn, loader, optimizer=optimizer)
        print(advice)
        advice.apply_(model)
    """
    start = monotonic()
    taken = _check(model, batches, minutes)
    end = start + 60 * minutes
    with restored(model) as buffers:
        unsketch_(model)
        found = _candidates(model)
        a_pass = _seconds_of_a_pass(model, loss_fn, taken[0])
        needed = (LEAST_PASSES + len(taken)) * a_pass
        if monotonic() + needed > end:
            raise ValueError(
                f"minutes={minutes:g} is too short: one pass takes {a_pass:.2g} s; give at least "
                f"minutes={needed / 30:.2g}, better {len(found.tried) * needed / 60:.2g}"
            )
        meter = _Meter(model, loss_fn, taken, optimizer, seed, a_pass)
        buffers.restore()
        options: list[Option] = []
        for i, option in enumerate(found.tried):
            left = len(found.tried) - i + 1
            options.append(meter.measured(option, found.sketches, (end - monotonic()) / left))
            if progress is not None:
                progress((i + 1) / (len(found.tried) + 1))
        control = meter.half(end - monotonic())
        if progress is not None:
            progress(1.0)
    if all(option.change is None for option in options):
        raise ValueError(f"nothing could be tried; {options[0].name}: {options[0].note}")
    return Advice(
        options=tuple(options),
        control=control,
        signal=meter.signal,
        batches=len(taken),
        seconds=monotonic() - start,
        warnings=(*found.warnings, *_warnings(options, meter.signal, optimizer, found.sketches)),
        sketches=found.sketches,
    )


@dataclass(frozen=True)
class _Found:
    tried: list[Option]
    sketches: dict[str, tuple[AnySketch, bool]]
    warnings: tuple[str, ...]


def _candidates(model: nn.Module) -> _Found:
    """What fits the model, the most promising first."""
    sketches: list[tuple[AnySketch, bool]] = []
    warnings: tuple[str, ...] = ()
    mixing = [m for m in model.modules() if _mixes(m)]
    if blocks_of(model):
        sketches += [(Tokens(p), False) for p in (0.3, 0.5, 0.2)]
    if mixing:
        warnings = (
            f"{type(mixing[0]).__name__} in training mode mixes samples: sketches by rows were "
            "not tried, they can ruin such a network",
        )
    else:
        sketches += [(Rows(0.3), False), (Rows(0.3, unit="sample"), True)]
    sketches.append((L1(0.3), False))
    by_name = {repr(sketch): (sketch, last) for sketch, last in sketches}
    return _Found([Option(name, _line(*s)) for name, s in by_name.items()], by_name, warnings)


def _line(sketch: AnySketch, last: bool) -> str:
    return f"sp.sketch_(model, sp.{sketch!r}{', sp.select.everything' if last else ''})"


def _mixes(module: nn.Module) -> bool:
    batch_norm = nn.modules.batchnorm._BatchNorm
    return isinstance(module, batch_norm) and module.training


class _Meter:
    """Times and noise of candidates, inside ``restored``."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        batches: Sequence[Any],
        optimizer: Any,
        seed_: int,
        a_pass: float,
    ) -> None:
        self.model, self.loss_fn, self.batches = model, loss_fn, batches
        self.seed, self.a_pass = seed_, a_pass
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.factors = weights(optimizer, self.parameters)
        self.bytes = bytes_of(model, loss_fn, batches[0]).total
        self.total, self.sigma2 = self._of_batches()
        if not 0 < self.total < math.inf:
            raise ValueError("the gradient is zero, or not finite, on these batches")

    @property
    def signal(self) -> float:
        """‖g‖²/σ²."""
        return max(0.0, self.total - self.sigma2) / self.sigma2 if self.sigma2 else math.inf

    def _of_batches(self) -> tuple[float, float]:
        """‖g‖² + σ², the mean of ‖g_k‖², and σ² = (Σ‖g_k‖² - M‖ḡ‖²)/(M - 1)."""
        count = len(self.batches)
        mean: list[Tensor] = []
        norms = []
        for batch in self.batches:
            seed_generators(self.parameters[0].device, self.seed)
            loss = scalar_loss(self.loss_fn, self.model, batch)
            found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
            pairs = zip(found, self.parameters, strict=True)
            g = weighted([torch.zeros_like(p) if x is None else x for x, p in pairs], self.factors)
            norms.append(math.fsum(map(squared_norm, g)))
            mean = (
                [x / count + y for x, y in zip(g, mean, strict=True)]
                if mean
                else [x / count for x in g]
            )
        of_mean = math.fsum(map(squared_norm, mean))
        sigma2 = (math.fsum(norms) - count * of_mean) / (count - 1)
        return fmean(norms), max(0.0, sigma2)

    def measured(
        self, option: Option, sketches: dict[str, tuple[AnySketch, bool]], seconds: float
    ) -> Option:
        """The option with its time, noise and bytes, in about so many ``seconds``."""
        if seconds < LEAST_PASSES * self.a_pass:
            return replace(option, note="not tried: the time was used up")
        sketch, last = sketches[option.name]
        begin = monotonic()
        with restored(self.model) as buffers:
            try:
                sketch_(self.model, sketch, everything if last else None)
            except ValueError as error:
                return replace(option, note=f"does not fit: {error}")
            added = self._added(buffers, seconds / self.a_pass)
            buffers.restore()
            saved = bytes_of(self.model, self.loss_fn, self.batches[0]).total
            left = max(0.0, seconds - (monotonic() - begin))
            times = times_of(self.model, self.loss_fn, self.batches[0], (2, MOST_ROUNDS), left)
        noise = fmean(added)
        if not math.isfinite(noise):
            return replace(option, note="its gradient is not finite")
        spread = stdev(added) / math.sqrt(len(added))
        return replace(
            option,
            time=times.ratio,
            noise=noise,
            change=times.ratio * (1 + noise),
            error=math.hypot(times.ratio * spread, (1 + noise) * times.ratio_error),
            memory=saved / max(1, self.bytes),
            note="its noise drowns the gradient" if noise > DROWNED else "",
        )

    def _added(self, buffers: Buffers, passes: float) -> list[float]:
        """‖ĝ - g‖²/(‖g‖² + σ²) of some draws on some batches; half of the passes at most."""
        gradients = Gradients(self.model, self.loss_fn, buffers, self.seed)
        batches = self.batches[:NOISE_BATCHES] if passes > 2 * LEAST_PASSES else self.batches[:2]
        draws = max(1, min(MOST_DRAWS, int(passes / 2 / len(batches)) - 1))
        added = []
        with gradients.switch.installed():
            for batch in batches:
                exact = weighted(gradients.exact(batch), self.factors)
                for draw in range(draws):
                    drawn = weighted(gradients.sketched(batch, draw), self.factors)
                    added.append(visible_distance(drawn, exact) / self.total)
        return added

    def half(self, seconds: float) -> Option | None:
        """Half of the batch, exact: σ² doubles. ``None`` where the batch cannot be cut."""
        whole = self.batches[0]
        part = _halved(whole)
        if part is None or seconds < 0:
            return None

        def step(batch: Any) -> None:
            loss = scalar_loss(self.loss_fn, self.model, batch)
            torch.autograd.grad(loss, self.parameters, allow_unused=True)

        device = self.parameters[0].device
        actions = [lambda: step(whole), lambda: step(part)]
        try:
            with no_gradient_hooks(self.parameters):
                times = compare(*in_turns(actions, (2, MOST_ROUNDS), device, seconds))
        except (RuntimeError, ValueError, IndexError, TypeError):
            return None  # a batch that means something as a whole
        noise = self.sigma2 / self.total
        change, error = times.ratio * (1 + noise), (1 + noise) * times.ratio_error
        note = "the control: exact gradients of fewer samples"
        return Option("half of the batch", "", times.ratio, noise, change, error, note=note)


def _check(model: nn.Module, batches: Iterable[Any], minutes: float) -> list[Any]:
    if isinstance(minutes, bool) or not minutes > 0:
        raise ValueError(f"minutes={minutes!r} is no time; give for example minutes=2")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(
            f"{type(model).__name__} has no parameter that requires a gradient; unfreeze one"
        )
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is on the meta device, where nothing can be measured; load "
            "its weights first, or model.to_empty(device='cpu')"
        )
    taken = list(islice(iter(batches), MOST_BATCHES))
    different = list({tuple(map(id, tree_leaves(batch))): batch for batch in taken}.values())
    if len(different) < 2:
        raise ValueError(
            f"{len(different)} different batches were given; σ² is the variance between batches: "
            f"give at least two, better {MOST_BATCHES}, as training draws them"
        )
    return different


def _seconds_of_a_pass(model: nn.Module, loss_fn: Loss, batch: Any) -> float:
    """Forward and backward, the fastest of three: the first ones warm up."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    seconds = math.inf
    for _ in range(3):
        begin = monotonic()
        loss = scalar_loss(loss_fn, model, batch)
        torch.autograd.grad(loss, parameters, allow_unused=True)
        synchronise(parameters[0].device)
        seconds = min(seconds, monotonic() - begin)
    return max(seconds, 1e-6)


def _halved(batch: Any) -> Any:
    """The first half of the samples, by the first dimension of the first tensor."""
    sizes = [t.shape[0] for t in tensors_in(batch) if t.dim()]
    if not sizes or sizes[0] < 2:
        return None

    def cut(leaf: Any) -> Any:
        mine = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == sizes[0]
        return leaf[: sizes[0] // 2] if mine else leaf

    return tree_map(cut, batch)


def _warnings(
    options: Sequence[Option],
    signal: float,
    optimizer: Any,
    sketches: dict[str, tuple[AnySketch, bool]],
) -> list[str]:
    found = []
    for option in options:
        sketch, _ = sketches[option.name]
        if not isinstance(sketch, Tokens) or option.noise is None:
            continue
        # A smaller batch of labels has σ²(1/p - 1) more.
        if option.noise * (1 + signal) > LABELS * (1 / sketch.budget - 1):
            found.append(
                f"dropping tokens ({option.name}) adds noise as dropping their labels would: "
                "a loss for each token is best left exact"
            )
            break
    if optimizer is not None and adaptive(optimizer) and not ready(optimizer):
        found.append(
            "the optimizer has no state yet, so that noise was measured as SGD sees it; ask again "
            "after some hundred steps"
        )
    if any(option.sound and (option.noise or 0.0) > 0.1 for option in options):
        found.append("gradient clipping is not seen: noise that it cuts makes the mean biased")
    return found


def _change(option: Option) -> float:
    return math.inf if option.change is None else option.change


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
