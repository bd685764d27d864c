"""Pipeline stages that send sketched gradients, on ``torch.distributed.pipelining``.

Only three methods of torch's stages are overridden: ``get_bwd_send_ops``, ``get_bwd_recv_ops``
and ``backward_one_chunk``. The first two let torch make its list of messages and put a compact
buffer in the place of each dense one; the third unpacks what came before torch looks at it.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.random import random_state_kept, seed_generators
from ..layers import SketchedModule
from ..sketches import Sketch
from .settings import Settings
from .wire import WireCounter, WireFormat, check_sendable, wire_format

KIND = "pipeline gradients"
"""The kind under which a stage counts its backward messages."""


class SketchedBoundary(ABC):  # as torch's stages: only a like layout can become their class
    """Mixed into a stage's class; every stage of a pipeline must have the same sketch.

    The gradient of each received activation, ``[*, n]`` seen as rows of n, is sketched before it
    is sent to the stage before: E[Ĝ] = G, so each gradient of every earlier stage keeps its mean.
    Draws made in a stage's backward come from a random stream of its own: ranks that were seeded
    alike must not share a draw, because two layers of one backward with one draw are biased.
    """

    sketch: Sketch
    counter: WireCounter
    """Bytes sent by this stage; ``stage.counter.take()`` after a step."""

    submod: nn.Module
    device: torch.device
    stage_index: int
    num_stages: int
    group: dist.ProcessGroup | None
    args_recv_info: dict[int, Any]
    _settings: Settings
    _formats: dict[tuple[Any, ...], WireFormat | None]
    _arriving: dict[int, list[tuple[WireFormat, Tensor, Tensor]]]
    _leaving: dict[int, list[Tensor]]
    _streams: int = 0
    """Draws so far: it goes on when the sketch changes, so that no draw is repeated."""
    _inferred: object

    def set_sketch(self, sketch: Sketch) -> None:
        """A new sketch for this boundary: between steps, and on every stage alike."""
        self.sketch = sketch
        self.counter = WireCounter()
        self._formats, self._arriving, self._leaving = {}, {}, {}
        self._inferred = None
        mine = f"{type(sketch).__module__}.{sketch!r}"
        self._settings = Settings(self.group, self.stage_index, self.num_stages, mine)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops: list[dist.P2POp] = super().get_bwd_send_ops(bwd_chunk_id)  # type: ignore[misc]
        if not ops:
            return ops
        self._settings.compare(self.stage_index - 1)
        # A buffer lives until the same chunk's next message: by then its send is over.
        self._leaving[bwd_chunk_id] = []
        with self._own_stream():
            return [self._packed(op, bwd_chunk_id) for op in ops]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops: list[dist.P2POp] = super().get_bwd_recv_ops(bwd_chunk_id)  # type: ignore[misc]
        if not ops:
            return ops
        self._settings.compare(self.stage_index + 1)
        self._arriving[bwd_chunk_id] = []
        return [self._expected(op, bwd_chunk_id) for op in ops]

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._forget_inference()
        for form, buffer, dense in self._arriving.pop(bwd_chunk_id, ()):
            form.unpack(buffer, dense)
        with self._own_stream():
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)  # type: ignore[misc]

    def _packed(self, op: dist.P2POp, chunk: int) -> dist.P2POp:
        form = self._format(op.tensor)
        buffer = op.tensor if form is None else form.pack(op.tensor)
        self.counter.add(KIND, sent=buffer.nbytes, exact=op.tensor.nbytes)
        if form is None:
            return op
        self._leaving[chunk].append(buffer)
        return dist.P2POp(op.op, buffer, op.peer, op.group, op.tag)

    def _expected(self, op: dist.P2POp, chunk: int) -> dist.P2POp:
        form = self._format(op.tensor)
        if form is None:
            return op
        buffer = form.empty(op.tensor.device)
        self._arriving[chunk].append((form, buffer, op.tensor))
        return dist.P2POp(op.op, buffer, op.peer, op.group, op.tag)

    def _format(self, dense: Tensor) -> WireFormat | None:
        key = (dense.shape, dense.dtype, dense.device)
        if key not in self._formats:
            self._formats[key] = wire_format(self.sketch, dense)
        return self._formats[key]

    def _forget_inference(self) -> None:
        """Drops what layers learned from torch's inference of shapes, on uninitialised memory.

        It runs before the first step, and again after a change between training and evaluation;
        each time the stage has new receive buffers.
        """
        now = self.args_recv_info.get(0)
        if now is self._inferred:
            return
        self._inferred = now
        for module in self.submod.modules():
            if isinstance(module, SketchedModule):
                module.sketching.forget()

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """The default generators, seeded from the seed, this stage, this rank and a count."""
        device = torch.device(self.device)
        self._streams += 1
        numbers = (torch.initial_seed(), self.stage_index, dist.get_rank(), self._streams)
        with random_state_kept(device):
            seed_generators(device, *numbers)
            yield


Stage = TypeVar("Stage", bound=Any)


def sketch_stage_(stage: Stage, sketch: Sketch) -> Stage:
    """Makes ``stage`` send sketched gradients, in place, and returns it.

        stage = sketch_stage_(PipelineStage(module, index, count, device), sp.Rows(0.1))
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss)

    Takes a ``PipelineStage``, or a stage of the tracing front end (``pipe.build_stage``). Call it
    on every stage, before a step; again to change the sketch. ``sketch``: any with
    ``sampling="fixed"`` that looks at the gradient alone; ``stage.counter`` counts the bytes that
    are sent. With budget 1.0 messages are torch's own, bit by bit. The neighbours' settings are
    compared before the first message; a mismatch is an error on both.
    """
    if not all(hasattr(stage, name) for name in ("get_bwd_send_ops", "get_bwd_recv_ops")):
        raise TypeError(
            f"{type(stage).__name__} is no pipeline stage; give a stage of "
            "torch.distributed.pipelining, a PipelineStage or what pipe.build_stage returns"
        )
    check_sendable(sketch)
    if not isinstance(stage, SketchedBoundary):
        plain: Any = type(stage)
        stage.__class__ = _sketched_class(plain)
    stage.set_sketch(sketch)
    return stage


@cache
def _sketched_class(plain: type) -> type:
    """One class for each class of stages."""
    return type(
        f"Sketched{plain.__name__.lstrip('_')}", (SketchedBoundary, plain), {"__module__": __name__}
    )
