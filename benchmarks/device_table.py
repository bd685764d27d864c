"""One table of training steps on a device, to paste into an issue: tokens --device cuda"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

import sketchprop as sp
from sketchprop.core.stopwatch import cpu_name
from sketchprop.core.table import Column, words

from . import launches
from .timing import Ratio, interleave
from .tokens import Size, loss_of

SKETCH = sp.Tokens(0.2)
BATCHES = (8, 16, 64, 128)
COLUMNS = (
    *(words("model"), Column("batch"), Column("eager", ".3f"), Column("compiled", ".3f")),
    *(Column("eager ms", ".3g"), Column("compiled ms", ".3g"), Column("memory", ".3f")),
    *(Column("peak MB", ",.0f"), Column("launches"), Column("kept launches")),
)
LEGEND = (
    f"eager, compiled: a step (forward, backward, AdamW) with {SKETCH!r} over the exact one, both "
    "in that mode; ms: the exact step's. memory: peak of the kept step above what was there "
    "before, over exact's, which is peak MB. launches: of one backward, exact and kept, eager."
)


def check_device(device: torch.device) -> None:
    """Ends with a word where there is no such device."""
    if device.type == "cpu":
        return
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != device.type:
        raise SystemExit(
            f"--device {device}: torch {torch.__version__} finds no such device here, but "
            f"{'cpu alone' if found is None else f'{found.type} and cpu'}; check the driver, and "
            "that torch was installed for it (https://pytorch.org/get-started/locally)"
        )


def about(device: torch.device) -> str:
    """What a reader of the table has to know."""
    module: Any = torch.get_device_module(device)
    name = cpu_name() if device.type == "cpu" else module.get_device_name(device)
    built = f"CUDA {torch.version.cuda}, " if torch.version.cuda else ""
    system = f"Python {platform.python_version()}, {platform.system()}"
    return f"{name}; sketchprop {sp.__version__}, torch {torch.__version__}, {built}{system}"


def rows(
    models: dict[str, Size],
    device: torch.device,
    batches: list[int],
    modes: list[str],
    seconds: float,
    autocast: str | None,
) -> Iterator[dict[str, Any]]:
    """A row for each model and batch."""
    for name, size in models.items():
        for batch in batches:
            sized = size._replace(batch=batch)
            row: dict[str, Any] = dict.fromkeys(column.title for column in COLUMNS)
            row |= {"model": name, "batch": batch}
            for mode in modes:
                torch.compiler.reset()  # one code for all sizes: it would give up after eight
                steps = [_step(sized, device, s, autocast, mode) for s in (None, SKETCH)]
                found = _ratios(steps, seconds, device)
                row |= {mode: found["kept"].median, f"{mode} ms": found["exact"].milliseconds}
                if mode == "eager" and device.type != "cpu":
                    exact, kept = (_peak(step) for step in steps)
                    row |= {"peak MB": exact / 1e6, "memory": kept / exact}
            counts = [launches.eager(*sized.prepared(s, device)) for s in (None, SKETCH)]
            row |= {"launches": counts[0].backward, "kept launches": counts[1].backward}
            yield row


def _step(
    size: Size,
    device: torch.device,
    sketch: sp.Tokens | None,
    autocast: str | None,
    mode: str,
) -> Callable[[], None]:
    model, inputs = size.prepared(sketch, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    labels = torch.randint(0, 10, (inputs.shape[0],), device=device)
    call: Callable[..., Any] = model
    if mode == "compiled":
        call = torch.compile(model, dynamic=False)
    narrow = torch.autocast(device.type, getattr(torch, autocast)) if autocast else nullcontext()

    def once() -> None:
        optimizer.zero_grad()
        with narrow:
            loss = loss_of(call(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return once


def _ratios(
    steps: list[Callable[[], None]], seconds: float, device: torch.device
) -> dict[str, Ratio]:
    for step in steps:
        step()  # compiles, proves blocks
    work = dict(zip(("exact", "kept"), steps, strict=True))
    return interleave(work, seconds=2 * seconds, device=device)


def _peak(step: Callable[[], None]) -> int:
    """Bytes of a step above what was there before."""
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    step()
    torch.accelerator.synchronize()
    return int(torch.accelerator.max_memory_allocated() - before)
