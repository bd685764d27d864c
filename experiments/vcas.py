"""VCAS as published (arXiv 2402.17227, Algorithm 1): its two samplers and what moves their ratios.

SampleA drops whole samples of the gradient at the output of each block, SampleW drops rows of what
is left in the weight gradient of each linear layer. The ratios follow variances that are measured
from time to time; what a step costs in seconds plays no part.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import sketchprop as sp
from sketchprop.core.compact import KeptRows, RowAtoms, TwoSided, Whole, take_rows
from sketchprop.core.cost import Cost, Size
from sketchprop.core.random import seed_generators
from sketchprop.core.sampling import Uniforms, draw_uniforms
from sketchprop.core.vjp import Vjp
from sketchprop.layers.choose import refusal
from sketchprop.layers.isolation import no_gradient_hooks
from sketchprop.layers.select import blocks_of, sketchable_layers
from sketchprop.meters.noise.gradients import Loss, scalar_loss, squared_distance, squared_norms
from sketchprop.meters.restore import Buffers, call_hooks, restored
from sketchprop.sketches import Rows, RowSketch

TAU = 0.025
"""τ, of activations and of weights: the share of V_s that each sampler may add."""


@dataclass(frozen=True)
class _Samples(RowAtoms):
    """The samples that SampleA left for dX; for dW rows among them, drawn once more."""

    _: KW_ONLY
    by_row: Rows

    def draw(self, vjp: Vjp, uniforms: Uniforms = draw_uniforms) -> TwoSided:
        first = super().draw(vjp, uniforms)
        assert isinstance(first, KeptRows)
        assert vjp.X is not None
        kept = Vjp(first.values, vjp.W, take_rows(vjp.X, first.index))
        second = self.by_row(kept, uniforms)
        assert isinstance(second, KeptRows)
        index = first.index.take_along_dim(second.index, -1)
        return TwoSided(first, KeptRows(index, second.values, first.B), Whole(vjp.G))


@dataclass(frozen=True, repr=False)
class SampleW(RowSketch):
    """dX from all rows that SampleA left; dW from ``budget`` of these, in the mean, by independent
    coins with p ∝ ‖g_b‖‖x_b‖; db is exact."""

    sampling: str = "independent"

    sees: ClassVar[str] = "GX"
    by_sample: ClassVar[Rows] = Rows(1.0, by="nonzero", unit="sample")

    @property
    def by_row(self) -> Rows:
        return Rows(self.budget, by="gradient_input", unit="token", sampling="independent")

    def importance(self, vjp: Vjp) -> Tensor:
        return self.by_sample.importance(vjp)

    def atoms(self, vjp: Vjp) -> _Samples:
        vjp.input(self)
        drawn = self.by_sample.atoms(vjp)
        return _Samples(
            drawn.probabilities, drawn.rank, drawn.sampling, drawn.units, by_row=self.by_row
        )

    def keeps_all(self, B: int, n: int, d: int) -> bool:
        return super().keeps_all(B, n, d) and self.by_sample.keeps_all(B, n, d)

    def cost(self, size: Size, *, lasting: bool = False) -> Cost:
        samples = self.by_sample.cost(size._replace(weight_grad=False))
        return samples.plus(self.by_row.cost(size._replace(input_grad=False)))


@dataclass(frozen=True)
class Measured:
    """What one probe found: variances over the whole network and by layer."""

    minibatch: float
    """V_s: between batches, of all gradients."""
    activations: float
    """V_act: what SampleA adds."""
    weights: dict[str, tuple[float, float]]
    """By linear layer: V_w, what SampleW adds to dW, and V_s of that dW."""
    norms: list[list[Tensor]]
    """By block: ‖G_i‖ of the samples of each batch."""


class VCASController:
    """Moves the ratios of SampleA and SampleW while a network trains; called as ``Tuner`` is.

    Each ``every`` steps it takes the last M = ``repeats`` batches and makes M exact passes and M²
    passes with SampleA: six more passes than training for M = 2. Then, with V_s the variance
    between the batches and V_act, V_w what the samplers add:

        s ← s + α·sign(V_act - τ·V_s),   ρ_l = max_{j ≤ l} p_j(s)
        ν_l ← ν_l·β^(-sign(V_w,l - τ·V_s,l))

    p_l(s) is the smallest share of samples that holds a share s of Σ‖G_i‖ at block l. As
    published, s and ν start at 1, and nothing keeps them from growing beyond it.

    Here linear layers skip the samples that were dropped; attention's own products and the
    element-wise operations meet their zeros. Eager only: how many rows are kept depends on data.

        controller = VCASController(model, loss_fn, every=100)
        for batch in loader:
            controller(batch)
            ...                                 # train as before
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        *,
        every: int = 100,
        repeats: int = 2,
        alpha: float = 0.01,
        beta: float = 0.95,
    ) -> None:
        if repeats < 2 or every < 1:
            raise ValueError(
                f"repeats={repeats}, every={every}; a variance needs repeats=2, and every=100 "
                "probes each hundredth step"
            )
        self.model, self.loss_fn = model, loss_fn
        self.every, self.repeats = every, repeats
        self.alpha, self.beta = alpha, beta
        self.blocks = blocks_of(model)
        if not self.blocks:
            raise ValueError(f"{type(model).__name__} has no block that sketch_ knows")
        self.layers = _linear_layers(model, self.blocks)
        self.share = 1.0
        """s."""
        self.ratios = [1.0] * len(self.blocks)
        """ρ_l, from the first block on."""
        self.weight_ratios = dict.fromkeys(self.layers, 1.0)
        """ν_l, not clamped."""
        self.step = 0
        self.next_probe = 0
        self.log: list[dict[str, Any]] = []
        self._batches: deque[Any] = deque(maxlen=repeats)
        self._sampling = True
        self._norms: list[list[Tensor]] | None = None
        sp.sketch_(model, dict.fromkeys(self.layers, SampleW(1.0)))
        self._gates = ExitStack()
        for place, block in enumerate(self.blocks.values()):
            handle = block.register_forward_hook(self._gated(place))
            self._gates.callback(handle.remove)
        self._apply()

    @property
    def budgets(self) -> dict[str, float]:
        """ρ by block and ν by linear layer, as they are applied."""
        by_block = dict(zip(self.blocks, self.ratios, strict=True))
        return {**by_block, **{name: min(1.0, v) for name, v in self.weight_ratios.items()}}

    def __call__(self, batch: Any) -> dict[str, Any] | None:
        """Once for each step, before it. What was decided, if this step was probed."""
        self._batches.append(batch)
        entry = None
        if self.step >= self.next_probe and len(self._batches) == self.repeats:
            entry = self._decide()
            self.next_probe = (self.step // self.every + 1) * self.every
        self.step += 1
        return entry

    def remove(self) -> None:
        """Exact layers and no gates: the model as it was given."""
        self._gates.close()
        for layer in self.layers.values():
            sp.unsketch_(layer)

    def learn(self, found: Measured) -> None:
        """Algorithm 1's updates of s, ρ and ν."""
        excess = found.activations - TAU * found.minibatch
        self.share += self.alpha * _sign(excess)
        needed = [
            sum(holding(norms, self.share) for norms in batches) / len(batches)
            for batches in found.norms
        ]
        self.ratios = [max(needed[: place + 1]) for place in range(len(needed))]
        for name, (added, minibatch) in found.weights.items():
            excess = added - TAU * minibatch
            self.weight_ratios[name] *= self.beta ** -_sign(excess)

    def _decide(self) -> dict[str, Any]:
        found = self._probe()
        if math.isfinite(found.minibatch + found.activations):
            self.learn(found)
        self._apply()
        entry = {
            "step": self.step,
            "share": self.share,
            "relative": found.activations / max(found.minibatch, 1e-30),
            "budgets": self.budgets,
        }
        self.log.append(entry)
        return entry

    def _probe(self) -> Measured:
        """M exact passes and M² with SampleA alone."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        added = dict.fromkeys(self.layers, 0.0)
        self._norms = [[] for _ in self.blocks]
        try:
            with restored(self.model) as buffers, no_gradient_hooks(parameters):
                make = partial(self._pass, parameters, buffers, added)
                exact = [make(batch) for batch in self._batches]
                norms, self._norms = self._norms, None
                distances = [
                    squared_distance(make(batch, draw), g)
                    for batch, g in zip(self._batches, exact, strict=True)
                    for draw in range(self.repeats)
                ]
        finally:
            self._norms, self._sampling = None, True
        variances = [_variance(list(each)) for each in zip(*exact, strict=True)]
        by_parameter = dict(zip(parameters, variances, strict=True))
        of_layers = {
            name: (added[name] / len(distances), by_parameter[layer.weight])
            for name, layer in self.layers.items()
            if layer.weight in by_parameter
        }
        activations = math.fsum(distances) / len(distances)
        return Measured(math.fsum(variances), activations, of_layers, norms)

    def _pass(
        self,
        parameters: list[nn.Parameter],
        buffers: Buffers,
        added: dict[str, float],
        batch: Any,
        draw: int | None = None,
    ) -> list[Tensor]:
        """A gradient: exact, or with the draws of SampleA of that number; then what SampleW would
        add is counted, by layer."""
        buffers.restore()
        self._sampling = sampled = draw is not None
        device = parameters[0].device
        seed_generators(device, self.step)
        names = {layer: name for name, layer in self.layers.items()}

        def watch(layer: Any, args: Any, kwargs: Any, output: Tensor) -> None:
            def look(G: Tensor) -> None:
                ratio = min(1.0, self.weight_ratios[names[layer]])
                added[names[layer]] += own_variance(G, args[0], ratio)

            if sampled and output.requires_grad:
                output.register_hook(look)  # type: ignore[no-untyped-call]

        with sp.exact(self.model), call_hooks(self.layers.values(), after=watch):
            loss = scalar_loss(self.loss_fn, self.model, batch)
            seed_generators(device, self.step, -1 if draw is None else draw)
            return list(torch.autograd.grad(loss, parameters, materialize_grads=True))

    def _gated(self, place: int) -> Callable[..., Any]:
        """SampleA behind a block; in the exact passes of a probe it only looks."""

        def hook(block: nn.Module, args: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            if not (block.training and first.requires_grad):
                return output
            if self._norms is not None:
                seen = self._norms[place]
                first.register_hook(lambda G: seen.append(G.flatten(1).norm(dim=1)))
            ratio = self.ratios[place]
            if self._sampling and ratio < 1:
                kept = Rows(ratio, unit="sample", sampling="independent")
                first = sp.gate(first, kept)
            return (first, *output[1:]) if isinstance(output, tuple) else first

        return hook

    def _apply(self) -> None:
        blocks = {m: place for place, b in enumerate(self.blocks.values()) for m in b.modules()}
        for name, layer in self.layers.items():
            sketch = SampleW(min(1.0, self.weight_ratios[name]))
            # Where no sample can be missing nobody has to look for them.
            whole = sp.Split(input=None, weight=sketch.by_row)
            layer.sketching.sketch = whole if self.ratios[blocks[layer]] >= 1 else sketch

    def state_dict(self) -> dict[str, Any]:
        """Numbers, texts, lists and dicts."""
        names = ("share", "ratios", "weight_ratios", "step", "next_probe", "log")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._apply()


@torch.no_grad()
def own_variance(G: Tensor, X: Tensor, ratio: float) -> float:
    """Σ_b (1/q_b - 1)‖g_b‖²‖x_b‖²: what SampleW adds to dW, without drawing."""
    G, X = G.flatten(0, -2), X.detach().flatten(0, -2)
    rows = (G.abs().amax(-1) != 0).nonzero().flatten()
    if ratio >= 1 or len(rows) == 0:
        return 0.0
    G, X = G[rows], X[rows]
    q = SampleW(ratio).by_row.atoms(Vjp(G, None, X)).probabilities
    energies = G.square().sum(-1) * X.square().sum(-1)
    return float(((1 / q - 1) * energies).sum())


def holding(norms: Tensor, share: float) -> float:
    """p(s): the smallest share of samples that holds a share s of Σ‖G_i‖.

    >>> holding(torch.tensor([1.0, 7.0, 1.0, 1.0]), 0.7), holding(torch.ones(4), 1.01)
    (0.25, 1.0)
    """
    sums = norms.double().sort(descending=True).values.cumsum(0)
    enough = sums >= share * sums[-1] * (1 - 1e-9)
    found = int(enough.int().argmax()) + 1 if bool(enough.any()) else len(norms)
    return found / len(norms)


def _variance(gradients: list[Tensor]) -> float:
    mean = torch.stack(gradients).mean(0)
    return math.fsum(squared_norms(g - mean for g in gradients)) / (len(gradients) - 1)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _linear_layers(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, Any]:
    inner = {m for block in blocks.values() for m in block.modules()}
    return {
        name: layer
        for name, layer in sketchable_layers(model).items()
        if layer in inner and hasattr(layer, "weight") and not refusal(layer, SampleW(0.5))
    }
