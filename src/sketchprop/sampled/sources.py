"""Random numbers that do not come from torch's default generators: python's, numpy's, a model's."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class Sources:
    """The states of all of them at one moment."""

    python: Any
    numpy: Any
    held: dict[str, Any]
    """Generators that modules hold as attributes, by the attribute's name."""

    @classmethod
    def now(cls, held: Mapping[str, Any]) -> Sources:
        """With the generators that ``held_generators`` has found."""
        numpy = _numpy_random()
        return cls(
            random.getstate(),
            None if numpy is None else numpy.get_state(),
            {name: _state(generator) for name, generator in held.items()},
        )

    def restore(self) -> None:
        """Puts python's and numpy's back; those that a model holds stay as they are."""
        random.setstate(self.python)
        numpy = _numpy_random()
        if numpy is not None and self.numpy is not None:
            numpy.set_state(self.numpy)

    def moved(self, later: Sources) -> list[str]:
        """Names of the generators that were used between here and ``later``."""
        names = [name for name, state in self.held.items() if later.held.get(name) != state]
        if self.python != later.python:
            names.append("python's random")
        if _key(self.numpy) != _key(later.numpy):
            names.append("numpy.random")
        return names

    def refuse_held(self, later: Sources) -> None:
        """An error if a generator that the model holds was used: its numbers cannot be repeated
        for some of the samples."""
        for name in self.moved(later):
            if name in self.held:
                raise RuntimeError(
                    f"the model draws random numbers from a generator of its own, {name!r}, and "
                    "sampled_loss cannot repeat them for the kept samples; draw from torch's "
                    "default generator there (leave out generator=...)"
                )

    def refuse_other_end(self, later: Sources) -> None:
        """An error if the second pass did not draw as often as the first."""
        names = self.moved(later)
        if names:
            raise RuntimeError(
                f"the model draws from {', '.join(names)} another number of times for the kept "
                "samples than for all: sampled_loss cannot repeat that. Draw one number for each "
                "sample with torch, for example torch.rand(len(x)), or one for the whole batch"
            )


def held_generators(model: Any) -> dict[str, Any]:
    """The generators that a module or one of its children has as an attribute, by name."""
    if not isinstance(model, nn.Module):
        return {}
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    numpy = _numpy_random()
    if numpy is not None:
        kinds += (numpy.Generator, numpy.RandomState)
    found = {
        (module, name): value
        for module in model.modules()
        for name in vars(module).keys() - _OF_EVERY_MODULE
        if isinstance(value := vars(module)[name], kinds)
    }
    paths = {module: path for path, module in model.named_modules()} if found else {}
    return {f"{paths[module]}.{name}".lstrip("."): g for (module, name), g in found.items()}


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", None)
    return _key(generator.get_state() if bits is None else bits.state)


def _key(state: Any) -> Any:
    """A state of numpy's, nested and with arrays in it, as something to compare."""
    if isinstance(state, dict):
        return tuple((name, _key(value)) for name, value in state.items())
    if isinstance(state, tuple):
        return tuple(map(_key, state))
    return state.tobytes() if hasattr(state, "tobytes") else state


def _numpy_random() -> Any:
    """``numpy.random`` if the program uses numpy at all."""
    return getattr(sys.modules.get("numpy"), "random", None)
