"""Tuner: budgets that follow training."""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from ..core.checks import check_budget
from ..core.stopwatch import synchronise
from ..layers import SketchedModule
from ..layers.isolation import no_gradient_hooks
from ..meters.monitor import Writer
from ..meters.noise.metric import Pace, adaptive, noise_of, ready
from ..meters.noise.passes import Gradients, Loss
from ..meters.restore import check_model, restored
from ..sketches import AnySketch, Tokens
from .controller import Controller, Probe, affordable, check_ladder
from .rule import LADDER
from .together import agreed, check_plain

_log = logging.getLogger("sketchprop")
EARLY, EARLIEST = 0.05, 10
"""The first probe of a training whose length is known: after so much of it, and so many steps."""
RECENT = 65
"""Steps from whose times the median is taken."""


class Tuner:
    """Moves the budgets of a sketched model while it trains, so that time × noise is least.

    Call it with each step's batch; ``sketch_`` has said before which layers or blocks and by
    which sketch. It begins with exact gradients (``start``: another rung of the ladder) and
    probes from time to time: passes over the batch with one unit sketched, with all, with none,
    timed and compared. From these it takes the budgets for which T·N is least, T(p) the time of a
    step and N(p) = ‖g‖² + σ² + V(p), see ``sketchprop.tuning.rule``. Probes take at most
    ``share`` of the time of training, and ever less while the answer stays 'exact'. Training is
    not disturbed: not the gradients, the buffers, the optimizer, or the random state.

    ``optimizer``: noise counts by the steps that it costs this one, SGD or Adam.
    ``steps``: how many training has. Probes are then spread over it, the first of them early, which
    a short training needs; without it the first comes when its share of the time has passed. The
    callbacks say it themselves, see ``expect``.
    ``groups``: at most so many groups of neighbouring units have budgets of their own.
    ``gain``: a move has to promise more than that. ``frozen=True`` probes and moves nothing.
    ``couple=True`` multiplies the learning rate in each step of the optimizer by
    κ = (‖g‖² + σ²)/(‖g‖² + σ² + V), or by √κ if it is like Adam.
    Guards act at probes only: between two of them nothing watches the noise. In several processes
    give each the model inside of DDP: they share what they measure, and decide alike.
    ``log``: every decision, a plain dict; ``writer`` gets its numbers, TensorBoard for example,
    under names that begin with ``prefix``. ``clock``: what seconds are read from.

        sp.sketch_(model, sp.Tokens(0.3))
        tuner = sp.Tuner(model, loss_fn, optimizer=optimizer)
        for batch in loader:
            tuner(batch)
            ...                                 # train as before
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        *,
        optimizer: Any = None,
        steps: int | None = None,
        share: float = 0.03,
        start: float = 1.0,
        ladder: Sequence[float] = LADDER,
        groups: int = 8,
        gain: float = 0.02,
        frozen: bool = False,
        couple: bool = False,
        writer: Writer | None = None,
        prefix: str = "sketchprop/tuner/",
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        _check(share, groups, gain, couple, optimizer)
        check_model(model)
        check_plain(model)
        rungs = check_ladder(ladder)
        if check_budget(start) not in rungs:
            raise ValueError(f"start={start!r} is no rung of the ladder {rungs}")
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.share, self.frozen = share, frozen
        self.writer, self.prefix, self.clock = writer, prefix, clock
        self._most, self._rung = groups, float(start)
        self._rules: dict[str, Any] = {"ladder": rungs, "gain": gain}
        self.steps: int | None = None
        self.step = 0
        self.spent = 0.0
        """Seconds that probes have taken."""
        self.log: list[dict[str, Any]] = []
        self.kappa = 1.0
        """(‖g‖² + σ²)/(‖g‖² + σ² + V) at the last probe."""
        self._intervals: deque[float] = deque(maxlen=RECENT)
        self._left: float | None = None
        self._arrange(groups)
        self._sketches = {m: m.sketching.sketch for group in self.groups.values() for m in group}
        self.next_probe = self._wait()
        self._apply("not probed yet")
        if steps is not None:
            self.expect(steps)
        if couple:
            self._couple()

    def _arrange(self, most: int) -> None:
        """Groups of units, and a controller that knows nothing of them yet."""
        self.groups = _groups(self.model, most)
        kinds = [tuple(map(_kind, group)) for group in self.groups.values()]
        self.controller = Controller(
            kinds=[kinds.index(kind) for kind in kinds],
            budgets=[self._rung] * len(kinds),
            **self._rules,
        )

    def expect(self, steps: int) -> None:
        """Training has so many steps: to be said before the first of them.

        Three probes at least should fit into their share of it: if need be there are fewer groups.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps={steps!r}; give how many training has, or None")
        if self.log:
            raise RuntimeError("the tuner has probed already: say steps= when it is made")
        self.steps = steps
        self._arrange(affordable(self._most, self.share * steps))
        self.next_probe = self.step + self._wait()
        why = "not probed yet"
        if self.next_probe > steps:
            why = f"no probe fits into {self.share:.0%} of {steps} steps"
            _log.warning("Tuner: %s, so budgets stay as they are; give a larger share=", why)
        self._apply(why)

    def _wait(self) -> int:
        """Steps until the next probe.

        Where it is known how many there are: as many probes as their share pays for, spread evenly
        over what is left, the first when the optimizer has warmed up.
        """
        usual = self.controller.wait(self.share)
        if self.steps is None or self.step >= self.steps:
            return usual
        # Counted, and not by the clock: a resumed run has to wait alike.
        more = int(self.share * self.steps / self.controller.probe_steps) - len(self.log)
        if more < 1:
            return self.steps + usual - self.step
        if not self.log:
            return min(usual, max(EARLIEST, math.ceil(EARLY * self.steps)))
        return max(1, (self.steps - self.step) // (more + 1)) * self.controller.patience

    @property
    def budgets(self) -> dict[str, float]:
        """The budgets in force, by the names of a group's first and last unit."""
        return dict(zip(self.groups, self.controller.budgets, strict=True))

    def __call__(self, batch: Any) -> dict[str, Any] | None:
        """Once for each step, before it. What was decided, if this step was probed."""
        self.step += 1
        if self._left is not None:
            self._intervals.append(self.clock() - self._left)
        entry = None
        if self.step >= self.next_probe and self._ready():
            entry = self._decide(batch)
        self._left = self.clock()
        return entry

    def _ready(self) -> bool:
        """Not inside of ``exact``, and not before the optimizer knows what it divides by."""
        if all(module.sketching.exact for module in self._sketches):
            return False
        return self.optimizer is None or ready(self.optimizer)

    def _decide(self, batch: Any) -> dict[str, Any]:
        start = self.clock()
        probe = agreed(self._probe(batch, start), next(self.model.parameters()).device)
        self.spent += max(0.0, probe.cost)
        decision = self.controller.learn(probe, self.frozen)
        if "relative" in decision:
            self.kappa = 1 / (1 + decision["relative"])
        self._apply(f"tuned at step {self.step}: {decision['why']}")
        entry = {"step": self.step, **decision, "spent": self.spent, "budgets": self.budgets}
        self.log.append(entry)
        self.next_probe = self.step + self._wait()
        if self.writer is not None:
            numbers = {k: v for k, v in decision.items() if isinstance(v, float)}
            numbers |= {f"budget/{name}": p for name, p in self.budgets.items()}
            for name, value in numbers.items():
                self.writer.add_scalar(self.prefix + name, value, self.step)
        return entry

    def _probe(self, batch: Any, start: float) -> Probe:
        trial = self.controller.trial()
        count = len(trial)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        with restored(self.model) as buffers, no_gradient_hooks(parameters):
            gradients = Gradients(self.model, self.loss_fn, buffers, seed=self.step)
            with gradients.switch.installed():
                plain = gradients.exact(batch)

                def timed(budgets: list[float] | None) -> tuple[float, list[Tensor]]:
                    if budgets is not None:
                        self._give(budgets)
                    return self._timed(gradients, batch, budgets is None)

                pace = Pace.of(plain, adaptive(self.optimizer))

                def added(found: list[Tensor]) -> float:
                    """V for which N/(‖g‖² + σ²) is the number of steps that are needed."""
                    return pace.total * (pace.steps(noise_of(found, plain)) - 1)

                first, _ = timed(None)
                together, found = timed(trial)
                noise_together = added(found)
                alone = [(together, noise_together)] if count == 1 else []
                for i in range(count if count > 1 else 0):
                    seconds, found = timed([trial[k] if k == i else 1.0 for k in range(count)])
                    alone.append((seconds, added(found)))
                last, _ = timed(None)
            # Budgets in force come back with the sketches, which ``restored`` keeps.
        # The faster of two: what disturbs a pass makes it slower, and a sketch must not win by it.
        seconds = min(first, last)
        step = median(self._intervals) if self._intervals else seconds
        now = zip(self.controller.budgets, trial, alone, strict=True)
        # What the steps saved that were timed from call to call, as far as this probe can tell.
        saved = math.fsum((seconds - t) * (1 - p) / (1 - q) for p, q, (t, _) in now if seconds > t)
        return Probe(
            exact=seconds,
            alone=tuple(t for t, _ in alone),
            together=together,
            elsewhere=max(0.0, step - (seconds - saved)),
            cost=self.clock() - start,
            total=pace.total,
            noise=tuple(v for _, v in alone),
            noise_together=noise_together,
        )

    def _timed(self, gradients: Gradients, batch: Any, exact: bool) -> tuple[float, list[Tensor]]:
        synchronise(gradients.device)
        start = self.clock()
        found = gradients.exact(batch) if exact else gradients.sketched(batch, 0)
        synchronise(gradients.device)
        return self.clock() - start, found

    def _give(self, budgets: Sequence[float]) -> None:
        for group, budget in zip(self.groups.values(), budgets, strict=True):
            for module in group:
                sketch = _at(self._sketches[module], budget)
                # Only what changes: under torch.compile a new sketch is looked at anew.
                if module.sketching.sketch != sketch:
                    module.sketching.sketch = sketch
                if module.sketching.idle != (budget == 1):
                    module.sketching.idle = budget == 1

    def _apply(self, why: str) -> None:
        self._give(self.controller.budgets)
        for group, budget in zip(self.groups.values(), self.controller.budgets, strict=True):
            for module in group:
                module.sketching.tuned = f"{'exact' if budget == 1 else f'{budget:g}'}, {why}"

    def _couple(self) -> None:
        """The rate times κ while the optimizer steps: schedulers see their own rates."""
        before: list[Any] = []

        def scale(optimizer: Any, *_: Any) -> None:
            factor = math.sqrt(self.kappa) if adaptive(optimizer) else self.kappa
            before[:] = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

        def put_back(optimizer: Any, *_: Any) -> None:
            for group, rate in zip(optimizer.param_groups, before, strict=True):
                group["lr"] = rate

        self.optimizer.register_step_pre_hook(scale)
        self.optimizer.register_step_post_hook(put_back)

    def state_dict(self) -> dict[str, Any]:
        """Numbers, texts, lists and dicts: it goes through JSON."""
        return {
            "step": self.step,
            "steps": self.steps,
            "next_probe": self.next_probe,
            "spent": self.spent,
            "kappa": self.kappa,
            "groups": list(self.groups),
            "controller": self.controller.state_dict(),
            "log": [dict(entry) for entry in self.log],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where ``state_dict`` was taken; once three probes were timed, bitwise."""
        if len(self.groups) != len(state["groups"]) <= self._most:  # it expected other steps
            self._arrange(len(state["groups"]))
        if state["groups"] != list(self.groups):
            raise ValueError(
                f"the state is of a tuner with the groups {state['groups']}, and this one has "
                f"{list(self.groups)}; sketch the model as before, and give the same groups="
            )
        self.step, self.next_probe = state["step"], state["next_probe"]
        self.steps = self.steps or state["steps"]
        self.spent, self.kappa = state["spent"], state["kappa"]
        self.controller = Controller.from_state(state["controller"])
        self.log = [dict(entry) for entry in state["log"]]
        self._apply("resumed")


def _check(share: float, groups: int, gain: float, couple: bool, optimizer: Any) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"share={share!r} of the time; give for example 0.03")
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ValueError(f"groups={groups!r}; give how many may have budgets of their own, as 8")
    if not 0 <= gain < 1:
        raise ValueError(f"gain={gain!r}; give a share of time × noise, for example 0.02")
    if couple and optimizer is None:
        raise ValueError("couple=True changes the optimizer's rate: give optimizer= with it")


def _groups(model: nn.Module, most: int) -> dict[str, list[Any]]:
    """Sketched layers and blocks in order, neighbours together where there are many."""
    units: list[tuple[str, Any]] = [
        (name, m) for name, m in model.named_modules() if isinstance(m, SketchedModule)
    ]
    if not units:
        raise ValueError(
            f"{type(model).__name__} has no sketched layer; say first what is to be tuned: "
            "sketch_(model, Tokens(0.3)), or sketch_(model, Rows(0.3))"
        )
    count = min(most, len(units))
    edges = [round(i * len(units) / count) for i in range(count + 1)]
    parts = [units[a:b] for a, b in itertools.pairwise(edges)]
    return {_range([name for name, _ in part]): [module for _, module in part] for part in parts}


def _range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _kind(module: Any) -> tuple[Any, ...]:
    """Equal for layers whose backward takes the same time."""
    sketch = repr(module.sketching.sketch.with_budget(0.5))
    return type(module), sketch, module.matrices(module)


def _at(sketch: AnySketch, budget: float) -> AnySketch:
    """The sketch with this budget; at 1.0 nothing of it draws."""
    if budget == 1 and isinstance(sketch, Tokens):
        return replace(sketch, budget=1.0, queries=1.0, keys=1.0)
    return sketch.with_budget(budget)
