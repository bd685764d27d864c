"""advise(): what to type, within a time limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from time import monotonic
from typing import Any

from torch import nn

from ...core.random import random_state_kept
from ...core.stopwatch import unhurried
from ...layers.select import blocks_of
from ...layers.transform import unsketch_
from ..batches import different, usual_first
from ..cost.timing import seconds_of_a_pass
from ..noise.gradients import Loss
from ..noise.pace import adaptive, ready, steps_made
from ..noise.variance import Progress
from ..restore import check_minutes, check_model, check_sketchable, restored
from .advice import FEWEST_BATCHES, OUT_OF_TIME, Advice, Option
from .candidates import candidates, rows_seen
from .meter import COMPILED, FOR_HALF, LEAST_PASSES, Meter
from .trial import HELD
from .trial import trial as run_trial

MOST_BATCHES = 32
USED = 0.95
"""Of the time: a last round may take longer than those before."""


def advise(
    model: nn.Module,
    loss_fn: Loss,
    batches: Iterable[Any],
    *,
    optimizer: Any = None,
    minutes: float = 2,
    trial: float = 0,
    control: bool = True,
    compile: bool = False,
    progress: Progress | None = None,
    seed: int = 0,
) -> Advice:
    """Says what to type for this model, this loss and this machine, or to stay exact, and why.

    It tries the sketches that fit the model: kept tokens, the rows that are not zero, rows by
    token, whole samples, columns. The baseline is exact training with half the batch size. In
    about ``minutes`` it measures the time per step (exact and sketched steps in turns, optimizer
    included) and the noise of each. It compares the time to equal quality with that of exact
    training: the time per step, times (‖g‖² + σ² + V)/(‖g‖² + σ²) steps with SGD; for Adam see
    ``meters/noise/pace.py``. If other programs use the cores, it measures on one thread.

    The answer is 'it pays', 'halve the batch', 'stay exact', 'too close to call', or 'no answer
    yet': the batches do not show the gradient (a plateau), or time was too short.

    ``batches``: a list or a loader with at least four different batches, better 32; more are not
    used. A batch with a huge gradient counts at most as four usual ones.
    ``optimizer``: the one that you train with. It decides how many steps noise costs, and its own
    time is measured on a copy. Run ``advise`` after a few hundred steps, because noise changes.
    ``progress``: called with the share of the work that is done.
    ``trial``: minutes for a short training run afterwards, see ``trial``: exact, with the best
    candidate and with half of each batch. The result is ``advice.trial``.
    ``compile``: compares compiled blocks on kept tokens with compiled exact blocks, and says after
    how many steps the time for compiling is paid back.
    ``control=False``: the batch size is fixed, half of it is not tried. ``seed``: of the draws.
    The model, gradients, buffers, optimizer and random state are left as they were.

        advice = advise(model, loss_fn, loader, optimizer=optimizer)
        print(advice)
        advice.apply_(model)
    """
    check_model(model)
    check_sketchable(model)
    check_minutes(minutes, 2)
    if compile and (trial or not blocks_of(model)):
        why = "trial= trains uncompiled" if trial else "no block is known that Tokens could take"
        raise ValueError(f"compile=True compiles kept tokens: {why}; ask without compile=True")
    with random_state_kept():  # a loader that shuffles draws
        taken = usual_first(different(islice(iter(batches), MOST_BATCHES), FEWEST_BATCHES))
    given = len(taken)
    if trial:
        _check_trial(trial, optimizer, given)
    if given < 2:
        raise ValueError(
            f"{given} different batches were given; σ² is the variance between batches: "
            f"give at least four, better {MOST_BATCHES}, as training draws them"
        )
    start = monotonic()
    end = start + 60 * minutes * USED
    with unhurried(next(model.parameters()).device) as busy:
        with restored(model) as buffers:
            unsketch_(model)
            seen = rows_seen(model, loss_fn, taken)
            tried, told = candidates(model, seen.live, compile)
            a_pass = seconds_of_a_pass(model, loss_fn, taken[0])
            # A quarter of the time for σ², with as many batches as there are in it.
            taken = taken[: max(2, int((end - monotonic()) / 4 / a_pass))]
            needed = (LEAST_PASSES + FOR_HALF + len(taken) + 1) * a_pass
            if monotonic() + needed > end:
                raise ValueError(
                    f"minutes={minutes:g} is too short: one pass takes {a_pass:.2g} s; give at "
                    f"least minutes={needed / 30:.2g}, better {len(tried) * needed / 60:.2g}"
                )
            meter = Meter(model, loss_fn, taken, optimizer, seed, a_pass)
            buffers.restore()
            each = (end - monotonic()) / (len(tried) + 1)
            half = meter.half(max(each, FOR_HALF * meter.a_pass)) if control else None
            buffers.restore()
            options: list[Option] = []
            todo = tried
            while todo:  # the most promising at the cost of the last
                remaining = end - monotonic()
                share = max(remaining / len(todo), LEAST_PASSES * meter.a_pass)
                options.append(meter.measured(todo[0], min(share, remaining)))
                todo = [c for c in todo[1:] if c.follows(options[0].noise)]
                if progress is not None:
                    progress(len(options) / (len(options) + len(todo)))
        _check_tried(options, told, minutes)
        advice = Advice(
            options=tuple(options),
            control=half,
            signal=meter.signal,
            visible=meter.visible,
            live=seen.live,
            per_label=seen.per_label,
            batches=len(taken),
            given=given,
            steps=steps_made(optimizer),
            seconds=0.0,
            warnings=(),
            candidates={candidate.name: candidate for candidate in tried},
        )
        told = (
            [busy] * bool(busy) + told + meter.outliers() + _told(advice, seen.labelled, optimizer)
        )
        outcome, seconds = None, monotonic() - start
        if trial:
            best = advice.candidates[advice.closest.name]
            how: Any = {"control": control, "progress": progress, "seed": seed}
            outcome = run_trial(model, loss_fn, batches, optimizer, best, minutes=trial, **how)
    return replace(advice, warnings=tuple(told), trial=outcome, seconds=seconds)


def _check_trial(minutes: float, optimizer: Any, given: int) -> None:
    """What would make the trial impossible, before the time for advice is spent."""
    check_minutes(minutes, 5)
    if optimizer is None:
        raise ValueError("trial= trains for a while: give optimizer= with it")
    if given <= HELD:
        raise ValueError(
            f"trial= holds {HELD} batches out and trains on others, and {given} were given: give "
            "all batches of your training"
        )


def _check_tried(options: Sequence[Option], told: Sequence[str], minutes: float) -> None:
    if any(option.change is not None for option in options):
        return
    notes = dict.fromkeys([*(f"{o.name}: {o.note}" for o in options), *told])
    advice = ""
    if any(option.note == OUT_OF_TIME for option in options):
        advice = f". Give more, minutes={2 * minutes:g}, or smaller batches"
    raise ValueError(f"nothing could be tried; {'; '.join(notes)}{advice}")


def _told(advice: Advice, labelled: bool, optimizer: Any) -> list[str]:
    """What the measurements warn of."""
    best = advice.best
    texts = [f"{best.name} was {best.note}"] if best and best.note.startswith(COMPILED) else []
    tokens = next((name for name, c in advice.candidates.items() if c.of_blocks), None)
    if labelled and tokens:
        texts.append(
            f"each token has a label of its own: dropping tokens ({tokens}) adds noise as "
            "dropping labels would; a loss for each token is best left exact"
        )
    if optimizer is None:
        texts.append(
            "no optimizer was given: its own time is not counted, and noise counts as for SGD; "
            "with Adam it may cost more, or less"
        )
    elif adaptive(optimizer) and not ready(optimizer):
        texts.append(
            "the optimizer has not made a step yet, and noise changes while a model trains: ask "
            "again after some hundred steps (--steps 200 on the command line)"
        )
    if any(option.sound and (option.noise or 0.0) > 0.1 for option in advice.options):
        texts.append("gradient clipping is not measured: clipping of noisy gradients biases them")
    return texts
