"""Dampened or amplified: what each layer or block makes of the noise that arrives at it.

Noise at the input of an edge is what arrived at its output, through the exact Jacobian J, and what
its own draws add (Proposition 2.2 ii):

    E‖ĝᵢ - gᵢ‖² = E‖J(ĝⱼ - gⱼ)‖² + E‖(Ĵ - J)ĝⱼ‖²,   E‖J(ĝⱼ - gⱼ)‖² ≤ ‖J‖² E‖ĝⱼ - gⱼ‖².

The gradient grows or shrinks too, so what counts is noise over gradient.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..restore import call_hooks, restored
from .estimate import divide
from .gradients import Gradients, Loss, squared_distance, squared_norms

ITERATIONS = 20
"""Of the power method: ‖J‖² comes from below."""


@dataclass(frozen=True)
class Edge:
    """A layer or block, from the gradient of its output to that of its input.

    Noise over gradient is E‖ĝ - g‖²/‖g‖², sums over the batch.
    """

    name: str
    at_output: float
    """With all sketches that backward meets before it."""
    at_input: float
    """Through its exact Jacobian."""
    with_draw: float
    """At its input, with its own draws."""
    signal_gain: float
    """‖Jg‖²/‖g‖² of the gradient."""
    white_gain: float
    """‖Jε‖²/‖ε‖² of white noise."""
    bound: float
    """‖J‖², the largest over samples; NaN where the module has no second derivative."""

    @property
    def factor(self) -> float:
        """Noise over gradient, after over before: above 1 amplified, 0 where no noise arrived."""
        return divide(self.at_input, self.at_output)

    @property
    def noise_gain(self) -> float:
        """E‖Jε‖²/E‖ε‖² of the noise that arrived: at most the bound."""
        return self.factor * self.signal_gain


def measure_edges(
    model: nn.Module,
    loss_fn: Loss,
    batches: Sequence[Any],
    names: Iterable[str] = (),
    *,
    draws: int = 8,
    seed: int = 0,
) -> tuple[Edge, ...]:
    """What becomes of noise at each edge, in the order of forward: at the sketched layers and
    blocks, or at the modules with these ``names``, for example blocks whose layers are sketched.

    Left out: modules in which nothing is sketched, or whose input needs no gradient, as the first
    layer's. Costs draws × batches × edges steps, and the power method on one batch.
    """
    with restored(model) as buffers:
        gradients = Gradients(model, loss_fn, buffers, seed)
        known = dict(model.named_modules())
        if missing := [name for name in names if name not in known]:
            raise ValueError(f"the model has no module {missing[0]!r}; see model.named_modules()")
        modules = {known[name]: name for name in names} or gradients.switch.layers
        calls: dict[str, tuple[Any, ...]] = {}
        seen: dict[tuple[str, str], Tensor] = {}

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not (args and isinstance(args[0], Tensor) and args[0].requires_grad):
                return None
            calls.setdefault(modules[module], (module, args, kwargs))
            # Others may read the same tensor: this view is read by the module alone.
            edge = args[0].view_as(args[0])
            edge.register_hook(partial(seen.__setitem__, (modules[module], "input")))  # type: ignore[no-untyped-call]
            return (edge, *args[1:]), kwargs

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            _first(output).register_hook(partial(seen.__setitem__, (modules[module], "output")))  # type: ignore[no-untyped-call]

        with gradients.switch.installed(), call_hooks(modules, before, after):
            return _measured(gradients, calls, seen, batches, draws)


def _measured(
    gradients: Gradients,
    calls: dict[str, tuple[Any, ...]],
    seen: dict[tuple[str, str], Tensor],
    batches: Sequence[Any],
    draws: int,
) -> tuple[Edge, ...]:
    gradients.exact(batches[0])
    uses, own = gradients.switch.uses, {}
    for name in calls:  # its first use of a sketch, and the first behind it
        if found := [i for i, use in enumerate(uses) if f"{use}.".startswith(f"{name}.")]:
            own[name] = (found[0], found[-1] + 1)
    gains = {name: _gains(*calls[name]) for name in own}
    sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for batch in batches:
        gradients.exact(batch)
        exact = dict(seen)
        for at, size in zip(exact, squared_norms(exact.values()), strict=True):
            sums[at] += draws * size
        for draw in range(draws):
            for first in {use for both in own.values() for use in both} - {len(uses)}:
                gradients.sketched(batch, draw, first)
                for name, both in own.items():
                    for end in ("input", "output") if first in both else ():
                        noise = squared_distance([seen[name, end]], [exact[name, end]])
                        sums[name, end, "drawn" if first == both[0] else "above"] += noise
    return tuple(
        Edge(
            name,
            divide(sums[name, "output", "above"], sums[name, "output"]),
            divide(sums[name, "input", "above"], sums[name, "input"]),
            divide(sums[name, "input", "drawn"], sums[name, "input"]),
            divide(sums[name, "input"], sums[name, "output"]),
            *gains[name],
        )
        for name in own
    )


def _gains(module: nn.Module, args: Any, kwargs: Any) -> tuple[float, float]:
    """‖Jε‖²/‖ε‖² of white noise, and ‖J‖² by the power method; J is that of the exact module."""
    x = args[0].detach().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):  # the fast kernels have no second derivative
        y = _first(module.forward(x, *args[1:], **kwargs))
        u = torch.randn_like(y).requires_grad_()
        (back,) = torch.autograd.grad(y, x, u, create_graph=True)
        v, gains = back.detach(), squared_norms([back.detach() / u.detach().norm()])
        try:
            for _ in range(ITERATIONS):
                (forth,) = torch.autograd.grad(back, u, v / v.norm(), retain_graph=True)
                (v,) = torch.autograd.grad(y, x, forth / forth.norm(), retain_graph=True)
                gains += squared_norms([v])
        except RuntimeError:  # a function that can be differentiated once
            gains.append(math.nan)
    return gains[0], gains[-1]


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found
