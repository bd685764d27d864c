"""Public paths on fake CUDA tensors: shapes and devices, without numbers and without a GPU.

Each group of cases runs in a process of its own, in which ``fake_cuda.cpp`` stands in for CUDA:
all gradients are there and on the device, nothing waits for it and nothing is copied.
Not here: ``trial``, which tells batches apart by their numbers; DDP, whose reducer reads memory.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import sketchprop as sp
from benchmarks import launches
from sketchprop import Rows, Tokens, select, zoo
from sketchprop.distributed.pipeline import SketchedBoundary
from sketchprop.layers import SketchedBlock
from sketchprop.sketches import Every, ForwardRows

aten = torch.ops.aten
Gradients = Iterable[Tensor | None]


class Watch(TorchDispatchMode):
    """Notes what goes from one device to another, and what waits for the device.

    A fake tensor raises where a number of it is asked for. With ``reads`` that is noted, and the
    number is 1: for meters, whose results are numbers.
    """

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.copies: list[str] = []
        self.waits: list[str] = []
        self.kernels = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # else torch.compile leaves everything as it is

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, kwargs = func.overloadpacket, kwargs or {}
        if packet is aten.equal and not types:
            with unset_fake_temporarily():  # states of generators, which live on the host
                return func(*args, **kwargs)
        if packet is aten._local_scalar_dense and self.reads:
            self.waits += [str(packet)] * args[0].is_cuda
            return 1.0 if args[0].is_floating_point() else 1
        result = func(*args, **kwargs)
        self.kernels += packet is aten._scaled_dot_product_efficient_attention_backward
        if packet in (aten._linalg_eigh, aten._linalg_svd):  # they wait inside of their kernels
            self.waits.append(str(packet))
        # A single number on the host is an argument of a kernel, unless it is copied.
        copies = packet in (aten.copy_, aten._to_copy)
        seen = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        if len({t.device for t in seen if copies or t.dim()}) > 1:
            read = self.reads and not result.is_cuda
            (self.waits if read else self.copies).append(str(packet))
        return result


def grads(out: Tensor, *leaves: Tensor) -> Gradients:
    out.square().mean().backward()
    return [t.grad for t in leaves if t.requires_grad]


def backward(model: nn.Module, *inputs: Tensor, **named: Tensor) -> Gradients:
    """One pass; of a sketched block nothing may stay exact."""
    out = model(*inputs, **named)
    blocks = [m.sketching for m in model.modules() if isinstance(m, SketchedBlock)]
    assert not any(state.note or state.proof for state in blocks)
    return grads(getattr(out, "loss", out), *model.parameters(), *inputs)


def layers(kind: Any, size: tuple[int, ...], sketch: Any, **options: Any) -> Gradients:
    model = nn.Sequential(kind(8, 48), nn.GELU(), kind(48, 64))
    sp.sketch_(model, sketch, select.everything, **options)
    assert all("Sketched" in type(m).__name__ for m in model[::2])
    return backward(model, torch.randn(size, requires_grad=True))


linear = partial(layers, nn.Linear, (8, 6, 8))
conv = partial(layers, partial(nn.Conv2d, kernel_size=3), (8, 8, 16, 16))


def attention(
    mask: Callable[[], Tensor | None] = lambda: None,
    size: int = 8,
    dtype: torch.dtype = torch.float32,
    call: Any = sp.kept_attention,
    **options: Any,
) -> Gradients:
    qkv = [torch.randn(4, 4, 17, size, dtype=dtype, requires_grad=True) for _ in range(3)]
    return grads(call(*qkv, mask(), queries=0.3, **options), *qkv)


def gated(sketch: sp.Sketch) -> Gradients:
    x = torch.randn(4, 16, 32, requires_grad=True)
    return grads(sp.gate(x, sketch), x)


def branch(*middle: nn.Module, **options: Any) -> Gradients:
    f = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), *middle, nn.Linear(64, 32))
    x = torch.randn(4, 16, 32, requires_grad=True)
    return grads(sp.branch(f, x, 0.3, **options), x, *f.parameters())


def vit(tokens: Tokens, run: Callable[..., Gradients] = backward, depth: int = 2) -> Gradients:
    model = zoo.ViT(dim=32, depth=depth, hidden=64, dropout=0.1)
    return run(sp.sketch_(model, tokens), torch.randn(4, 3, 32, 32))


def under_autocast(model: nn.Module, x: Tensor) -> Gradients:
    with torch.autocast("cuda", torch.bfloat16):
        return backward(model, x)


def under_checkpoint(model: Any, x: Tensor) -> Gradients:
    model.blocks.forward = partial(checkpoint, model.blocks.forward, use_reentrant=False)
    return backward(model, x)


def compiled(model: nn.Module, x: Tensor) -> Gradients:
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    return grads(fast(x), *model.parameters())


def scaled(model: nn.Module, x: Tensor) -> Gradients:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", torch.float16):
        loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return [p.grad for p in model.parameters()]


def attending(**options: Any) -> Gradients:
    model = nn.MultiheadAttention(32, 4, batch_first=True)
    sp.sketch_(model, sp.L1(0.25), select.everything)
    x = torch.randn(4, 16, 32, requires_grad=True)
    return grads(model(x, x, x, **options)[0], *model.parameters(), x)


def conv1d(inputs: int, outputs: int) -> Any:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(outputs, inputs)


def piped(sketch: sp.Sketch) -> Gradients:
    """What a stage puts in the place of a dense message, and what is made of it there."""
    import torch.testing._internal.distributed.fake_pg  # has a process group that sends nothing

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    stage: Any = SketchedBoundary()
    vars(stage).update(device="cuda", stage_index=1, num_stages=2, group=None)
    stage.set_sketch(sketch)
    stage._leaving[0], stage._arriving[0] = [], []
    dense, out = torch.randn(4, 16, 64), torch.empty(4, 16, 64)
    with stage._own_stream():
        sent = stage._packed(dist.P2POp(dist.isend, dense, 1), 0).tensor
    stage._expected(dist.P2POp(dist.irecv, out, 1), 0).tensor.copy_(sent)
    for form, buffer, place in stage._arriving[0]:
        form.unpack(buffer, place)
    return [out]


def exported(model: nn.Module, x: Tensor) -> Gradients:
    """What is exported is the plain model."""
    program = torch.export.export(model.eval(), (x,))
    return [program.module()(x)]


def encoder() -> Gradients:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return backward(sp.sketch_(layer, Tokens(0.2)), torch.randn(4, 16, 32, requires_grad=True))


def text(name: str, save: str) -> Gradients:
    import transformers as hf

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    more = {"intermediate_size": 64, "pad_token_id": 0, "use_cache": False}
    config = getattr(hf, f"{name}Config")(**sizes, **more)
    model = getattr(hf, f"{name}ForSequenceClassification")(config).train()
    ids = torch.ones(4, 16, dtype=torch.long)
    sp.sketch_(model, Tokens(0.2, save=save))
    return backward(model, input_ids=ids, labels=ids[:, 0], attention_mask=ids)


def counted() -> Gradients:
    size = launches.MODELS["ViT 96 × 4, 16 × 64 tokens"]
    counts = launches.eager(*size.prepared(launches.SKETCH, torch.device("cuda")))
    assert counts.backward <= launches.BOUND
    return []


def measured(ask: Callable[..., Any]) -> Gradients:
    batches = [torch.randn(n, 3, 32, 32) for n in (4, 6)]
    ask(zoo.ViT(dim=16, depth=1, hidden=64), lambda m, batch: m(batch).square().mean(), batches)
    return []


def replicas(method: str) -> Gradients:
    """A step of the study on MNIST, many replicas at once."""
    from experiments.methods import METHODS
    from experiments.mnist import stack
    from experiments.mnist.study import MNIST, Run

    stack.generator = lambda *args: None  # torch's CPU build has none for a GPU
    cell = MNIST.load("smoke").protocol.cell(METHODS[method], 0.1, "all")
    step = stack.trial_step([Run(cell, rate, 0) for rate in (0, 2)])
    step()
    return [step.func.__self__.loss, *step.func.__self__.weights]


def tuned(model: nn.Module, loss_fn: Any, batches: list[Tensor]) -> None:
    tuner = sp.Tuner(sp.sketch_(model, Tokens(0.2)), loss_fn, share=1.0)
    while tuner(batches[0]) is None:
        pass


def planned(model: nn.Module, loss_fn: Any, batches: list[Tensor]) -> None:
    sp.plan(model, loss_fn, batches[0], sketch=Tokens(0.2), rounds=1)


ATTENTION = torch.compile(sp.kept_attention, fullgraph=True, backend="aot_eager")
PAIR = sp.Split(input=Rows(0.25), weight=ForwardRows(0.25))
PLAIN = (sp.L1, sp.L2, sp.Variance, sp.Diagonal, sp.ColumnMask, sp.SampleMask, sp.ElementMask)
ROWS = ({}, {"unit": "sample"}, {"by": "gradient_input"}, {"by": "uniform"})
SPECTRAL = (sp.GradientSVD(0.25), sp.RankConstrained(0.25))
FIXED = (*(kind(0.25) for kind in PLAIN), *(Rows(0.25, **o) for o in ROWS), ForwardRows(0.25), PAIR)
STACKED = ("exact", "l1", "ds-independent", "gsv", "element", "control-samples", "rows")
RANDOM = (sp.L1(0.25, sampling="independent"), Rows(0.25, by="nonzero"))
CASES: dict[str, dict[str, Callable[[], Gradients]]] = {
    "layers": {
        **{f"linear, {s!r}": partial(linear, s) for s in (*FIXED, *SPECTRAL, *RANDOM)},
        "linear, planned": partial(linear, sp.L1(0.25), planner=Every(2)),
        **{f"conv, {s!r}": partial(conv, s) for s in (sp.L1(0.25), sp.L2(0.25), Rows(0.25))},
        **{f"gate, {s!r}": partial(gated, s) for s in (sp.L1(0.25), Rows(0.25))},
        "MultiheadAttention": attending,
        "MultiheadAttention, without weights": partial(attending, need_weights=False),
        "Conv1D": partial(layers, conv1d, (8, 6, 8), sp.L1(0.25)),
        **{f"pipeline, {s!r}": partial(piped, s) for s in (sp.L1(0.1), Rows(0.1))},
        "branch": partial(branch, nn.GELU(), nn.Dropout(0.1)),
        "branch, input": partial(branch, nn.GELU(), nn.Dropout(0.1), save="input"),
        "branch, unknown": partial(branch, nn.Mish()),
        "attention, dropout": partial(attention, dropout_p=0.1),
        "attention, causal": partial(attention, is_causal=True),
        "attention, mask": partial(attention, lambda: torch.ones(17, 17, dtype=torch.bool)),
        "attention, bias": partial(attention, lambda: torch.zeros(4, 1, 17, 17)),
        "attention, half": partial(attention, dtype=torch.float16, is_causal=True),
        "attention, heads of 6": partial(attention, size=6),
    },
    "blocks": {
        "vit": partial(vit, Tokens(0.2)),
        "vit, input": partial(vit, Tokens(0.2, save="input")),
        "vit, autocast": partial(vit, Tokens(0.2), under_autocast),
        "vit, checkpoint": partial(vit, Tokens(0.2), under_checkpoint),
        "vit, GradScaler": partial(vit, Tokens(0.2), scaled),
        "vit, export": partial(vit, Tokens(0.2), exported),
        "launches": counted,
        "encoder": encoder,
        **{f"{n}, {s}": partial(text, n, save=s) for n in ("Bert", "Llama")
           for s in ("activations", "input")},
    },
    "compiled": {
        "attention": partial(attention, dtype=torch.bfloat16, is_causal=True, call=ATTENTION),
        "activations": partial(vit, Tokens(0.2), compiled, 1),
        "input": partial(vit, Tokens(0.2, save="input"), compiled, 1),
    },
    "stack": {f"stack, {name}": partial(replicas, name) for name in STACKED},
    "meters": {
        "measure": partial(measured, partial(sp.measure, sketch=Tokens(0.2), draws=2, split=False)),
        "Tuner": partial(measured, tuned),
        "plan": partial(measured, planned),
        "advise": partial(measured, partial(sp.advise, minutes=0.15)),
    },
}  # fmt: skip
WAITS = {
    "stack, gsv": 4,
    **{f"linear, {s!r}": 2 for s in SPECTRAL},
    "measure": 36,
    "Tuner": 12,
    "advise": 1000,
}
"""How often a case may wait: torch's eigh does, and meters read numbers, not one per parameter."""
KERNELS = {"input", "attention, causal", "attention, mask", "attention, bias", "vit", "vit, input"}
KERNELS |= {
    "attention",
    "attention, half",
    "vit, autocast",
    "vit, GradScaler",
    "Llama, input",
    "activations",
}
"""Where kept queries run in torch's memory-efficient kernel, compiled or not."""
RAISES = {f"linear, {s!r}" for s in RANDOM}
"""They draw a random number of atoms, which the host has to know."""


@pytest.fixture(scope="session")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None or sys.platform != "linux" or torch.version.cuda:
        pytest.skip("needs Linux, a C++ compiler and torch without CUDA")
    torch_, library = Path(torch.__file__).parent, tmp_path_factory.mktemp("cuda") / "libfake.so"
    source, lib = Path(__file__).with_name("fake_cuda.cpp"), torch_ / "lib"
    flags = f"-std=c++20 -shared -fPIC -I{torch_}/include {source} -o {library} -L{lib}"
    links = f"-lc10 -ltorch_cpu -Wl,-rpath,{lib}"
    subprocess.run([compiler, *flags.split(), *links.split()], check=True)
    return str(library)


@pytest.mark.parametrize("group", CASES)
def test_nothing_waits_and_nothing_is_copied(cuda: str, group: str) -> None:
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, group]
    env = {**os.environ, "LD_PRELOAD": cuda, "PYTHONPATH": paths}
    lines = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout
    cases = {case.pop("name"): case for case in map(json.loads, lines.splitlines())}
    assert cases.keys() == CASES[group].keys()
    for name, case in cases.items():
        raised = "DataDependentOutputException" if name in RAISES else ""
        assert case.pop("waits") <= WAITS.get(name, 0), name
        assert case.pop("kernels") or name not in KERNELS, name
        assert case == {"copies": [], "elsewhere": [], "raised": raised}, name


def main(group: str) -> None:
    """Runs the cases of a group, a line of JSON for each; what asks a driver has answers here."""
    answers = {"is_available": True, "is_bf16_supported": True, "_lazy_init": None}
    answers |= {"get_device_properties": SimpleNamespace(major=8)}
    answers |= {"synchronize": None, "set_rng_state": None, "manual_seed": None}
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **options: answer)
    torch.cuda.get_rng_state = lambda *args: torch.get_rng_state()
    # What torch makes of an empty list is never fake.
    made = torch.tensor
    torch.tensor = lambda x, **options: torch.empty(0, **options) if x == [] else made(x, **options)
    for name, case in CASES[group].items():
        watch, raised, found = Watch(group == "meters"), "", list[Tensor | None]()
        try:
            with FakeTensorMode(), watch, torch.device("cuda"):
                found = list(case())
        except Exception as error:
            traceback.print_exc()
            raised = type(error).__name__
        elsewhere = [str(g) for g in found if g is None or not g.is_cuda]
        said = {"copies": watch.copies, "elsewhere": elsewhere, "raised": raised}
        counts = {"waits": len(watch.waits), "kernels": watch.kernels}
        print(json.dumps({"name": name, **counts, **said}), flush=True)
    os._exit(0)  # autograd's threads would wait for a device to shut down


if __name__ == "__main__":
    main(sys.argv[1])
