"""The backward pass of one layer: exact, sketched, and the reduced products alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import sketchprop as sp
from sketchprop.core.vjp import Vjp
from sketchprop.ops import sketched_conv
from sketchprop.sketches import AnySketch, Every, Planner

from .results import Line
from .timing import Prepared, Ratio, Work, interleave

Shape = tuple[int, int, int]
LINEAR: dict[Shape, float | None] = {
    (128, 784, 64): None,
    (128, 1024, 1024): 0.24,
    (8192, 192, 1024): 0.22,
    (8192, 1024, 192): 0.26,
    (2048, 768, 3072): 0.16,
    (2048, 3072, 768): 0.16,
    (512, 4096, 4096): 0.16,
}
"""Rows × inputs × outputs, and the ratio that L1 at budget 0.1 shall reach on one thread."""

BEHIND = {(128, 784, 64): 0.85, (128, 1024, 1024): 0.26}
"""The paper's small layers, timed right behind their own forward pass, with cold caches."""
HALF = {(2048, 768, 3072): 0.60, (2048, 3072, 768): 0.60, (512, 4096, 4096): 0.60}
SPECTRAL = {(2048, 3072, 768): 0.65}
REMEMBERED = {(2048, 3072, 768): 0.30}


def linear(shapes: Sequence[Shape], budgets: Sequence[float], seconds: float) -> Iterator[Line]:
    for shape in shapes:
        yield from _linear_case(shape, budgets, seconds)
        if shape in BEHIND and 0.1 in budgets:
            layer = _Linear(*shape)
            work = {"exact": layer.exact(), "L1": layer.sketched(sp.L1(0.1))}
            ratio = interleave(work, rounds=(9, 1000), behind=True)["L1"]
            case = " × ".join(map(str, shape))
            yield Line(case, "L1, right behind its forward", 0.1, ratio, None, BEHIND[shape])


def linear_with(
    sketches: Sequence[AnySketch], shapes: Sequence[Shape], seconds: float
) -> Iterator[Line]:
    """The reader's sketches instead of those of the page."""
    for B, d, n in shapes:
        layer = _Linear(B, d, n)
        work = {"exact": layer.exact()} | {repr(s): layer.sketched(s) for s in sketches}
        ratios = interleave(work, seconds=seconds * len(sketches))
        for sketch in sketches:
            yield Line(f"{B} × {d} × {n}", repr(sketch), sketch.budget, ratios[repr(sketch)])


def _linear_case(shape: Shape, budgets: Sequence[float], seconds: float) -> Iterator[Line]:
    B, d, n = shape
    case = f"{B} × {d} × {n}"
    layer = _Linear(B, d, n)
    for budget in budgets:
        sketches: dict[str, sp.Sketch] = {"L1": sp.L1(budget)}
        planners: dict[str, Planner] = {}
        if budget == 0.1:
            sketches |= {"L2": sp.L2(budget), "Diagonal": sp.Diagonal(budget)}
            sketches |= {"ColumnMask": sp.ColumnMask(budget), "SampleMask": sp.SampleMask(budget)}
            planners = {"L1, Every(1, rows=0.1)": Every(1, rows=0.1), "L1, Every(10)": Every(10)}
            sketches |= dict.fromkeys(planners, sp.L1(budget))
            if n <= min(B, 1024) and B * n * d >= 2**30:
                sketches["GradientSVD"] = sp.GradientSVD(budget)
                sketches["RankConstrained"] = sp.RankConstrained(budget)
                sketches["GradientSVD, Every(50)"] = sp.GradientSVD(budget)
                planners["GradientSVD, Every(50)"] = Every(50)
        work: dict[str, Callable[[], object]] = {
            "exact": layer.exact(),
            "floor": layer.floor(budget),
        }
        work |= {name: layer.sketched(s, planners.get(name)) for name, s in sketches.items()}
        measured = interleave(work, seconds=seconds * len(work) / 3)
        targets = {"L1": {0.1: LINEAR.get(shape), 0.5: HALF.get(shape)}.get(budget)}
        targets["GradientSVD"] = SPECTRAL.get(shape)
        targets["GradientSVD, Every(50)"] = REMEMBERED.get(shape)
        if budget == 0.1:
            targets["Diagonal"] = 1.1 * measured["L1"].median
        for name, sketch in sketches.items():
            ratio = layer.with_planning(
                measured[name], sketch, planners.get(name), measured["exact"]
            )
            yield Line(case, name, budget, ratio, measured["floor"].median, targets.get(name))


class _Linear:
    """One layer, and closures that run its backward pass in different ways."""

    def __init__(self, B: int, d: int, n: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(B, d, generator=generator).requires_grad_()
        self.W = (torch.randn(n, d, generator=generator) / d**0.5).requires_grad_()
        self.b = torch.zeros(n, requires_grad=True)
        spread = torch.rand(n, generator=generator)
        self.G = torch.randn(B, n, generator=generator) * spread

    def exact(self) -> Work:
        return self._backward(lambda: F.linear(self.x, self.W, self.b))

    def sketched(self, sketch: AnySketch, planner: Planner | None = None) -> Work:
        return self._backward(
            lambda: sp.sketched_linear(self.x, self.W, self.b, sketch, planner=planner)
        )

    def floor(self, budget: float) -> Callable[[], object]:
        """The two reduced products of a column sketch, their factors at hand."""
        r = max(1, round(budget * self.G.shape[1]))
        values = self.G[:, :r].contiguous()
        W, X = self.W.detach()[:r].contiguous(), self.x.detach()
        return lambda: (values @ W, values.mT @ X)

    def with_planning(
        self, ratio: Ratio, sketch: sp.Sketch, planner: Planner | None, exact: Ratio
    ) -> Ratio:
        """A median does not see the rare steps that make new atoms: their share is added."""
        if not isinstance(planner, Every):
            return ratio
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            sketch.lasting_atoms(Vjp(self.G, self.W.detach()))
            seconds.append(time.perf_counter() - start)
        extra = 1e3 * statistics.median(seconds) / planner.steps
        share = extra / exact.milliseconds
        return Ratio(
            ratio.median + share, ratio.low + share, ratio.high + share, ratio.milliseconds + extra
        )

    def _backward(self, forward: Callable[[], Tensor]) -> Work:
        def run(y: Tensor) -> None:
            self.x.grad = self.W.grad = self.b.grad = None
            y.backward(self.G)

        return Prepared(forward, run)


def overhead(seconds: float) -> dict[str, object]:
    """What a sketched backward costs beyond its two reduced products, on a layer that is tiny."""
    layer = _Linear(128, 64, 64)
    sketched, floor = layer.sketched(sp.L1(0.1)), layer.floor(0.1)
    measured = interleave(
        {"sketched": sketched, "floor": floor}, seconds=seconds, rounds=(50, 5000)
    )
    micro = 1e3 * (measured["sketched"].milliseconds - measured["floor"].milliseconds)
    return {"overhead of a sketched layer, µs (target 150)": round(micro)}


CONV = {
    "1×1 channels_last": (1, torch.channels_last, 0.22),
    "1×1 NCHW": (1, torch.contiguous_format, 0.36),
    "3×3 channels_last": (3, torch.channels_last, None),
    "3×3 NCHW": (3, torch.contiguous_format, None),
}


def conv(
    batch: int, channels: tuple[int, int], size: int, budgets: Sequence[float], seconds: float
) -> Iterator[Line]:
    d, n = channels
    for name, (kernel, layout, target) in CONV.items():
        x = torch.randn(batch, d, size, size).to(memory_format=layout).requires_grad_()
        W = torch.randn(n, d, kernel, kernel).div_(d**0.5).to(memory_format=layout).requires_grad_()
        b = torch.zeros(n, requires_grad=True)
        G = torch.randn(batch, n, size, size).to(memory_format=layout)
        G *= torch.rand(n, 1, 1)

        def backward(forward: Callable[[], Tensor], leaves: tuple[Tensor, ...], G: Tensor) -> Work:
            def run(y: Tensor) -> None:
                for leaf in leaves:
                    leaf.grad = None
                y.backward(G)

            return Prepared(forward, run)

        leaves = (x, W, b)
        around = {"padding": kernel // 2}
        for budget in budgets:
            sketches = {"L1": sp.L1(budget), "Diagonal": sp.Diagonal(budget)}
            work: dict[str, Work] = {
                "exact": backward(partial(F.conv2d, x, W, b, **around), leaves, G)
            }
            for method, sketch in sketches.items():
                sketched = partial(sketched_conv, x, W, b, sketch, **around)
                work[method] = backward(sketched, leaves, G)
            measured = interleave(work, seconds=seconds)
            case = f"{name}, {batch} × {d} → {n} at {size}×{size}"
            for method in sketches:
                goal = target if budget == 0.1 and method == "L1" else None
                yield Line(case, method, budget, measured[method], None, goal)
