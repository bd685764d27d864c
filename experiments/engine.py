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
from typing import Any

import torch

import sketchprop as sp

from .checkpoints import FOLDER, Checkpoints
from .methods import ExperimentError
from .store import Row, Store
from .sweep import Point, Run, planned_runs

Trained = tuple["Task", list[Row]]
Engine = Callable[[Sequence["Task"], int], Iterator[Trained]]
Report = Callable[[float, float, str], None]


@dataclass(frozen=True)
class Task:
    """Runs of one cell that train together."""

    runs: tuple[Run, ...]
    checkpoints: Checkpoints | None = None

    @property
    def cost(self) -> float:
        """About how many seconds it takes on one core of a laptop."""
        return self.runs[0].cell.cost(len(self.runs))


def run_sweep(
    points: Sequence[Point],
    store: Store,
    engine: Engine,
    workers: int,
    report: Report | None = None,
) -> int:
    """Trains all that ``points`` need and ``store`` lacks; how many runs that were."""
    done = 0
    kept = Checkpoints(store.folder / FOLDER)
    while True:
        rows = store.rows()
        kept.remove({row["run"] for row in rows})
        tasks = missing_tasks(points, rows, kept.folder)
        if not tasks:
            return done
        total, finished = sum(task.cost for task in tasks), 0.0
        if report:
            report(0.0, total, f"{sum(len(t.runs) for t in tasks)} runs to do")
        with contextlib.closing(engine(tasks, workers)) as results:  # type: ignore[type-var]
            for task, rows in results:
                store.add(rows)
                kept.remove({row["run"] for row in rows})
                done += len(rows)
                finished += task.cost
                if report:
                    report(finished, total, f"{done} runs done")


def missing_tasks(
    points: Sequence[Point], rows: Sequence[Row], checkpoints: Path | None = None
) -> list[Task]:
    """Stacks of the runs that are not stored, the longest first; widened grids included."""
    scores = {row["run"]: row["validation_accuracy"] for row in rows}
    tasks: list[Task] = []
    for point in points:
        missing = [run for run in planned_runs(point, scores) if run.identity not in scores]
        size, every = point.protocol.stack, point.protocol.checkpoint_seconds
        kept = None if checkpoints is None else Checkpoints(checkpoints, every)
        tasks += [Task(tuple(missing[i : i + size]), kept) for i in range(0, len(missing), size)]
    return sorted(tasks, key=lambda task: -task.cost)


def execute(task: Task) -> list[Row]:
    """Trains a stack; the rows to be stored. This is what a worker runs."""
    found = task.runs[0].cell.train(task.runs, task.checkpoints)
    return [_row(run, values) for run, values in zip(task.runs, found, strict=True)]


def _row(run: Run, found: dict[str, Any]) -> Row:
    validation, test = found["validation_curve"], found["test_curve"]
    best = max(range(len(validation)), key=lambda epoch: validation[epoch])
    config = {
        name: "-".join(map(str, value)) if isinstance(value, tuple) else value
        for name, value in asdict(run.cell).items()
    }
    return {
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


def in_processes(tasks: Sequence[Task], workers: int) -> Iterator[Trained]:
    """On the cores of this machine; ``workers=0``: in this process."""
    if workers == 0:
        with _one_thread():
            for task in tasks:
                yield task, execute(task)
        return
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(
        min(workers, len(tasks)), context, _start_worker, (os.getpid(),)
    )
    try:
        waiting = {pool.submit(execute, task): task for task in tasks}
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


def in_ray(tasks: Sequence[Task], workers: int) -> Iterator[Trained]:
    """On a Ray cluster: ``RAY_ADDRESS`` names it, else one is started on this machine."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ExperimentError(
            "--engine ray needs Ray: pip install 'sketchprop[experiments-ray]'"
        ) from error
    package = Path(__file__).parent
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
        remote = ray.remote(num_cpus=1, max_retries=2)(_execute_alone)
        waiting = {remote.remote(task): task for task in tasks}
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1)
            for reference in ready:
                yield waiting.pop(reference), ray.get(reference)
    finally:
        if own:
            ray.shutdown()


ENGINES: dict[str, Engine] = {"processes": in_processes, "ray": in_ray}


def _execute_alone(task: Task) -> list[Row]:
    with _one_thread():
        return execute(task)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Stacks are spread over cores, not operations; and sums must not depend on the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _start_worker(parent: int) -> None:
    torch.set_num_threads(1)
    sp.keep_pages()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends the workers

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)  # the parent was killed: nobody is left to store anything

    threading.Thread(target=watch, daemon=True).start()


class Progress:
    """A bar with the time left, on a terminal in place and elsewhere now and then."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._shown = -1.0

    def __call__(self, finished: float, total: float, text: str) -> None:
        if finished == 0:
            self._began, self._shown = time.monotonic(), -1.0
        share = finished / total if total else 1.0
        tty = sys.stderr.isatty()
        if not tty and share < 1 and share - self._shown < 0.05 and self._shown >= 0:
            return
        self._shown = share
        spent = time.monotonic() - self._began
        left = _clock(spent / share - spent) if share else "?"
        bar = "#" * int(30 * share)
        line = f"[{bar:<30}] {share:4.0%} · {text} · {_clock(spent)} spent · {left} left"
        end = "\r" if tty and share < 1 else "\n"
        sys.stderr.write(("\x1b[2K" if tty else "") + line + end)
        sys.stderr.flush()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
