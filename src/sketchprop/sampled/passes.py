"""The two forward passes of one step: all samples without a graph, the kept ones with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .replay import Recorder, Replay, random_state, same_state, set_random_state
from .sources import Sources, held_generators


@dataclass(frozen=True)
class Randomness:
    """What was random in the first pass."""

    held: dict[str, Any]
    recorder: Recorder | None
    before: Sources
    after: Sources


def first_pass(
    model: Any, run: Callable[[], Any], samples: int, device: torch.device
) -> tuple[Any, Randomness]:
    """The outputs of all samples, without a graph, and what was random on the way."""
    held = held_generators(model)
    before, start = Sources.now(held), random_state(device)
    recorder = None
    with torch.no_grad():
        outputs = None if _looks_random(model) else run()
        if outputs is None or not same_state(start, random_state(device)):
            set_random_state(start, device)
            before.restore()
            recorder = Recorder(device, samples)
            with recorder:
                outputs = run()
            if not recorder.saw_all(start, random_state(device)):
                raise RuntimeError(
                    "the model draws random numbers that sampled_loss cannot repeat for the kept "
                    "samples (in compiled code); run it without torch.compile or without dropout"
                )
    after = Sources.now(held)
    before.refuse_held(after)
    return outputs, Randomness(held, recorder, before, after)


def second_pass(run: Callable[[], Any], randomness: Randomness, kept: Tensor) -> Any:
    """The outputs of the samples ``kept``, with a graph and with the random numbers they had."""
    if randomness.before.moved(randomness.after):
        randomness.before.restore()
    recorder = randomness.recorder
    if recorder is None or not recorder.draws:
        outputs = run()
    else:
        with Replay(recorder, kept) as replay:
            outputs = run()
        replay.refuse_rest()
    randomness.after.refuse_other_end(Sources.now(randomness.held))
    return outputs


def _looks_random(model: Any) -> bool:
    """A guess that saves a second first pass when it is right."""
    if not isinstance(model, nn.Module):
        return False
    for module in model.modules():
        rate = getattr(module, "p", getattr(module, "dropout", 0))
        if module.training and isinstance(rate, float) and rate > 0:
            return True
    return False
