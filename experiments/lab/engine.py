"""Runs a sweep: what is missing in the store is trained, and stored as soon as it ends.

Workers only compute; this process alone writes. Killed at any moment, the store holds whole
stacks of runs; started again, the sweep goes on with those that are missing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

import sketchprop as sp
from sketchprop.core.allocator import keep_pages

from . import ExperimentError
from .checkpoints import FOLDER, Checkpoints
from .machine import HERE, Machine
from .store import Row, Store
from .sweep import Findings, Point, Run, planned_runs

Trained = tuple["Job", list[Row]]
Engine = Callable[[Sequence["Job"], int], Iterator[Trained]]
Report = Callable[[float, float, str], None]
Item = TypeVar("Item")
Result = TypeVar("Result")
LINE_EVERY = 20.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True)
class Job:
    """Runs of one cell that train together."""

    runs: tuple[Run, ...]
    checkpoints: Checkpoints | None = None
    machine: Machine = HERE

    @property
    def cost(self) -> float:
        """Steps of all runs: what is left of a sweep is told by it."""
        return sum(steps * count for steps, count in self.runs[0].cell.stretches(len(self.runs)))


def run_sweep(
    missing: Callable[[Sequence[Row], Path], Sequence[Job]],
    store: Store,
    engine: Engine,
    workers: int,
    report: Report | None = None,
) -> int:
    """Trains what is missing, until nothing is; how many runs that were.

    ``missing(rows, checkpoints)``: the jobs that can be done, knowing the rows of the runs that
    were; asked again when these are done.
    """
    done = 0
    kept = Checkpoints(store.folder / FOLDER)
    while True:
        rows = store.rows()
        kept.remove({row["run"] for row in rows})
        jobs = missing(rows, kept.folder)
        if not jobs:
            return done
        total, finished = sum(job.cost for job in jobs), 0.0
        if report:
            report(0.0, total, f"{sum(len(t.runs) for t in jobs)} runs to do")
        with contextlib.closing(engine(jobs, workers)) as results:  # type: ignore[type-var]
            for job, rows in results:
                store.add(rows)
                kept.remove({row["run"] for row in rows})
                done += len(rows)
                finished += job.cost
                if report:
                    report(finished, total, f"{done} runs done")


def missing_jobs(
    points: Sequence[Point],
    rows: Sequence[Row],
    checkpoints: Path | None = None,
    machine: Machine = HERE,
) -> list[Job]:
    """Stacks of the runs that are not stored, widened grids included: seed by seed, so that what is
    known at any time is balanced, the longest first; where learning rates are halved in the order
    of the figures, and whole seeds in each."""
    scores = {row["run"]: row["validation_accuracy"] for row in rows}
    jobs: list[Job] = []
    for point in points:
        missing = [run for run in planned_runs(point, scores) if run.identity not in scores]
        size, every = point.protocol.stack, point.protocol.checkpoint_seconds
        size -= size % point.cell.together
        kept = None if checkpoints is None else Checkpoints(checkpoints, every)
        stacks = (tuple(missing[i : i + size]) for i in range(0, len(missing), size))
        jobs += [Job(runs, kept, machine) for runs in stacks]

    def order(job: Job) -> tuple[int, float]:
        first = job.runs[0]
        return (first.seed, -job.cost) if first.cell.together == 1 else (0, 0.0)

    return sorted(jobs, key=order)


def execute(job: Job) -> list[Row]:
    """Trains a stack; the rows to be stored. This is what a worker runs."""
    with job.machine.used():
        found = job.runs[0].cell.train(job.runs, job.checkpoints)
    return [_row(run, values) for run, values in zip(job.runs, found, strict=True)]


def _row(run: Run, found: Findings) -> Row:
    validation, test = found["validation_curve"], found["test_curve"]
    best = max(range(len(validation)), key=lambda epoch: validation[epoch])
    config = {
        name: "-".join(map(str, value)) if isinstance(value, tuple) else value
        for name, value in asdict(run.cell).items()
    }
    return {
        "wall_seconds": 0.0,
        **config,
        **found,
        "run": run.identity,
        "cell": run.cell.identity,
        "rate_index": run.rate_index,
        "learning_rate": run.learning_rate,
        "seed": run.seed,
        "best_epoch": best + 1,
        "validation_accuracy": validation[best],
        "test_accuracy": test[best],
        "best_test_accuracy": max(test),
        "package_version": sp.__version__,
        "torch_version": torch.__version__,
    }


def in_processes(jobs: Sequence[Job], workers: int) -> Iterator[Trained]:
    """On the cores of this machine, or a process for each GPU; ``workers=0``: in this process."""
    yield from spread(execute, jobs, workers, jobs[0].machine.gpus)


def spread(
    call: Callable[[Item], Result], items: Sequence[Item], workers: int, gpus: int = 0
) -> Iterator[tuple[Item, Result]]:
    """Each item with what a worker process makes of it, in the order in which they end."""
    if workers == 0:
        with one_thread():
            for item in items:
                yield item, call(item)
        return
    context = multiprocessing.get_context("spawn")
    numbers = context.SimpleQueue()
    for number in range(gpus):
        numbers.put(number)
    pool = concurrent.futures.ProcessPoolExecutor(
        min(gpus or workers, len(items)), context, _start_worker, (os.getpid(), gpus, numbers)
    )
    try:
        waiting = {pool.submit(call, item): item for item in items}
        for future in concurrent.futures.as_completed(waiting):
            yield waiting[future], future.result()
    except concurrent.futures.process.BrokenProcessPool as error:
        raise ExperimentError(
            "a worker process died (out of memory, or killed); give the same command again: it "
            "continues, or use fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.terminate()


def in_ray(jobs: Sequence[Job], workers: int) -> Iterator[Trained]:
    """On a Ray cluster: ``RAY_ADDRESS`` names it, else one is started on this machine."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ExperimentError("--engine ray needs Ray: pip install '.[experiments-ray]'") from error
    package = Path(__file__).parents[1]
    variables = {k: v for k, v in os.environ.items() if k == "SKETCHPROP_DATA"}
    own = not ray.is_initialized()
    if own:
        local = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers or None}
        ray.init(
            **local,
            runtime_env={"py_modules": [str(package)], "env_vars": variables},
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )
    try:
        # A driver may have no GPU itself.
        gpus = int(jobs[0].machine.device.startswith("cuda") or jobs[0].machine.gpus > 0)
        remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=2)(_execute_alone)
        waiting = {remote.remote(job): job for job in jobs}
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1)
            for reference in ready:
                yield waiting.pop(reference), ray.get(reference)
    finally:
        if own:
            ray.shutdown()


ENGINES: dict[str, Engine] = {"processes": in_processes, "ray": in_ray}


def _execute_alone(job: Job) -> list[Row]:
    with one_thread():
        return execute(job)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Stacks are spread over cores, not operations; and sums must not depend on the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _start_worker(parent: int, gpus: int, numbers: Any) -> None:
    torch.set_num_threads(1)
    if gpus:
        torch.cuda.set_device(numbers.get())
    keep_pages()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends the workers

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)  # the parent was killed: nobody is left to store anything

    threading.Thread(target=watch, daemon=True).start()


def progress_lines() -> Report:
    """What is done and the time left, on the error stream: a line now and then."""
    start = last = time.monotonic()

    def report(finished: float, total: float, text: str) -> None:
        nonlocal start, last
        now = time.monotonic()
        if not finished:
            start = now
        elif now - last < LINE_EVERY and finished < total:
            return
        last, spent = now, now - start
        left = f", {spent * (total / finished - 1) / 60:.0f} min left" if finished else ""
        share = finished / total if total else 1.0
        sys.stderr.write(f"{share:4.0%} · {text} · {spent / 60:.0f} min spent{left}\n")
        sys.stderr.flush()

    return report
