"""DDP that all-reduces only the kept rows of a sketched weight's gradient.

A column sketch leaves dW with r rows that are not zero. Ranks that keep the *same* columns need
to reduce those rows only. For that they share each step's draw: the weights of the last step are
summed over the ranks, once, before the forward pass; rank 0 draws and tells the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ..core.compact import ColumnAtoms
from ..core.importance import column_sums
from ..core.probabilities import solve_dtype, water_fill
from ..core.sampling import Uniforms, draw_uniforms
from ..core.vjp import Vjp
from ..layers import SketchedLinear
from ..sketches import ColumnSketch, Planner, Sketch
from ..sketches.planners import floored
from .wire import WireCounter

ROWS, DENSE, WEIGHTS = "gradients", "gradients, dense", "weights and draws"
"""The kinds under which bytes are counted: buckets with kept rows, without, and what it costs."""


@dataclass(frozen=True)
class _Agreed(ColumnAtoms):
    """Columns that all ranks keep in this step."""

    index: Tensor = field(kw_only=True)
    scale: Tensor = field(kw_only=True)

    def choose(self, uniforms: Uniforms = draw_uniforms) -> tuple[Tensor, Tensor]:
        return self.index, self.scale


class SharedDraw(Planner):
    """One layer's columns for this step, the same on all ranks."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.used = False
        """In this call of the model."""
        self._zeros = torch.zeros(columns, device=device)
        self.begin(None)

    def begin(self, sketch: ColumnSketch | None, index: Any = None, scale: Any = None) -> None:
        """A step for which all ranks agreed on columns, or on none: then each draws its own."""
        self.sketch, self.index, self.scale = sketch, index, scale
        self.forget()

    def forget(self) -> None:
        """Nothing was seen, nothing kept."""
        self.weights, self.kept_rows = self._zeros, self._zeros.bool()
        self.used_twice = False

    def atoms(self, sketch: Sketch, vjp: Vjp) -> ColumnAtoms:
        assert isinstance(sketch, ColumnSketch)
        G = vjp.G
        weights = sketch.roots(vjp).square()
        self.weights = self.weights + weights
        # Two uses in one call of the model may lie above each other: with one draw they are biased.
        # Backward passes cannot tell: a reentrant checkpoint has one of its own.
        self.used_twice |= self.used
        self.used = True
        if self.index is None or sketch != self.sketch or self.used_twice:
            index, scale = sketch.atoms(vjp).choose()
        else:
            # Columns that are not kept are not looked at; a non-finite one must be seen.
            index, scale = self.index, self.scale + 0 * column_sums(G).sum()
        self.kept_rows.index_fill_(0, index, True)
        return _Agreed(weights, sketch.rank(G.shape[-1]), index=index, scale=scale)


@dataclass(eq=False)
class _Layer:
    name: str
    module: SketchedLinear
    dense: bool = False
    """Agreed by all ranks: its gradient has rows that its draw did not keep."""

    def __post_init__(self) -> None:
        device = self.module.weight.device
        self.draw = SharedDraw(self.module.out_features, device)
        self.spoiled = torch.zeros((), device=device)
        """1 where this rank saw such rows in this step, still on the device."""

    @property
    def sketch(self) -> ColumnSketch:
        if "sketching" not in vars(self.module):
            raise RuntimeError(
                f"layer {self.name!r} shares its draws between ranks and is no longer sketched; "
                "build the DistributedDataParallel anew after unsketch_"
            )
        sketch = self.module.sketch
        assert isinstance(sketch, ColumnSketch)
        return sketch

    @property
    def rank(self) -> int:
        return int(self.sketch.rank(self.module.out_features))

    def stray(self, grad: Tensor) -> Tensor:
        """1 where ``grad`` has rows outside of what was drawn, 0 where not; no waiting."""
        unseen = grad.ne(0).any(1) & ~self.draw.kept_rows  # NaN is not 0
        stray = (unseen.any() | self.draw.used_twice).to(grad.dtype)
        self.spoiled = torch.maximum(self.spoiled, stray)
        return stray


class SharedDraws:
    """The handle from ``share_draws_``; ``counter`` counts the bytes that this rank reduces."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.counter = WireCounter()
        self._group: dist.ProcessGroup = model.process_group
        self._world = dist.get_world_size(self._group)
        self._layers = [_Layer(name, module) for name, module in _candidates(model.module)]
        _compare_layers(self._layers, self._group)
        self._owner = {layer.module.weight: layer for layer in self._layers}
        self._finished = False
        self._dense_next = self._dense_now = False
        for layer in self._layers:
            layer.module.sketching.planner = layer.draw
        model.register_forward_pre_hook(self._begin)
        # Without annotations: DDP would compare them with classes, and here they are strings.
        model.register_comm_hook(None, lambda state, bucket: self._reduce(bucket))

    def sharing(self) -> tuple[str, ...]:
        """Names of the layers whose rows are reduced; the others' gradients are dense."""
        return tuple(layer.name for layer in self._layers if not layer.dense)

    def reduce_densely_once(self) -> None:
        """Makes the next step's gradients dense on all ranks, whichever rank calls it.

        Call it before a step that uses a layer without its shared draw, as under ``exact``.
        """
        self._dense_next = True

    def _begin(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        for layer in self._layers:
            layer.draw.used = False
        if model._join_config.enable:  # type: ignore[union-attr]
            # Ranks that have no more batches answer reductions, but do not agree on draws.
            self._dense_now = True
            for layer in self._layers:
                layer.draw.begin(layer.sketch)
        elif self._finished:
            self._finished = False
            self._agree()

    def _agree(self) -> None:
        """One all-reduce and one broadcast: what the last step saw, what the next one keeps."""
        layers = [layer for layer in self._layers if not layer.dense]
        if not layers:
            return
        device = layers[0].module.weight.device
        parts = [_of_layer(layer) for layer in layers]
        seen = torch.cat([*parts, torch.tensor([float(self._dense_next)], device=device)])
        dist.all_reduce(seen, group=self._group)
        self._dense_next = False
        *parts, wish = torch.split(seen, [*(len(part) for part in parts), 1])
        _check_ranks(layers, parts, self._world)
        for layer, part in zip(layers, parts, strict=True):
            layer.dense = bool(part[0] > 0)
            layer.spoiled.zero_()
        drawn = [_draw(layer, part[3:]) for layer, part in zip(layers, parts, strict=True)]
        draws = torch.cat(drawn)
        dist.broadcast(draws, src=dist.get_global_rank(self._group, 0), group=self._group)
        self.counter.add(WEIGHTS, sent=seen.nbytes + draws.nbytes, exact=0)
        self._dense_now = bool(wish > 0)
        for layer, own in zip(layers, torch.split(draws, [len(d) for d in drawn]), strict=True):
            index, scale = own.chunk(2)
            shared = (index.long(), scale.view(torch.float32))
            layer.draw.begin(layer.sketch, *(() if layer.dense or self._dense_now else shared))
            if layer.dense:
                layer.module.sketching.planner = None

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer, grads = bucket.buffer(), bucket.gradients()
        self._finished |= bucket.is_last()
        owners = [self._owner.get(p) for p in bucket.parameters()]
        stray = {
            layer: layer.stray(grad)
            for layer, grad in zip(owners, grads, strict=True)
            if layer is not None and not layer.dense and not self._dense_now
        }
        by_rows = [layer for layer in stray if layer.draw.index is not None]
        if not by_rows:
            self.counter.add(DENSE, sent=buffer.nbytes, exact=buffer.nbytes)
            return self._all_reduce(buffer).then(lambda done: done.value()[0])
        indices = [o.draw.index if o in by_rows else None for o in owners]
        pieces = [
            (grad if index is None else grad.index_select(0, index)).flatten()
            for grad, index in zip(grads, indices, strict=True)
        ]
        message = torch.cat([*pieces, torch.stack([stray[layer] for layer in by_rows])])
        self.counter.add(ROWS, sent=message.nbytes, exact=buffer.nbytes)

        def unpack(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            sizes = [*(len(piece) for piece in pieces), len(by_rows)]
            *reduced, flags = torch.split(done.value()[0], sizes)
            _refuse_stray(by_rows, flags)
            for grad, index, piece in zip(grads, indices, reduced, strict=True):
                if index is None:
                    grad.copy_(piece.view_as(grad))
                else:  # the other rows are zero on every rank
                    grad.index_copy_(0, index, piece.view(len(index), -1))
            return buffer

        return self._all_reduce(message).then(unpack)

    def _all_reduce(self, message: Tensor) -> torch.futures.Future[list[Tensor]]:
        message.div_(self._world)  # first, as DDP does
        work = dist.all_reduce(message, group=self._group, async_op=True)
        assert work is not None
        future: torch.futures.Future[list[Tensor]] = work.get_future()
        return future


def share_draws_(model: DistributedDataParallel) -> SharedDraws:
    """Makes ``model`` all-reduce only the kept rows of its sketched linear layers' gradients.

    Registers a communication hook (DDP takes one) and returns a ``SharedDraws``, which counts its
    bytes. The first step is dense. Then a layer's probabilities come from the importance in the
    last step, with a floor, so that the gradient stays unbiased. Call it on every rank, after
    ``sketch_`` and before training.

    Only linear layers with a column sketch (L1, L2, Diagonal, ...) of a fixed size send kept rows.
    All else is reduced densely: biases, other layers, tied weights, weights that the first step
    uses exactly or twice, and everything under ``model.join()`` and after it (torch does not say
    when it has ended).

    **It costs variance.** Independent draws, the default of DDP, average out over the ranks: the
    noise that sketches add falls with their number. A shared draw does not: where the ranks'
    gradients are alike its variance is up to world-size times higher. Share draws where the
    all-reduce is what you wait for.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"{type(model).__name__} is not wrapped; give DistributedDataParallel(model)"
        )
    return SharedDraws(model)


def _candidates(model: nn.Module) -> list[tuple[str, SketchedLinear]]:
    names: Counter[Tensor] = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is SketchedLinear
        and isinstance(module.sketch, ColumnSketch)
        and module.sketch.sampling == "fixed"
        and module.sketch.rank(module.out_features) < module.out_features
        and module.weight.requires_grad
        and names[module.weight] == 1
    ]


def _compare_layers(layers: Sequence[_Layer], group: dist.ProcessGroup) -> None:
    mine = {layer.name: repr(layer.sketch) for layer in layers}
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        for name in {**everyone[0], **theirs}:
            here, there = everyone[0].get(name, "exact"), theirs.get(name, "exact")
            if here != there:
                raise ValueError(
                    f"layer {name!r} has {here} on rank 0 and {there} on rank {rank}; to share "
                    "draws sketch the model alike on every rank"
                )


def _of_layer(layer: _Layer) -> Tensor:
    """[stray rows seen, r, r², weights...] of this rank."""
    size = layer.spoiled.new_tensor([layer.rank, layer.rank**2])
    return torch.cat([layer.spoiled.view(1), size, layer.draw.weights]).float()


def _check_ranks(layers: Sequence[_Layer], parts: Sequence[Tensor], world: int) -> None:
    sums = torch.stack([part[1:3] for part in parts]).tolist()
    for layer, (total, squares) in zip(layers, sums, strict=True):
        # Equal only where all are equal (Cauchy-Schwarz), and every rank finds the same.
        if abs(world * squares - total**2) > 1e-3 * total**2 / world**2:
            raise ValueError(
                f"layer {layer.name!r} keeps {layer.rank} rows here, and the ranks keep "
                f"{total / world:g} on average; change budgets on every rank in the same step"
            )


def _draw(layer: _Layer, weights: Tensor) -> Tensor:
    """[indices, 1/p as bits] in int32; what rank 0 makes is what counts."""
    r = layer.rank
    index, scale = floored(ColumnAtoms(water_fill(weights.sqrt(), r), r)).choose()
    bits = scale.to(solve_dtype(weights)).float().view(torch.int32)
    return torch.cat([index.to(torch.int32), bits])


def _refuse_stray(layers: Sequence[_Layer], flags: Tensor) -> None:
    if not bool((flags > 0).any()):
        return
    names = [repr(layer.name) for layer, flag in zip(layers, flags.tolist(), strict=True) if flag]
    raise RuntimeError(
        f"the gradient of {', '.join(names)} has rows that the shared draw did not keep: on some "
        "rank the weight was used twice, exactly, or with another sketch in this step, or its "
        "gradient was not cleared after the last one. Call zero_grad() after each step, and "
        "reduce_densely_once() before a step with exact uses, or leave the layer exact"
    )
