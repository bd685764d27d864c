"""Processes that run cases and record what they saw: shared by the tests of distribution."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

Case = Callable[[], dict[str, Any]]
WIDTH, CLASSES = 16, 4


def work(rank: int, folder: str, world: int, cases: Sequence[Case], seconds: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )
    results: dict[str, Any] = {}
    for case in cases:
        started = time.monotonic()
        try:
            results[case.__name__] = case()
        except Exception:
            results[case.__name__] = traceback.format_exc()
        results[f"{case.__name__} seconds"] = time.monotonic() - started
        torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def run(
    folder: Path, world: int, cases: Sequence[Case], *, seconds: float = 60, limit: float = 500
) -> list[dict[str, Any]]:
    """What each rank recorded; ranks that a case has killed leave what they had."""
    folder.mkdir(parents=True, exist_ok=True)
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=work, args=(rank, str(folder), world, tuple(cases), seconds))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + limit
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            assert not process.is_alive(), "the processes did not finish in time"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    return recorded(folder, world)


def recorded(folder: Path, world: int) -> list[dict[str, Any]]:
    return [
        torch.load(file, weights_only=False) if (file := folder / f"{rank}.pt").exists() else {}
        for rank in range(world)
    ]


def run_once(
    factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
    name: str,
    world: int,
    cases: Sequence[Case],
    **options: float,
) -> list[dict[str, Any]]:
    """``run``; with several pytest workers the first to come starts the processes for all."""
    base = factory.getbasetemp()
    folder = (base.parent if hasattr(request.config, "workerinput") else base) / name
    finished = folder / "finished"
    try:
        folder.mkdir()
    except FileExistsError:
        deadline = time.monotonic() + 600
        while not finished.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        return recorded(folder, world)
    try:
        return run(folder, world, cases, **options)
    finally:
        finished.touch()


def of(results: list[dict[str, Any]], case: Case) -> list[dict[str, Any]]:
    found = [r[case.__name__] for r in results]
    for rank, record in enumerate(found):
        assert isinstance(record, dict), f"rank {rank}:\n{record}"
    return found


def outcome(act: Callable[[], Any]) -> str:
    """The error that ``act`` ends with, if any."""
    try:
        act()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return ""


def block(seed: int, last: bool = False) -> nn.Sequential:
    """One stage's layers, the same weights for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        out = CLASSES if last else WIDTH
        return nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, out))


def data(rows: int = 16, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, torch.randint(0, CLASSES, (rows,), generator=generator)
