"""The same random numbers in two forward passes: all samples first, some of them again.

A dropout mask of the kept samples must be the rows that they had in the mask of the whole batch.
So in the second pass each random operation starts from the random state that it had in the first,
draws for the whole batch again, and only the rows of the kept samples are used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.checks import wide_dtype

_aten = torch.ops.aten
State = tuple[Tensor, Tensor | None]


def random_state(device: torch.device) -> State:
    """Of the CPU's default generator and of the device's own."""
    if device.type == "cpu":
        return torch.get_rng_state(), None
    return torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device)


def set_random_state(state: State, device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.get_device_module(device).set_rng_state(state[1], device)


def same_state(one: State, other: State) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


class Draw(NamedTuple):
    """One random operation of the first pass."""

    operation: Any
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    state: State
    """Of the generators, before it."""
    marks: dict[int, Tensor]
    """For axes that may be samples × something: a number for each entry of the input along it."""


class _RandomOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands random operations, and the tensor each one is for, to ``at_random``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._empty: tuple[Tensor, Tensor] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = func.overloadpacket
        if torch.Tag.nondeterministic_seeded in func.tags and _is_random(func, args):
            source = args[0] if args and isinstance(args[0], Tensor) else None
            if self._empty is not None and source is self._empty[0]:
                source = self._empty[1]
            elif operation in _IN_PLACE:
                source = None  # an empty tensor of unknown origin
            self._empty = None
            if kwargs.get("generator") is not None:
                raise RuntimeError(
                    f"{func} draws from a generator of the model's own, and sampled_loss cannot "
                    "repeat that for the kept samples; leave out generator=..."
                )
            return self.at_random(func, args, kwargs, source)
        out = func(*args, **kwargs)
        # On the CPU dropout is empty_like(x).bernoulli_(): only the first of them sees x.
        if operation is _aten.empty_like:
            self._empty = (out, args[0])
        return out

    def at_random(self, func: Any, args: Any, kwargs: Any, source: Tensor | None) -> Any:
        raise NotImplementedError


class Recorder(_RandomOperations):  # type: ignore[no-untyped-call]
    """Notes each random operation of a forward pass over ``samples``."""

    def __init__(self, device: torch.device, samples: int) -> None:
        super().__init__()
        self.device, self.samples = device, samples
        self.draws: list[Draw] = []
        self._end: State | None = None
        self._gap = False

    def at_random(self, func: Any, args: Any, kwargs: Any, source: Tensor | None) -> Any:
        state = random_state(self.device)
        self._gap |= self._end is not None and not same_state(self._end, state)
        marks = {} if source is None else _marks(source, self.samples)
        out = func(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        self.draws.append(
            Draw(func.overloadpacket, first.dtype, first.shape, first.stride(), state, marks)
        )
        self._end = random_state(self.device)
        return out

    def saw_all(self, before: State, after: State) -> bool:
        """Whether nothing else has moved the generators (compiled code would, unseen)."""
        if self._end is None:
            return same_state(before, after)
        whole = same_state(before, self.draws[0].state) and same_state(self._end, after)
        return whole and not self._gap


class Replay(_RandomOperations):  # type: ignore[no-untyped-call]
    """Random operations with the rows of the samples ``kept`` among those of ``recorder``."""

    def __init__(self, recorder: Recorder, kept: Tensor) -> None:
        super().__init__()
        self.recorder, self.kept = recorder, kept
        self._place = 0

    def at_random(self, func: Any, args: Any, kwargs: Any, source: Tensor | None) -> Any:
        draws = self.recorder.draws
        wanted = draws[self._place] if self._place < len(draws) else None
        if wanted is None or not self._is_same(wanted, func, args, kwargs):
            if _is_a_sketch(func, kwargs):
                return func(*args, **kwargs)
            raise RuntimeError(
                f"{func} draws in the second forward pass and did not in the first: sampled_loss "
                "needs a model whose random operations do not depend on the data"
            )
        _refuse_checkpoints()
        self._place += 1
        now = random_state(self.recorder.device)
        set_random_state(wanted.state, self.recorder.device)
        try:
            return self._again(func, args, kwargs, wanted, source)
        finally:
            set_random_state(now, self.recorder.device)

    def refuse_rest(self) -> None:
        """An error if the first pass drew more than the second."""
        left = self.recorder.draws[self._place :]
        if left:
            raise RuntimeError(
                f"{left[0].operation} draws in the first forward pass and did not in the second: "
                "sampled_loss needs a model whose random operations do not depend on the data"
            )

    def _is_same(self, wanted: Draw, func: Any, args: Any, kwargs: Any) -> bool:
        if func.overloadpacket is not wanted.operation:
            return False
        if func.overloadpacket not in _KNOWN:
            return True
        shape = args[0].shape if isinstance(args[0], Tensor) else tuple(args[0])
        if len(shape) != len(wanted.shape):
            return False
        dtype = args[0].dtype if isinstance(args[0], Tensor) else kwargs.get("dtype")
        if dtype is not None and dtype != wanted.dtype:
            return False
        sizes = zip(wanted.shape, shape, strict=True)
        return all(full == part or self._each(full, part) is not None for full, part in sizes)

    def _each(self, full: int, part: int) -> int | None:
        """Entries for each sample of an axis that has ``part`` of ``full``; None if it is none."""
        each, rest = divmod(full, self.recorder.samples)
        return None if rest or each * self.kept.shape[0] != part else each

    def _again(self, func: Any, args: Any, kwargs: Any, wanted: Draw, source: Tensor | None) -> Any:
        operation = wanted.operation
        if operation is _aten.native_dropout:
            x, p, _ = args
            mask = self._rows(func(_empty(wanted, x).fill_(1), p, True)[1], x.shape, wanted, source)
            return x * mask / (1 - p), mask
        if operation in _IN_PLACE and not any(isinstance(a, Tensor) for a in args[1:]):
            x = args[0]
            whole = func(_empty(wanted, x), *args[1:], **kwargs)
            return x.copy_(self._rows(whole, x.shape, wanted, source))
        if operation in _FACTORIES:
            whole = func(list(wanted.shape), *args[1:], **kwargs)
            return self._rows(whole, torch.Size(args[0]), wanted, source)
        if operation in _LIKE:
            whole = func(_empty(wanted, args[0]), *args[1:], **kwargs)
            return self._rows(whole, args[0].shape, wanted, source)
        out = func(*args, **kwargs)
        if (out[0] if isinstance(out, tuple) else out).shape == wanted.shape:
            return out  # one draw for the whole batch: an order of the tokens, a layer to skip
        raise RuntimeError(
            f"sampled_loss cannot repeat {func} with the same random numbers; for attention with "
            "dropout use the math kernel: with torch.nn.attention.sdpa_kernel("
            "torch.nn.attention.SDPBackend.MATH): ..."
        )

    def _rows(
        self, whole: Tensor, shape: torch.Size, wanted: Draw, source: Tensor | None
    ) -> Tensor:
        """Of numbers for all samples those of the kept ones."""
        for dim, (full, part) in enumerate(zip(whole.shape, shape, strict=True)):
            if full == part:
                continue
            each = self._each(full, part)
            index = self.kept if each == 1 else self._merged(dim, full, wanted, source)
            whole = whole.index_select(dim, index)
        return whole

    def _merged(self, dim: int, full: int, wanted: Draw, source: Tensor | None) -> Tensor:
        """The entries of the kept samples along an axis of samples × something.

        Shapes do not say in which order a model has flattened [before, samples, after], so the
        entries' marks are compared, of the first pass and of this one. Waits for the device.
        """
        samples = self.recorder.samples
        places = torch.arange(full, device=self.kept.device)
        orders = [n for n in range(1, full // samples + 1) if full // samples % n == 0]
        candidates = [
            places.view(before, samples, -1).index_select(1, self.kept).flatten()
            for before in orders
        ]
        if dim in wanted.marks and source is not None:
            mark, first = _mark(source, dim), wanted.marks[dim]
            off = [float((first[index] - mark).square().nansum()) for index in candidates]
            scale = float(mark.square().nansum())
            best, *others = sorted(off)
            # 16 and 0.01 for squares: four times nearer than the next, and within a tenth.
            if best < 0.01 * scale and all(16 * best < other for other in others):
                return candidates[off.index(best)]
        raise RuntimeError(
            f"{wanted.operation} draws numbers of shape {tuple(wanted.shape)} for {samples} "
            f"samples: which of the {full} entries of axis {dim} belong to a sample cannot be "
            "seen. Apply dropout while the samples still have an axis of their own: "
            "dropout(x).flatten(0, 1) instead of dropout(x.flatten(0, 1))"
        )


def _empty(wanted: Draw, like: Tensor) -> Tensor:
    return torch.empty_strided(wanted.shape, wanted.stride, dtype=like.dtype, device=like.device)


def _marks(x: Tensor, samples: int) -> dict[int, Tensor]:
    axes = range(x.dim() - 1)  # the last one has features
    return {d: _mark(x, d) for d in axes if x.shape[d] > samples and x.shape[d] % samples == 0}


def _mark(x: Tensor, dim: int) -> Tensor:
    """A weighted sum of each entry along ``dim``; a plain one is the same for all of a softmax."""
    rows = x.detach().movedim(dim, 0).flatten(1)
    factors = torch.arange(rows.shape[1], device=x.device, dtype=torch.float32).cos()
    return (rows * factors).sum(-1)


_IN_PLACE = {_aten.bernoulli_, _aten.uniform_, _aten.normal_, _aten.exponential_, _aten.random_}
_FACTORIES = {_aten.rand, _aten.randn}
_LIKE = {_aten.rand_like, _aten.randn_like}
_KNOWN = _IN_PLACE | _FACTORIES | _LIKE | {_aten.native_dropout}


def _is_random(func: Any, args: Any) -> bool:
    """Attention is tagged as random and draws only where it drops; so is dropout in eval mode."""
    if func.overloadpacket is _aten.native_dropout:
        return bool(args[2]) and args[1] > 0
    if "attention" in func.name():
        names = [a.name for a in func._schema.arguments]
        place = names.index("dropout_p") if "dropout_p" in names else len(args)
        return place < len(args) and args[place] > 0
    return True


def _is_a_sketch(func: Any, kwargs: dict[str, Any]) -> bool:
    """Layers that draw in forward do so only with a graph, and as ``draw_uniforms`` does: such
    numbers are no part of the model and must be new."""
    device = torch.empty(0, device=kwargs.get("device"))
    return func.overloadpacket is _aten.rand and kwargs.get("dtype") == wide_dtype(device)


def _refuse_checkpoints() -> None:
    """A recomputation in backward would draw other masks: it runs outside of the replay."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    inside = hooks is not None and "checkpoint" in getattr(hooks[0], "__module__", "")
    if inside or not torch.is_grad_enabled():
        raise RuntimeError(
            "sampled_loss cannot repeat dropout inside activation checkpointing; switch one of "
            "them off (sampled_loss keeps only the activations of the kept samples anyway)"
        )
