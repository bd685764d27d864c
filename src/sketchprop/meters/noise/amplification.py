"""Dampened or amplified: what each layer or block makes of the noise that arrives at it.

Noise at the input of an edge is what arrived at its output, through the exact Jacobian J, and what
its own draws add (Proposition 2.2 ii):

    E‖ĝᵢ - gᵢ‖² = E‖J(ĝⱼ - gⱼ)‖² + E‖(Ĵ - J)ĝⱼ‖²,   E‖J(ĝⱼ - gⱼ)‖² ≤ ‖J‖² E‖ĝⱼ - gⱼ‖².

All are sums over the batch. The gradient itself grows or shrinks too, so what counts is noise over
signal: it is amplified where J makes more of the noise than of the gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
    """A layer or block, from the gradient of its output to that of its input."""

    name: str
    at_output: float
    """E‖ĝ - g‖²/‖g‖² at its output, with all sketches that backward meets before it; 0 where there
    is none."""
    at_input: float
    """The same at its input, through its exact Jacobian."""
    with_draw: float
    """The same with its own draws."""
    signal_gain: float
    """‖Jg‖²/‖g‖² of the gradient."""
    white_gain: float
    """‖Jε‖²/‖ε‖² of white noise ε."""
    bound: float
    """‖J‖², the largest over samples: the paper's bound of what noise may grow by."""

    @property
    def noise_gain(self) -> float:
        """E‖Jε‖²/E‖ε‖² of the noise that arrived."""
        return self.factor * self.signal_gain

    @property
    def factor(self) -> float:
        """Noise over signal, after over before: above 1 amplified, 0 where no noise arrived."""
        return divide(self.at_input, self.at_output)

    @property
    def draw_factor(self) -> float:
        """What its own draws multiply E‖ĝ‖² by: they are made of gradients that arrive noisy, so
        that these factors multiply along the depth."""
        return (1 + self.with_draw) / (1 + self.at_input)


class _Ends:
    """The gradients at both ends of some modules in one backward pass."""

    def __init__(self, modules: dict[nn.Module, str]) -> None:
        self.modules = modules
        self.calls: dict[str, tuple[nn.Module, Any, Any]] = {}
        self.counts: Counter[str] = Counter()
        self.output: dict[str, Tensor] = {}
        self.input: dict[str, Tensor] = {}

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        name = self.modules[module]
        self.counts[name] += 1
        if not (args and isinstance(args[0], Tensor) and args[0].requires_grad):
            return None
        # Others may read the same tensor: this view is read by the module alone.
        edge = args[0].view_as(args[0])
        edge.register_hook(lambda g: self.input.__setitem__(name, g.detach()))
        self.calls[name] = (module, args, kwargs)
        return (edge, *args[1:]), kwargs

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name, y = self.modules[module], first_tensor(output)
        if y.requires_grad:
            y.register_hook(lambda g: self.output.__setitem__(name, g.detach()))


def first_tensor(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return found


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

    Left out: modules whose input needs no gradient, as the first layer's, in which nothing is
    sketched, or that a pass calls more than once. Costs draws × batches × edges steps, and the
    power method on one batch.
    """
    with restored(model) as buffers:
        gradients = Gradients(model, loss_fn, buffers, seed)
        known = dict(model.named_modules())
        if missing := [name for name in names if name not in known]:
            raise ValueError(f"the model has no module {missing[0]!r}; see model.named_modules()")
        ends = _Ends({known[name]: name for name in names} or dict(gradients.switch.layers))
        with gradients.switch.installed(), call_hooks(ends.modules, ends.before, ends.after):
            return _measured(gradients, ends, batches, draws)


def _measured(
    gradients: Gradients, ends: _Ends, batches: Sequence[Any], draws: int
) -> tuple[Edge, ...]:
    gradients.exact(batches[0])
    uses = gradients.switch.uses
    own: dict[str, tuple[int, int]] = {}
    for name in ends.calls:
        found = [i for i, use in enumerate(uses) if use == name or use.startswith(f"{name}.")]
        if found and ends.counts[name] == 1 and name in ends.input:
            own[name] = (found[0], found[-1] + 1)
    gains = {name: _gains(*ends.calls[name]) for name in own}
    sums: Counter[tuple[str, str]] = Counter()
    for batch in batches:
        gradients.exact(batch)
        exact_input, exact_output = dict(ends.input), dict(ends.output)
        for name in own:
            sums["input", name] += draws * squared_norms([exact_input[name]])[0]
            sums["output", name] += draws * squared_norms([exact_output[name]])[0]
        firsts = {first for both in own.values() for first in both}
        for draw in range(draws):
            for first in sorted(firsts - {len(uses)}):
                gradients.sketched(batch, draw, first)
                for name, (start, end) in own.items():
                    noise = squared_distance([ends.input[name]], [exact_input[name]])
                    if first == start:
                        sums["with draw", name] += noise
                    elif first == end:
                        sums["at input", name] += noise
                        there = squared_distance([ends.output[name]], [exact_output[name]])
                        sums["at output", name] += there
    return tuple(
        Edge(
            name,
            divide(sums["at output", name], sums["output", name]),
            divide(sums["at input", name], sums["input", name]),
            divide(sums["with draw", name], sums["input", name]),
            divide(sums["input", name], sums["output", name]),
            *gains[name],
        )
        for name in own
    )


def _gains(module: nn.Module, args: Any, kwargs: Any) -> tuple[float, float]:
    """‖Jε‖²/‖ε‖² of white noise, and ‖J‖² by the power method; J is that of the exact module."""
    x = args[0].detach().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):  # the fast kernels have no second derivative
        y = first_tensor(module.forward(x, *args[1:], **kwargs))
        u = torch.randn_like(y).requires_grad_()
        (back,) = torch.autograd.grad(y, x, u, create_graph=True)
        white = gain = float(back.detach().square().sum() / u.detach().square().sum())
        v = back.detach()
        for _ in range(ITERATIONS):
            (forth,) = torch.autograd.grad(back, u, v / v.norm(), retain_graph=True)
            (v,) = torch.autograd.grad(y, x, forth, retain_graph=True)
            gain = float(v.square().sum() / forth.square().sum())
    return white, gain
