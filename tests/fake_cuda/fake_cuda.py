"""Every public path on fake CUDA tensors: shapes, dtypes and devices without numbers or a GPU.

``python fake_cuda.py layers``, with what ``guard.cpp`` compiles to in LD_PRELOAD, runs a group of
cases and prints for each a line of JSON: its name, and what was wrong.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import sketchprop as sp
from sketchprop import select, zoo
from sketchprop.distributed.wire import wire_format
from sketchprop.layers import SketchedBlock
from sketchprop.sketches import Every, ForwardRows

aten = torch.ops.aten
Gradients = Iterable[Tensor | None]


class Watch(TorchDispatchMode):
    """Notes what goes from one device to another, and what waits for the device.

    A fake tensor has no number to read and raises. With ``reads`` it is noted, and the number is
    1: for meters, whose results are numbers.
    """

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.reads = reads
        self.copies: list[str] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, kwargs = func.overloadpacket, kwargs or {}
        given = tensors(args, kwargs)
        if packet is aten.equal and types == ():
            with unset_fake_temporarily():  # states of generators, which live on the host
                return func(*args, **kwargs)
        if packet is aten._local_scalar_dense and self.reads and args[0].is_cuda:
            self.waits.append(str(packet))
            return 1.0 if args[0].is_floating_point() else 1
        result = func(*args, **kwargs)
        # In these the wait is inside of the kernel.
        if packet in (aten._linalg_eigh, aten._linalg_svd):
            self.waits.append(str(packet))
        # A single number on the host is an argument of a kernel, unless it is copied.
        copies = packet in (aten.copy_, aten._to_copy)
        if len({t.device for t in (*given, *tensors(result)) if copies or t.dim()}) > 1:
            self.copies.append(str(packet))
        return result


def tensors(*values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


def backward(model: nn.Module, *inputs: Tensor, **named: Tensor) -> Gradients:
    """One pass; where blocks are sketched all of them run on kept tokens, with nothing exact."""
    out = model(*inputs, **named)
    (out if isinstance(out, Tensor) else out.loss).float().square().mean().backward()
    blocks = [m for m in model.modules() if isinstance(m, SketchedBlock)]
    notes = {m.sketching.note or m.sketching.proof or "" for m in blocks} - {""}
    assert not notes, notes
    return [t.grad for t in (*model.parameters(), *inputs) if t.requires_grad]


def layers(sketch: Any, *modules: nn.Module, shape: tuple[int, ...], **options: Any) -> Gradients:
    model = sp.sketch_(nn.Sequential(*modules), sketch, select.everything, **options)
    assert all("Sketched" in type(m).__name__ for m in model[::2])
    return backward(model, torch.randn(shape, requires_grad=True))


def linear(sketch: Any, **options: Any) -> Gradients:
    parts = nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 64)
    return layers(sketch, *parts, shape=(8, 6, 32), **options)


def conv(sketch: Any) -> Gradients:
    parts = nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, groups=2)
    return layers(sketch, *parts, shape=(8, 8, 16, 16))


def vit(tokens: sp.Tokens, run: Callable[..., Gradients] = backward, **options: Any) -> Gradients:
    model = sp.sketch_(zoo.ViT(dim=32, depth=2, hidden=64, **options), tokens)
    return run(model, torch.randn(4, 3, 32, 32))


def under_autocast(model: nn.Module, x: Tensor) -> Gradients:
    with torch.autocast("cuda", torch.bfloat16):
        return backward(model, x)


def under_checkpoint(model: Any, x: Tensor) -> Gradients:
    model.blocks.forward = partial(checkpoint, model.blocks.forward, use_reentrant=False)
    return backward(model, x)


def compiled(model: Any, x: Tensor) -> Gradients:
    torch.compile(model, fullgraph=True, backend="aot_eager")(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


def scaled(model: nn.Module, x: Tensor) -> Gradients:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [p.grad for p in model.parameters()]


def attention(**options: Any) -> Gradients:
    q, k, v = (torch.randn(4, 4, 16, 8, requires_grad=True) for _ in range(3))
    sp.kept_attention(q, k, v, queries=0.3, **options).square().sum().backward()
    return [q.grad, k.grad, v.grad]


def through(f: Callable[[Tensor], Tensor], *more: Tensor) -> Gradients:
    x = torch.randn(4, 16, 32, requires_grad=True)
    f(x).square().sum().backward()
    return [t.grad for t in (x, *more)]


def branch(*parts: nn.Module, **options: Any) -> Gradients:
    f = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), *parts, nn.Linear(64, 32))
    return through(lambda x: sp.branch(f, x, 0.3, **options), *f.parameters())


def encoder(**options: Any) -> Gradients:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)
    return backward(sp.sketch_(layer, sp.Tokens(0.2)), torch.randn(4, 16, 32, requires_grad=True))


def language_model(name: str, **options: Any) -> Gradients:
    import transformers as hf

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    config = getattr(hf, f"{name}Config")(**sizes, intermediate_size=64, pad_token_id=0)
    model = getattr(hf, f"{name}ForSequenceClassification")(config).train()
    ids = torch.ones(4, 16, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids[:, 0], "attention_mask": ids}
    return backward(sp.sketch_(model, sp.Tokens(0.2, **options)), **batch)


def packed(sketch: sp.Sketch) -> Gradients:
    grad = torch.randn(4, 16, 64)
    form = wire_format(sketch, grad)
    assert form is not None
    form.unpack(form.pack(grad), out := torch.empty_like(grad))
    return [out]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def measured() -> Gradients:
    model, batches = zoo.ViT(dim=32, depth=2, hidden=64), [torch.randn(4, 3, 32, 32)] * 2
    report = sp.measure(model, loss_of, batches, sp.Tokens(0.2), draws=2)
    assert report.flops.kept < 1 and report.sketched_memory.total
    return []


def advised() -> Gradients:
    model, batches = zoo.ViT(dim=32, depth=2, hidden=64), [torch.randn(4, 3, 32, 32)] * 2
    sp.advise(model, loss_of, batches, minutes=0.05)
    return []


def tuned() -> Gradients:
    model, x = zoo.ViT(dim=32, depth=2, hidden=64), torch.randn(4, 3, 32, 32)
    tuner = sp.Tuner(sp.sketch_(model, sp.Tokens(0.2)), loss_of, share=1.0)
    while tuner(x) is None:
        pass
    return []


SKETCHES = {
    **{repr(s): s for s in (sp.L1(0.25), sp.L1(0.25, root=True), sp.L2(0.25), sp.Variance(0.25))},
    **{repr(s): s for s in (sp.Diagonal(0.25), sp.ColumnMask(0.25), sp.SampleMask(0.25))},
    **{repr(s): s for s in (sp.ElementMask(0.25), ForwardRows(0.25), sp.Rows(0.25))},
    **{repr(s): s for s in (sp.Rows(0.25, unit="sample"), sp.Rows(0.25, by="gradient_input"))},
    **{repr(s): s for s in (sp.Rows(0.25, by="uniform"), sp.Rows(0.25, then=sp.L1(0.25)))},
    "Split": sp.Split(input=sp.Rows(0.25), weight=ForwardRows(0.25)),
}
