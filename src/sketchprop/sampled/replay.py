"""The same random numbers in two forward passes: all samples first, some of them again.

A dropout mask of the kept samples must be the rows that they had in the mask of the whole batch.
So the second pass starts from the random state of the first, each random operation draws for the
whole batch again, and only the rows of the kept samples are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


def _key(state: State) -> bytes:
    return b"".join(part.numpy().tobytes() for part in state if part is not None)


def same_state(one: State, other: State) -> bool:
    return _key(one) == _key(other)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the shape that each random operation had, by the state it started from."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.shapes: dict[bytes, tuple[torch.Size, tuple[int, ...]]] = {}
        self._end: bytes | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags or not _draws(func, args):
            return func(*args, **(kwargs or {}))
        key = _key(random_state(self.device))
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple) else out
        self.shapes[key] = (first.shape, first.stride())
        self._end = _key(random_state(self.device))
        return out

    def saw_all(self, before: State, after: State) -> bool:
        """Whether nothing else has moved the generators (compiled code would, unseen)."""
        if same_state(before, after):
            return True
        return _key(before) in self.shapes and self._end == _key(after)


class Replay(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random operations with the rows ``kept`` of ``samples`` that ``recorder`` has noted."""

    def __init__(self, recorder: Recorder, kept: Tensor, samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder, self.kept, self.samples = recorder, kept, samples

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not _draws(func, args):
            return func(*args, **kwargs)
        _refuse_checkpoints()
        noted = self.recorder.shapes.get(_key(random_state(self.recorder.device)))
        if noted is None:
            raise RuntimeError(
                f"{func} draws in the second forward pass and did not in the first: sampled_loss "
                "needs a model whose random operations do not depend on the data"
            )
        return self._again(func, args, kwargs, *noted)

    def _again(
        self, func: Any, args: Any, kwargs: Any, shape: torch.Size, stride: tuple[int, ...]
    ) -> Any:
        name = func.overloadpacket
        if name is _aten.native_dropout:
            x, p, _ = args
            whole = torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device).fill_(1)
            mask = self._rows(func(whole, p, True)[1], x.shape)
            return x * mask / (1 - p), mask
        if name in _IN_PLACE and not any(isinstance(a, Tensor) for a in args[1:]):
            x = args[0]
            whole = torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device)
            return x.copy_(self._rows(func(whole, *args[1:], **kwargs), x.shape))
        if name in _FACTORIES:
            return self._rows(func(list(shape), *args[1:], **kwargs), torch.Size(args[0]))
        if name in _LIKE:
            x = args[0]
            whole = torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device)
            return self._rows(func(whole, *args[1:], **kwargs), x.shape)
        raise RuntimeError(
            f"sampled_loss cannot repeat {func} with the same random numbers; for attention with "
            "dropout use the math kernel: with torch.nn.attention.sdpa_kernel("
            "torch.nn.attention.SDPBackend.MATH): ..."
        )

    def _rows(self, whole: Tensor, shape: torch.Size) -> Tensor:
        """Of numbers for all samples those of the kept ones."""
        r = self.kept.shape[0]
        for dim, (full, part) in enumerate(zip(whole.shape, shape, strict=True)):
            if full == part:
                continue
            if full % self.samples or full // self.samples * r != part:
                break
            # An axis of samples × heads is sample by sample.
            each = full // self.samples
            index = self.kept.unsqueeze(-1) * each + torch.arange(each, device=self.kept.device)
            whole = whole.index_select(dim, index.flatten())
        if whole.shape != shape:
            raise RuntimeError(
                f"random numbers of shape {tuple(whole.shape)} for {self.samples} samples do not "
                f"fit those of shape {tuple(shape)} for {r}: no axis counts the samples"
            )
        return whole


_IN_PLACE = {_aten.bernoulli_, _aten.uniform_, _aten.normal_, _aten.exponential_, _aten.random_}
_FACTORIES = {_aten.rand, _aten.randn}
_LIKE = {_aten.rand_like, _aten.randn_like}


@contextmanager
def replayed(recorder: Recorder | None, start: State, kept: Tensor, samples: int) -> Iterator[None]:
    """A forward pass with the random numbers of the recorded one; the state moves on after it."""
    if recorder is None or not recorder.shapes:
        yield
        return
    now = random_state(recorder.device)
    set_random_state(start, recorder.device)
    try:
        with Replay(recorder, kept, samples):
            yield
    finally:
        set_random_state(now, recorder.device)


def _draws(func: Any, args: Any) -> bool:
    """Attention is tagged as random and draws only where it drops; so is dropout in eval mode."""
    if func.overloadpacket is _aten.native_dropout:
        return bool(args[2]) and args[1] > 0
    if "attention" in func.name():
        names = [a.name for a in func._schema.arguments]
        place = names.index("dropout_p") if "dropout_p" in names else len(args)
        return place < len(args) and args[place] > 0
    return True


def _refuse_checkpoints() -> None:
    """A recomputation in backward would draw other masks: it runs outside of the replay."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    inside = hooks is not None and "checkpoint" in getattr(hooks[0], "__module__", "")
    if inside or not torch.is_grad_enabled():
        raise RuntimeError(
            "sampled_loss cannot repeat dropout inside activation checkpointing; switch one of "
            "them off (sampled_loss keeps only the activations of the kept samples anyway)"
        )
