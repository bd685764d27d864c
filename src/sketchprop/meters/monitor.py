"""V/σ² while training: a running estimate, as plain numbers and to TensorBoard."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from ..layers import SketchedModule
from .cost.shapes import recorded_uses
from .noise.estimate import divide
from .noise.passes import Gradients, Loss, squared_distance
from .restore import restored


class Writer(Protocol):
    """What takes the numbers; TensorBoard's ``SummaryWriter`` is one."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class Monitor:
    """Call it at each step with the step's batch; every ``every`` steps it returns numbers.

    Each time it runs four more gradients, two exact and two sketched ones, over this batch and
    the one before: at ``every=100`` that is 4 % of the training time, at 1000 0.4 %. It keeps one
    batch and three gradients in memory while it works. Training itself is not disturbed: not the
    gradients, not the buffers, not the random state.

    σ² ≈ ½‖g₁ - g₂‖² and V ≈ mean of ‖ĝ - g‖², both averaged over time with ``decay``; a single
    one is noisy, their running means are not. (The batch before has been trained on once: within
    an epoch that makes no visible difference.) ``writer`` gets the numbers, TensorBoard for
    example, under names that begin with ``prefix``.

        monitor = Monitor(model, loss_fn, every=100, writer=SummaryWriter())
        for step, batch in enumerate(loader):
            monitor(batch)
            ...                                 # train as before
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        every: int = 100,
        *,
        decay: float = 0.9,
        writer: Writer | None = None,
        prefix: str = "sketchprop/",
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every} is not a number of steps; give for example 100")
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} is not in [0, 1); give for example 0.9")
        self.model = model
        self.loss_fn = loss_fn
        self.every = every
        self.decay = decay
        self.writer = writer
        self.prefix = prefix
        self.step = 0
        self._before: Any = None
        self._sums = {"sigma2": 0.0, "added": 0.0}
        self._weight = 0.0

    def __call__(self, batch: Any) -> dict[str, float] | None:
        """Numbers at the steps ``every``, ``2·every``, …; ``None`` at all others."""
        self.step += 1
        before, self._before = self._before, None
        if self.step % self.every == 0 and before is not None:
            numbers = self._numbers(before, batch)
            if self.writer is not None:
                for name, value in numbers.items():
                    self.writer.add_scalar(self.prefix + name, value, self.step)
        else:
            numbers = None
        # Only the batch just before a measurement is needed: no other is kept alive.
        if (self.step + 1) % self.every == 0:
            self._before = batch
        return numbers

    def _numbers(self, first: Any, second: Any) -> dict[str, float]:
        layers: dict[Any, str] = {
            m: name for name, m in self.model.named_modules() if isinstance(m, SketchedModule)
        }
        with restored(self.model) as buffers:
            gradients = Gradients(self.model, self.loss_fn, buffers, seed=self.step)
            with gradients.switch.installed():
                exact = gradients.exact(first)
                with recorded_uses(layers) as uses:
                    sketched = gradients.sketched(first, 0)
                added = squared_distance(sketched, exact) / 2
                other = gradients.exact(second)
                sigma2 = squared_distance(exact, other) / 2
                del exact, sketched
                added += squared_distance(gradients.sketched(second, 1), other) / 2
            full = sum(use.exact_flops for use in uses)
            kept = sum(use.run_flops for use in uses)
        for name, value in (("sigma2", sigma2), ("added", added)):
            self._sums[name] = self.decay * self._sums[name] + (1 - self.decay) * value
        self._weight = self.decay * self._weight + (1 - self.decay)
        means = {name: total / self._weight for name, total in self._sums.items()}
        return {
            **means,
            "relative": divide(means["added"], means["sigma2"]),
            "relative_now": divide(added, sigma2),
            "kept_flops": kept / max(1, full),
        }
