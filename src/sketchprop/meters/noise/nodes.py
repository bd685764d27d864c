"""Prop. 2.2 at every node: what a sketch adds here, and what arrives from the layers above.

A node i is a tensor that feeds sketched layers j. With ĝ the sketched and g the exact gradient,

    ĝᵢ - gᵢ = Σⱼ (Ĵᵢⱼ - Jᵢⱼ)ĝⱼ  +  the exact backward of (ĝ - g) from above
               local                propagated

and the squared norms add up in the mean, because each local draw is unbiased whatever came from
above and independent of the other draws.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..restore import call_hooks
from .estimate import Estimate, over_draws
from .gradients import squared_norm

TERMS = ("total", "local", "propagated", "remainder")


@dataclass(frozen=True)
class NodeTerms:
    """A node's variance E‖ĝᵢ - gᵢ‖² and the two terms it is the sum of."""

    total: Estimate
    local: Estimate
    """Σⱼ E‖(Ĵᵢⱼ - Jᵢⱼ)ĝⱼ‖²: injected by the sketched layers that read this node."""
    propagated: Estimate
    """E‖Σⱼ Jᵢⱼ(ĝⱼ - gⱼ)‖²: arrived from the layers above, through exact derivatives."""
    remainder: Estimate
    """total - local - propagated, draw by draw: zero within its error if Prop. 2.2 holds."""


@dataclass(frozen=True)
class NodeVariance:
    """A tensor that feeds sketched layers."""

    node: str
    batch_mean: NodeTerms
    """Of gᵢ = B⁻¹ Σ_b gᵢ⁽ᵇ⁾, the batch mean, as the paper writes it (for a mean loss)."""
    samples: NodeTerms
    """Of all samples' gradients together: Σ_b ‖·‖² without the mean over the batch."""


@dataclass
class _Use:
    """One call of a sketched layer: its inputs, aliased so that each has its own gradient."""

    layer: str
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    input_grads: dict[int, Tensor] = field(default_factory=dict)
    output_grads: dict[int, Tensor] = field(default_factory=dict)


class Record:
    """The tensors around every use of a sketched layer in one pass, and their gradients."""

    def __init__(self) -> None:
        self.uses: list[_Use] = []
        self.grads: dict[int, Tensor] = {}
        # The tensors and their graph nodes are kept: an id is only unique among the living.
        self._alive: list[Any] = []
        self._nodes: dict[object, int] = {}

    def node(self, x: Tensor) -> int:
        function = x.grad_fn
        key = id(x) if function is None else (id(function), x.output_nr)
        if key not in self._nodes:
            index = self._nodes[key] = len(self._nodes)
            self._alive.append((x, function))
            _on_gradient(x, self.grads, index)
        return self._nodes[key]


class Taps:
    """Hooks that fill a ``Record`` during a forward pass and the backward that follows."""

    def __init__(self, layers: dict[Any, str]) -> None:
        self.layers = layers
        self._record: Record | None = None

    def installed(self) -> AbstractContextManager[None]:
        return call_hooks(self.layers, self._enter, self._leave)

    def start(self) -> Record:
        """Before a forward pass."""
        self._record = Record()
        return self._record

    def forward_is_done(self) -> None:
        """What is called from now on is a recomputation; the hooks on tensors stay."""
        self._record = None

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        record = self._record
        if record is None:
            return None
        use = _Use(self.layers[module])
        record.uses.append(use)
        # One alias for a tensor that is given twice: attention asks whether key is value.
        aliases: dict[int, Tensor] = {}

        def alias(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.requires_grad:
                return x
            if id(x) not in aliases:
                node = record.node(x)
                twin = aliases[id(x)] = use.inputs[node] = x.view_as(x)
                _on_gradient(twin, use.input_grads, node)
            return aliases[id(x)]

        return torch.utils._pytree.tree_map(alias, (args, kwargs))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        record = self._record
        if record is None:
            return
        use = next(u for u in reversed(record.uses) if u.layer == self.layers[module])
        for out in torch.utils._pytree.tree_leaves(output):
            if isinstance(out, Tensor) and out.requires_grad:
                _on_gradient(out, use.output_grads, len(use.outputs))
                use.outputs.append(out)


def _on_gradient(x: Tensor, grads: dict[int, Tensor], key: int) -> None:
    """Writes the gradient of ``x`` to ``grads[key]`` when backward has it."""
    x.register_hook(lambda grad: grads.__setitem__(key, grad))  # type: ignore[no-untyped-call]


class NodeMeter:
    """Collects the terms of Prop. 2.2, draw by draw; nothing of a draw's size is kept."""

    def __init__(self) -> None:
        self._batches = 0
        # node -> "batch_mean" or "samples" -> term -> batch -> a value for each draw
        self._values: dict[str, dict[str, dict[str, dict[int, list[float]]]]] = {}

    def start_batch(self) -> None:
        self._batches += 1

    def add(self, exact: Record, sketched: Record) -> None:
        """One draw: the record of the exact pass, its graph still there, and a sketched one."""
        local: dict[int, list[Tensor]] = {}
        readers: dict[int, list[str]] = {}
        # Where one use's output is the next one's input, the hooks of the exact pass run again.
        true = dict(exact.grads)
        for before, after in zip(exact.uses, sketched.uses, strict=True):
            for node, error in _local_errors(before, after).items():
                local.setdefault(node, []).append(error)
                readers.setdefault(node, []).append(after.layer)
        exact.grads.update(true)
        seen: Counter[str] = Counter()
        for node, errors in local.items():
            name = "input of " + ", ".join(dict.fromkeys(readers[node]))
            seen[name] += 1
            if seen[name] > 1:
                name += f" ({seen[name]})"
            if node in exact.grads and node in sketched.grads:
                self._add_node(name, sketched.grads[node] - exact.grads[node], errors)

    def result(self) -> tuple[NodeVariance, ...]:
        def split(terms: dict[str, dict[int, list[float]]]) -> NodeTerms:
            return NodeTerms(**{term: over_draws(list(v.values())) for term, v in terms.items()})

        return tuple(
            NodeVariance(name, split(kinds["batch_mean"]), split(kinds["samples"]))
            for name, kinds in self._values.items()
        )

    def _add_node(self, name: str, error: Tensor, local: list[Tensor]) -> None:
        kinds = self._values.setdefault(name, {"batch_mean": {}, "samples": {}})
        for kind, view in (("batch_mean", _batch_sum), ("samples", _whole)):
            total = squared_norm(view(error))
            own = sum(squared_norm(view(e)) for e in local)
            above = squared_norm(view(error - torch.stack(local).sum(0)))
            terms = (total, own, above, total - own - above)
            for term, value in zip(TERMS, terms, strict=True):
                batches = kinds[kind].setdefault(term, {})
                batches.setdefault(self._batches, []).append(value)


def _local_errors(exact: _Use, sketched: _Use) -> dict[int, Tensor]:
    """(Ĵᵢⱼ - Jᵢⱼ)ĝⱼ for each node i that this use j reads."""
    arrived = sketched.output_grads
    if not arrived:
        return {}
    nodes = [node for node in exact.inputs if node in sketched.input_grads]
    if not nodes:
        return {}
    true = torch.autograd.grad(
        [exact.outputs[i] for i in arrived],
        [exact.inputs[node] for node in nodes],
        list(arrived.values()),
        retain_graph=True,
        allow_unused=True,
    )
    return {
        node: sketched.input_grads[node] - grad
        for node, grad in zip(nodes, true, strict=True)
        if grad is not None
    }


def _batch_sum(x: Tensor) -> Tensor:
    # Rows of ∂L/∂x of a mean loss carry the 1/B already: their sum is the paper's mean.
    return x.sum(0) if x.dim() > 1 else x


def _whole(x: Tensor) -> Tensor:
    return x
