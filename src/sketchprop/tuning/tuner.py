"""Tuner: budgets that follow training."""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, median
from time import perf_counter
from typing import Any

from torch import nn

from ..core.checks import check_budget, check_count
from ..core.proof import no_gradient_hooks
from ..core.stopwatch import timed
from ..layers import SketchedModule
from ..layers.depth import NOTHING, Shares, load_shares_, mean_over_processes, shares_in
from ..meters.batches import handed
from ..meters.noise.gradients import Gradients, Loss, squared_distance
from ..meters.noise.pace import Pace, adaptive, noise_by_parameter, ready
from ..meters.noise.variance import Units
from ..meters.restore import check_model, restored
from .controller import Controller, Probe, affordable
from .rule import LADDER
from .together import agreed, check_plain

_log = logging.getLogger("sketchprop")
EARLY, EARLIEST = 0.05, 10
"""The first probe of a training whose length is known: after so much of it, and so many steps."""
RECENT = 65
"""Steps from whose times the median is taken."""


class Tuner:
    """Moves the budgets of a sketched model while it trains, so that time × noise is least.

    First call ``sketch_``: it chooses the layers or blocks, which are the units, and the sketch.
    Then call the tuner with the batch of each step. Training starts exact (``start``: another value
    of ``LADDER``). From time to time the tuner probes: it runs the batch with one unit sketched,
    with all and with none, and measures time and noise. It then sets the budgets with the least
    T·N, T(p) the time per step and N(p) = ‖g‖² + σ² + V(p); see ``sketchprop.tuning.rule``. Probes
    take at most ``share`` of the training time, and less while training stays exact. They do not
    change gradients, buffers, the optimizer or the random state.

    ``frozen=True`` only measures and leaves the budgets as they are. A probe then takes four
    passes, so ``share=0.04`` probes every hundredth step. Each entry of the log has ``added``,
    V = ‖ĝ - g‖²; ``sigma2``, ½‖g - g'‖² with g' of the batch before; ``noise``, the share of extra
    steps; ``worst``, V/‖g‖² of the noisiest layer or block, which a sum over all hides; ``time``,
    per step over exact; and ``change``, time × (1 + noise). Average some entries: each alone is
    noisy.

    ``optimizer``: the one that trains, SGD or Adam; it decides how many steps noise costs.
    ``steps``: the number of training steps. With it the first probe comes early, which a short
    training needs, and the others are spread evenly. Without it the first probe comes when
    ``share`` of the time so far pays for it. The callbacks of trainers set it.
    ``groups``: the largest number of groups of neighbouring units, each with one budget.
    Noise is checked at probes only. With several processes give each the model inside of DDP: they
    average their measurements and decide alike.
    ``log``: every decision, a plain dict.
    ``clock``: the function that seconds are read from.

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
        groups: int = 8,
        frozen: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share={share!r} is not in (0, 1]; give for example 0.03 of the time")
        check_count("groups", groups, "how many groups of layers get a budget each")
        check_model(model)
        check_plain(model)
        if check_budget(start) not in LADDER:
            raise ValueError(f"start={start!r} is not allowed; give one of {LADDER}")
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.share, self.frozen, self.clock = share, frozen, clock
        # Of sketches that stay as they are all together are probed; then no rung counts.
        self._most, self._rung = (1, 0.5) if frozen else (groups, float(start))
        self.steps: int | None = None
        self.step = 0
        self.spent = 0.0
        """Seconds that probes have taken."""
        self.log: list[dict[str, Any]] = []
        self._intervals: deque[float] = deque(maxlen=RECENT)
        self._left: float | None = None
        self._before: Any = None
        self._device = next(model.parameters()).device
        self._names: dict[Any, str] = {module: name for name, module in model.named_modules()}
        self._shares = [] if frozen else shares_in(model)
        for shares in self._shares:
            shares.open = False  # it is measured by probes
        self._arrange(self._most)
        self._sketches = {m: m.sketching.sketch for group in self.groups.values() for m in group}
        self.next_probe = self._wait()
        self._give(self.controller.budgets, "not probed yet")
        if steps is not None:
            self.expect(steps)

    def _arrange(self, most: int) -> None:
        """Groups of units, and a controller that knows nothing of them yet."""
        self.groups = _groups(self.model, most)
        kinds = [tuple(map(_kind, group)) for group in self.groups.values()]
        self.controller = Controller(
            kinds=[kinds.index(kind) for kind in kinds],
            budgets=[self._rung] * len(kinds),
        )

    def expect(self, steps: int) -> None:
        """Sets the number of training steps; call it before the first one.

        If fewer than three probes would fit into their share of the time, there are fewer groups.
        """
        check_count("steps", steps, "how many training has, or None")
        if self.log:
            raise RuntimeError("the tuner has probed already; give steps= when you make it")
        self.steps = steps
        self._arrange(affordable(self._most, self.share * steps))
        self.next_probe = self.step + self._wait()
        why = "not probed yet"
        if self.next_probe > steps:
            why = f"no probe fits into {self.share:.0%} of {steps} steps"
            _log.warning("Tuner: %s, so budgets stay as they are; give a larger share=", why)
        self._give(self.controller.budgets, why)

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
        if self.frozen:
            return {k: fmean(m.sketch.budget for m in group) for k, group in self.groups.items()}
        return dict(zip(self.groups, self.controller.budgets, strict=True))

    def __call__(self, batch: Any) -> dict[str, Any] | None:
        """Call it once before each step. Returns the decision if it probed, else ``None``."""
        self.step += 1
        if self._left is not None:
            self._intervals.append(self.clock() - self._left)
        entry = None
        # Not inside of ``exact``, and not before the optimizer knows what it divides by.
        inside = all(module.sketching.exact for module in self._sketches)
        if self.step >= self.next_probe and not inside and ready(self.optimizer):
            entry = self._decide(batch)
        # Only the batch just before a probe is needed: no other is kept alive.
        self._before = handed(batch) if self.step + 1 >= self.next_probe else None
        self._left = self.clock()
        return entry

    def _decide(self, batch: Any) -> dict[str, Any]:
        start = self.clock()
        probe = agreed(self._probe(batch, start), self._device)
        self.spent += max(0.0, probe.cost)
        decision = (self.controller.watch if self.frozen else self.controller.learn)(probe)
        self._give(self.controller.budgets, f"tuned at step {self.step}: {decision['why']}")
        entry = {"step": self.step, **decision, "spent": self.spent, "budgets": self.budgets}
        self.log.append(entry)
        self.next_probe = self.step + self._wait()
        return entry

    def _probe(self, batch: Any, start: float) -> Probe:
        rungs = self.controller.probe_rungs()
        units = range(len(rungs)) if len(rungs) > 1 else ()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        with restored(self.model) as buffers, no_gradient_hooks(parameters):
            gradients = Gradients(self.model, self.loss_fn, buffers, seed=self.step)

            def sketched(budgets: list[float]) -> tuple[float, list[float]]:
                """Seconds, and V by parameter."""
                self._give(budgets)
                run = partial(gradients.sketched, batch, 0)
                seconds, drawn = timed(run, gradients.device, self.clock)
                return seconds, noise_by_parameter(drawn, plain)

            exact = partial(timed, partial(gradients.exact, batch), gradients.device, self.clock)
            with gradients.switch.installed():
                # The first pass warms up; over the batch before it tells σ², too.
                other = gradients.exact(batch if self._before is None else self._before, 1)
                first, plain = exact()
                sigma2 = math.nan if self._before is None else squared_distance(other, plain) / 2
                del other
                self._measure_shares(partial(gradients.sketched, batch, 0))
                together = sketched(rungs)
                alone = [
                    sketched([p if k == i else 1.0 for k, p in enumerate(rungs)]) for i in units
                ] or [together]
                last, _ = exact()
            # Budgets in force come back with the sketches, which ``restored`` keeps.
        pace = Pace.of(plain, adaptive(self.optimizer))
        # The faster of two: what disturbs a pass makes it slower, and a sketch must not win by it.
        seconds = min(first, last)
        step = median(self._intervals) if self._intervals else seconds
        now = zip(self.controller.budgets, rungs, alone, strict=True)
        # What the steps saved that were timed from call to call, as far as this probe can tell.
        saved = math.fsum((seconds - t) * (1 - p) / (1 - q) for p, q, (t, _) in now if seconds > t)
        return Probe(
            exact=seconds,
            alone=tuple(t for t, _ in alone),
            together=together[0],
            elsewhere=max(0.0, step - (seconds - saved)),
            cost=self.clock() - start,
            total=pace.total,
            # V for which V/(‖g‖² + σ²) is the number of steps that are needed beside.
            noise=tuple(pace.total * (pace.steps(added) - 1) for _, added in alone),
            noise_together=pace.total * (pace.steps(together[1]) - 1),
            added=math.fsum(together[1]),
            worst=Units(self.model, parameters).worst(together[1], pace.squares),
            sigma2=sigma2,
        )

    def _measure_shares(self, run: Callable[[], object]) -> None:
        """How blocks share their budgets, on this batch: by twins, which draw evenly."""
        names = dict(self.model.named_modules())
        for shares in self._shares:
            states = {name: names[name].sketching for name in shares.states}
            twin = Shares(shares.tokens, states, alone=True)
            for state in states.values():
                state.shares, state.sketch, state.idle = twin, shares.tokens, False
            run()
            for state in states.values():
                state.shares = None
            own = [twin.blocks.get(name, NOTHING) for name in states]
            means = zip(states, mean_over_processes(own, self._device), strict=True)
            shares.blocks = {name: m for name, m in means if all(map(math.isfinite, m))}

    def _shared(self, group: Sequence[Any], budget: float) -> dict[Any, Any]:
        """The sketches of a group's units at a budget; of blocks that share it, of all together."""
        found = {module: self._sketches[module].with_budget(budget) for module in group}
        parts: dict[str, Any] = {}
        for shares in self._shares if budget < 1 else ():
            parts |= shares.sketches(shares.tokens.with_budget(budget))
        return {m: parts.get(self._names[m], sketch) for m, sketch in found.items()}

    def _give(self, budgets: Sequence[float], why: str = "") -> None:
        for group, budget in zip(self.groups.values(), budgets, strict=True):
            sketches = {} if self.frozen else self._shared(group, budget)
            for module, sketch in sketches.items():
                state = module.sketching
                # Only what changes: under torch.compile a new sketch is looked at anew.
                if state.sketch != sketch:
                    state.sketch = sketch
                if state.idle != (budget == 1):
                    state.idle = budget == 1  # at 1.0 nothing draws
                if why:
                    state.tuned = f"{'exact' if budget == 1 else f'{budget:g}'}, {why}"

    def state_dict(self) -> dict[str, Any]:
        """Numbers, texts, lists and dicts: it goes through JSON."""
        return {
            "step": self.step,
            "steps": self.steps,
            "next_probe": self.next_probe,
            "spent": self.spent,
            "groups": list(self.groups),
            "controller": self.controller.state_dict(),
            "shares": {n: own for shares in self._shares for n, own in shares.blocks.items()},
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
        self.spent = state["spent"]
        self.controller = Controller.from_state(state["controller"])
        load_shares_(self.model, state["shares"])
        self.log = [dict(entry) for entry in state["log"]]
        self._give(self.controller.budgets, "resumed")


def _groups(model: nn.Module, most: int) -> dict[str, list[Any]]:
    """Sketched layers and blocks in order, neighbours together where there are many."""
    units: dict[int, list[tuple[str, Any]]] = {}
    for name, m in model.named_modules():
        if isinstance(m, SketchedModule):
            # Blocks that share a budget out are one unit: it is what they share that is moved.
            units.setdefault(id(m.sketching.shares or m), []).append((name, m))
    if not units:
        raise ValueError(
            f"{type(model).__name__} has no sketched layer; say first what is to be tuned: "
            "sketch_(model, Tokens(0.3)), or sketch_(model, Rows(0.3))"
        )
    count = min(most, len(units))
    edges = [round(i * len(units) / count) for i in range(count + 1)]
    chains = list(units.values())
    parts = [list(itertools.chain(*chains[a:b])) for a, b in itertools.pairwise(edges)]
    names = [[name for name, _ in part] for part in parts]
    texts = [each[0] if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in names]
    return {text: [m for _, m in part] for text, part in zip(texts, parts, strict=True)}


def _kind(module: Any) -> tuple[Any, ...]:
    """Equal for layers whose backward takes the same time."""
    sketch = repr(module.sketching.sketch.with_budget(0.5))
    return type(module), sketch, module.matrices(module)
