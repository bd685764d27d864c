"""The paper's MLP protocol on MNIST; many replicas train together as one stack.

A replica is one learning rate and one seed. Its initial weights, the order of its batches and its
draws come from its own generators, and no operation mixes replicas: in a stack it gives the same
numbers as alone.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sketchprop as sp
from sketchprop.core.compact import ElementAtoms, MaskedElements
from sketchprop.core.sampling import Atoms, draw_uniforms, sample_independent
from sketchprop.core.vjp import Vjp
from sketchprop.sketches import Sketch

from .. import data
from ..lab.machine import machine
from ..lab.pictures import Parts, split
from ..lab.sweep import Run, climbing
from ..lab.trainer import generator
from ..methods import layer_sketch
from .study import PIXELS, MnistCell

AHEAD = 1 << 14
"""How many uniforms a replica draws at once."""
_EVALUATION_ROWS = 2500


@lru_cache(maxsize=2)
def load(train_rows: int, validation_rows: int, test_rows: int, pixels: str) -> Parts:
    """MNIST as rows of numbers, a part of its training set kept apart for choosing."""
    parts = split(
        data.mnist(train=True), data.mnist(train=False), (train_rows, validation_rows, test_rows)
    )
    mean, std = PIXELS[pixels]
    rows = (x.flatten(1).float().div_(255).sub_(mean).div_(std) for x, _ in parts)
    return Parts(*(data.Labelled(x, y) for x, (_, y) in zip(rows, parts, strict=True)))


class Uniforms:
    """The draws of one layer: each replica's from its own generator, some steps ahead."""

    def __init__(self, purpose: str, seeds: Sequence[int], device: torch.device) -> None:
        self._generators = [generator(purpose, seed, device) for seed in seeds]
        self._device = device
        self._drawn: Tensor | None = None
        self._used = 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, p: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The next ones: ``[replicas, *shape of one]``."""
        if self._drawn is None or self._used == len(self._drawn):
            count = math.prod(shape[1:])
            size = (max(1, AHEAD // max(1, count)), *shape[1:])
            # Importance may give an atom a p that float32 uniforms never meet; masks of single
            # elements, the only ones with so many draws, have p = budget.
            dtype = torch.float32 if count >= AHEAD else torch.float64
            options: Any = {"dtype": dtype, "device": self._device}
            drawn = [torch.rand(size, generator=g, **options) for g in self._generators]
            self._drawn, self._used = torch.stack(drawn, 1), 0
        self._used += 1
        return self._drawn[self._used - 1]

    def keep(self, places: Tensor) -> None:
        """Only these replicas go on, each where it was."""
        self._generators = [self._generators[place] for place in places.tolist()]
        self._drawn = None if self._drawn is None else self._drawn[:, places].contiguous()


class Stack:
    """The parameters of all replicas, and one SGD step for each of them."""

    def __init__(self, cell: MnistCell, runs: Sequence[Run]) -> None:
        self.cell, self.device = cell, machine().where
        self.seeds = [run.seed for run in runs]
        rates = [torch.full((), run.learning_rate, device=self.device) for run in runs]
        self.rates = torch.stack(rates)
        self.alive = torch.ones_like(self.rates, dtype=torch.bool)
        self.clipped = torch.zeros_like(self.rates)
        self.loss = torch.zeros_like(self.rates)
        self.steps = 0
        self.weights, self.biases = _initial(cell.widths, self.seeds, self.device)
        self.sketches = layer_sketches(cell)
        self.uniforms = [self._uniforms(index) for index in range(len(self.weights))]

    def _uniforms(self, index: int) -> Uniforms | None:
        sketch, (_, n, d) = self.sketches[index], self.weights[index].shape
        B = self.cell.batch_size
        if sketch.keeps_all(B, n, d):
            return None
        return Uniforms(f"draws of layer {index}", self.seeds, self.device)

    def step(self, x: Tensor, labels: Tensor) -> None:
        """``x: [R, B, 784]``, ``labels: [R, B]``."""
        h = x
        for index, (W, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            source = self.uniforms[index] or draw_uniforms
            h = sp.sketched_linear(h, W, b, self.sketches[index], uniforms=source)
            h = h if index == len(self.weights) - 1 else h.relu()
        losses = F.cross_entropy(h.flatten(0, 1), labels.flatten(), reduction="none")
        losses = losses.view(labels.shape).mean(-1)
        parameters = [*self.weights, *self.biases]
        self._update(parameters, torch.autograd.grad(losses.sum(), parameters))
        self.loss += losses.detach()
        self.steps += 1

    def _update(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        factor = -self.rates
        if self.cell.clip:
            norms = [torch.linalg.vector_norm(g.flatten(1), dim=1) for g in grads]
            norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
            factor = factor * (self.cell.clip / (norm + 1e-6)).clamp(max=1)
            self.clipped += norm > self.cell.clip
        with torch.no_grad():
            for parameter, grad in zip(parameters, grads, strict=True):
                shape = (-1,) + (1,) * (grad.dim() - 1)
                parameter.addcmul_(grad, factor.view(shape))

    def retire(self) -> Tensor:
        """Which replicas are not finite any more; their weights become 0 and stay so."""
        finite = torch.ones_like(self.alive)
        for parameter in [*self.weights, *self.biases]:
            finite &= parameter.detach().flatten(1).isfinite().all(1)
        lost = ~finite & self.alive
        if bool(lost.any()):
            with torch.no_grad():
                for parameter in [*self.weights, *self.biases]:
                    parameter[lost] = 0
            self.rates[lost] = 0
            self.alive &= finite
        return lost

    def keep(self, places: Tensor) -> None:
        """Only these replicas go on, each where it was."""
        self.seeds = [self.seeds[place] for place in places.tolist()]
        for name in ("rates", "alive", "clipped", "loss"):
            setattr(self, name, getattr(self, name)[places])
        for parameters in (self.weights, self.biases):
            parameters[:] = [p.detach()[places].requires_grad_() for p in parameters]
        for uniforms in filter(None, self.uniforms):
            uniforms.keep(places)

    def accuracies(self, part: data.Labelled) -> Tensor:
        """In percent, for each replica. One at a time: a stack must not change the rounding."""
        right = torch.zeros_like(self.rates, dtype=torch.int64)
        with torch.no_grad():
            for images, labels in zip(
                torch.split(part.images, _EVALUATION_ROWS),
                torch.split(part.labels, _EVALUATION_ROWS),
                strict=True,
            ):
                for r in range(len(self.seeds)):
                    h = images
                    for index, (W, b) in enumerate(zip(self.weights, self.biases, strict=True)):
                        h = F.linear(h.relu_() if index else h, W[r], b[r])
                    right[r] += (h.argmax(-1) == labels).sum()
        return 100.0 * right.double() / len(part.labels)


def train_stack(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Trains replicas of one cell together; what was found for each, in the same order. A rate
    that halving leaves behind ends there."""
    began = time.perf_counter()
    cell: Any = runs[0].cell
    if any(run.cell != cell for run in runs):
        raise ValueError("replicas of one stack may differ in learning rate and seed only")
    whole = load(cell.train_rows, cell.validation_rows, cell.test_rows, cell.pixels)
    # torch multiplies a stack of one on another path, which rounds differently: it gets a twin.
    trained = list(runs if len(runs) > 1 else [runs[0], runs[0]])
    stack = Stack(cell, trained)
    found = Parts(*(data.Labelled(*(t.to(stack.device) for t in part)) for part in whole))
    orders = {seed: generator("order", seed) for seed in stack.seeds}
    if cell.halving and set(Counter(run.seed for run in runs).values()) != {cell.together}:
        raise ValueError(f"a seed that halves needs its {cell.together} rates in one stack")
    logs = [_Log([], [], []) for _ in trained]
    racing = list(range(len(trained)))
    for epoch in range(1, cell.epochs + 1):
        stack.loss.zero_()
        _epoch(stack, found.train, orders)
        losses = stack.loss / max(1, len(found.train.labels) // cell.batch_size)
        lost = stack.retire()
        validation = torch.where(stack.alive, stack.accuracies(found.validation), 0.0)
        test = torch.where(stack.alive, stack.accuracies(found.test), 0.0)
        values = zip(validation.tolist(), test.tolist(), losses.tolist(), strict=True)
        for place, (log, three) in enumerate(zip((logs[r] for r in racing), values, strict=True)):
            for curve, value in zip((log.validation, log.test, log.loss), three, strict=True):
                curve.append(value)
            log.diverged = epoch if lost[place] else log.diverged
            log.clipped = float(stack.clipped[place]) / max(1, stack.steps)
        if epoch in cell.rungs:
            scores = {run: max(logs[r].validation) for r, run in enumerate(trained)}
            passed = set(climbing([trained[r] for r in racing], scores, cell.rungs[epoch]))
            places = [place for place, r in enumerate(racing) if trained[r] in passed]
            racing = [racing[place] for place in places]
            stack.keep(torch.tensor(places, device=stack.device))
    seconds = (time.perf_counter() - began) / len(runs)
    ranks = layer_ranks(cell)
    return [
        {
            "validation_curve": [round(v, 4) for v in log.validation],
            "test_curve": [round(v, 4) for v in log.test],
            "loss_curve": [round(v, 6) if math.isfinite(v) else None for v in log.loss],
            "clipped_fraction": round(log.clipped, 6),
            "diverged_epoch": log.diverged,
            "ranks": ranks,
            "wall_seconds": round(seconds, 4),
        }
        for log in logs[: len(runs)]
    ]


@dataclass
class _Log:
    """What was seen of a replica after each epoch."""

    validation: list[float]
    test: list[float]
    loss: list[float]
    clipped: float = 0.0
    diverged: int = 0


def _epoch(stack: Stack, part: data.Labelled, orders: dict[int, torch.Generator]) -> None:
    """One pass over the data in each replica's own order; a last, smaller batch is left out."""
    B = stack.cell.batch_size
    steps = len(part.labels) // B
    order = {seed: torch.randperm(len(part.labels), generator=g) for seed, g in orders.items()}
    chosen = torch.stack([order[seed][: steps * B].view(steps, B) for seed in stack.seeds], 1)
    buffer = torch.empty(chosen.shape[1] * B, part.images.shape[1], device=stack.device)
    step = torch.compile(stack.step) if machine().compile else stack.step
    for index in chosen.to(stack.device):
        x = torch.index_select(part.images, 0, index.flatten(), out=buffer)
        step(x.view(*index.shape, -1), part.labels[index])


def trial_step(runs: Sequence[Run]) -> Callable[[], None]:
    """A step on made-up digits."""
    stack = Stack(runs[0].cell, runs)  # type: ignore[arg-type]
    shape = (len(runs), stack.cell.batch_size)
    x = torch.rand(*shape, stack.cell.widths[0]).to(stack.device)
    return partial(stack.step, x, torch.zeros(shape, dtype=torch.int64).to(stack.device))


class FullLength(Sketch):
    """Independent draws padded with atoms times 0 to the number of all atoms.

    The library pads to the longest draw of a stack. What that length is rounds differently in a
    matrix product, so a replica would depend on its neighbours.
    """

    def atoms(self, vjp: Vjp) -> Atoms:
        atoms: Atoms = super().atoms(vjp)  # type: ignore[safe-super]
        p = atoms.probabilities
        index = torch.arange(p.shape[-1], device=p.device).expand(p.shape)

        def choose(uniforms: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
            kept = sample_independent(p, uniforms(p, tuple(p.shape)))
            return index, torch.where(kept, p.reciprocal(), 0.0)

        def elements(own: Vjp, uniforms: Callable[..., Tensor]) -> MaskedElements:
            """The same masks, without a list of all elements."""
            n, rate = own.G.shape[-1], p.flatten()[0]  # a tensor: nothing waits for the device
            mask = (uniforms(p, tuple(p.shape)) < rate).to(own.G.dtype).mul_(1 / rate)
            return MaskedElements(own.G, mask[..., :n, :], mask[..., n:, :])

        alone = isinstance(atoms, ElementAtoms)
        object.__setattr__(atoms, *(("draw", elements) if alone else ("choose", choose)))
        return atoms


@lru_cache
def _full_length(method: type[Sketch]) -> type[Sketch]:
    return type(f"FullLength{method.__name__}", (FullLength, method), {})


def layer_sketches(cell: MnistCell) -> list[Sketch]:
    """One for each layer; a layer that stays exact keeps all columns, which draws nothing."""
    count = len(cell.widths) - 1
    sketch = layer_sketch(cell.sketch)
    if isinstance(sketch, Sketch) and sketch.sampling == "independent":
        options = {field.name: getattr(sketch, field.name) for field in fields(sketch)}
        sketch = _full_length(type(sketch))(**options)
    keep = sp.ColumnMask(1.0)
    where = {"all": range(count), "first": [0], "last": [count - 1]}[cell.layers]
    return [keep if sketch is None or i not in where else sketch for i in range(count)]


def layer_ranks(cell: MnistCell) -> list[float]:
    """How many atoms each layer keeps, or is expected to keep; exact layers: all columns."""
    shapes = list(zip(cell.widths[1:], cell.widths[:-1], strict=True))
    B = cell.batch_size
    return [
        round(float(sketch.rank_of(B, n, d)), 4)
        for sketch, (n, d) in zip(layer_sketches(cell), shapes, strict=True)
    ]


def _initial(
    widths: Sequence[int], seeds: Sequence[int], device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """What ``nn.Linear`` starts from, for each seed: uniform in ±1/√d."""
    sources = [generator("initial weights", seed) for seed in seeds]
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for n, d in zip(widths[1:], widths[:-1], strict=True):
        for target, shape in ((weights, (n, d)), (biases, (n,))):
            drawn = [torch.rand(shape, generator=g).mul_(2).sub_(1).div_(d**0.5) for g in sources]
            target.append(torch.stack(drawn).to(device).requires_grad_())
    return weights, biases
