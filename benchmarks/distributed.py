"""python -m benchmarks.distributed bytes | accuracy | link

bytes: backward payload of a pipeline step and DDP payload of a step, against exact.
accuracy: the paper's MLP over two pipeline stages on MNIST, sketched boundary against exact.
link: step time over a slow network: two network namespaces and a bandwidth limit (needs root).
Two processes on this machine do the work. Results go to benchmarks/results/distributed-*.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import sketchprop as sp
from experiments.data import mnist, normalised
from sketchprop.distributed import share_draws_, sketch_stage_
from sketchprop.zoo import mlp

from .results import FOLDER
from .timing import machine

CPU = torch.device("cpu")
BATCH, TOKENS, WIDTH = 32, 128, 256
SKETCHES: dict[str, Callable[[float], sp.Sketch]] = {"L1": sp.L1, "Rows": sp.Rows}
TRAINED = 50_000
"""Images of MNIST that are trained on; the other 10,000 choose the learning rate."""
EXACT = sp.L1(1.0)
"""Keeps everything: torch's own messages, bit by bit."""


def stage_of(module: nn.Module, sketch: sp.Sketch) -> Any:
    plain = PipelineStage(module, dist.get_rank(), dist.get_world_size(), CPU)
    return sketch_stage_(plain, sketch)


def pipeline_step(stage: Any, schedule: Any, x: Tensor, y: Tensor) -> None:
    stage.submod.zero_grad()
    schedule.step(*((x,) if stage.is_first else ()), target=y if stage.is_last else None)


def token_stage(sketch: sp.Sketch) -> tuple[Any, Any, Tensor]:
    """Half of a token-wise MLP, and a batch."""
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    stage = stage_of(module, sketch)
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    return stage, Schedule1F1B(stage, 4, loss_fn=F.mse_loss), x


def count_bytes(args: argparse.Namespace) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for name, make in SKETCHES.items():
        for budget in args.budgets:
            stage, schedule, x = token_stage(make(budget))
            pipeline_step(stage, schedule, x, x)
            total = stage.counter.take().total
            lines.append(
                {"what": "pipeline backward", "sketch": f"{name}({budget:g})"} | as_(total)
            )
    networks = {"256-256-256-256-256": [256] * 5, "784-256-256-10": [784, 256, 256, 10]}
    for name, widths in networks.items():
        for budget in args.budgets:
            model = sp.sketch_(mlp(*widths), sp.L1(budget), sp.select.everything)
            wrapped = DistributedDataParallel(model)
            shared = share_draws_(wrapped)
            for _ in range(2):
                wrapped.zero_grad()
                wrapped(torch.randn(64, widths[0])).square().mean().backward()
                total = shared.counter.take().total
            lines.append({"what": f"DDP, MLP {name}", "sketch": f"L1({budget:g})"} | as_(total))
    return lines


def as_(total: Any) -> dict[str, Any]:
    return {"sent": total.sent, "exact": total.exact, "ratio": total.ratio}


def train_mnist(
    sketch: sp.Sketch, seed: int, epochs: int, batch: int, rate: float
) -> tuple[float, float]:
    """Validation and test accuracy of 784-64-64-10, cut behind the first layer (rank 1 knows)."""
    train, test = mnist(), mnist(train=False)
    images, labels = normalised(train.images), train.labels
    torch.manual_seed(seed)
    whole = mlp(784, 64, 64, 10)
    rank = dist.get_rank()
    module = whole[:2] if rank == 0 else whole[2:]
    stage = stage_of(module, sketch)
    schedule = ScheduleGPipe(stage, 2, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for picked in torch.randperm(TRAINED, generator=order).split(batch):
            if len(picked) == batch:
                pipeline_step(stage, schedule, images[picked], labels[picked])
                optimizer.step()
    return (
        correct(module, images[TRAINED:], labels[TRAINED:]),
        correct(module, normalised(test.images), test.labels),
    )


@torch.no_grad()
def correct(module: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of right answers; the first stage hands its features over, without a pipeline."""
    hidden = module(images) if dist.get_rank() == 0 else torch.empty(len(images), 64)
    dist.broadcast(hidden, 0)
    right = torch.zeros(1)
    if dist.get_rank() == 1:
        right = (module(hidden).argmax(1) == labels).float().mean().view(1)
    dist.broadcast(right, 1)
    return float(right)


def accuracy(args: argparse.Namespace) -> list[dict[str, Any]]:
    cases: dict[str, sp.Sketch] = {"exact": EXACT}
    for name, make in SKETCHES.items():
        cases |= {f"{name}({b:g})": make(b) for b in args.budgets}
    lines = []
    for name, sketch in cases.items():
        # Each method has its own learning rate, chosen on held-out training data, another seed.
        trials = {rate: train_mnist(sketch, 1000, 1, args.batch, rate)[0] for rate in args.rates}
        rate = max(trials, key=lambda rate: trials[rate])
        found = [
            train_mnist(sketch, seed, args.epochs, args.batch, rate)[1]
            for seed in range(args.seeds)
        ]
        spread = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0
        mean = statistics.mean(found)
        lines.append(
            {
                "sketch": name,
                "learning_rate": rate,
                "accuracy": mean,
                "standard_error": spread,
                "runs": found,
                "trials": {str(rate): value for rate, value in trials.items()},
            }
        )
        if dist.get_rank() == 1:
            print(f"{name}: {100 * mean:.2f} ± {100 * spread:.2f} %", flush=True)  # noqa: T201
    return lines


def time_steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Exact and sketched steps in turns; the time of a step is its slowest rank's."""
    cases = {"exact": EXACT}
    for name, make in SKETCHES.items():
        cases |= {f"{name}({b:g})": make(b) for b in args.budgets}
    runs = {name: token_stage(sketch) for name, sketch in cases.items()}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(args.rounds + 1):
        for name, (stage, schedule, x) in runs.items():
            dist.barrier()
            start = time.perf_counter()
            pipeline_step(stage, schedule, x, x)
            dist.barrier()
            if turn:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    lines = []
    for name, found in times.items():
        ratios = [t / e for t, e in zip(found, times["exact"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        lines.append(
            {
                "sketch": name,
                "milliseconds": 1000 * statistics.median(found),
                "ratio": statistics.median(ratios),
                "quartiles": [low, high],
                "backward": as_(runs[name][0].counter.take().total),
            }
        )
    return lines


COMMANDS = {"bytes": count_bytes, "accuracy": accuracy, "link": time_steps}


def work(rank: int, address: str, output: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=300)
    )
    lines = COMMANDS[args.command](args)
    if rank == 1:
        Path(output).write_text(json.dumps(lines), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def on_this_machine(args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/lines.json"
        mp.spawn(work, (f"file://{folder}/rendezvous", output, args), nprocs=2)
        lines: list[dict[str, Any]] = json.loads(Path(output).read_text(encoding="utf-8"))
    return lines


class Link:
    """Two network namespaces with a cable between them, limited to ``rate`` both ways."""

    def __init__(self, rate: str) -> None:
        self.rate = rate
        self.names = [f"sketchprop-{os.getpid()}-{side}" for side in "ab"]
        self.cards = [f"sk{os.getpid() % 100000}{side}" for side in "ab"]

    def __enter__(self) -> Link:
        for name in self.names:
            command("ip", "netns", "add", name)
        command("ip", "link", "add", self.cards[0], "type", "veth", "peer", "name", self.cards[1])
        for number, (name, card) in enumerate(zip(self.names, self.cards, strict=True), 1):
            inside = ("ip", "netns", "exec", name)
            command("ip", "link", "set", card, "netns", name)
            command(*inside, "ip", "addr", "add", f"10.77.0.{number}/24", "dev", card)
            command(*inside, "ip", "link", "set", card, "up")
            command(*inside, "ip", "link", "set", "lo", "up")
            limit = ("rate", self.rate, "burst", "256kbit", "latency", "400ms")
            command(*inside, "tc", "qdisc", "add", "dev", card, "root", "tbf", *limit)
        return self

    def __exit__(self, *problem: object) -> None:
        for name in self.names:
            subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)

    def run(self, args: argparse.Namespace) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            output = f"{folder}/lines.json"
            processes = []
            for rank, (name, card) in enumerate(zip(self.names, self.cards, strict=True)):
                inside = ("ip", "netns", "exec", name, sys.executable, "-m", __spec__.name)
                options = ("link", "--rank", str(rank), "--output", output)
                options += ("--rounds", str(args.rounds))
                options += ("--budgets", *map(str, args.budgets))
                environment = os.environ | {"GLOO_SOCKET_IFNAME": card}
                processes.append(subprocess.Popen((*inside, *options), env=environment))
            codes = [process.wait(timeout=600) for process in processes]
            if not Path(output).exists():
                raise RuntimeError(f"the two processes ended with {codes} and left no result")
            lines: list[dict[str, Any]] = json.loads(Path(output).read_text(encoding="utf-8"))
        return lines


def command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")


def over_links(args: argparse.Namespace) -> list[dict[str, Any]]:
    lines = []
    for rate in args.rates:
        try:
            with Link(rate) as link:
                lines += [{"rate": rate} | line for line in link.run(args)]
        except OSError as problem:  # no ip or tc, or no right to use them
            lines.append({"rate": rate, "skipped": f"no slow link could be made here: {problem}"})
    return lines


def show(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        shown = {
            key: round(value, 4) if isinstance(value, float) else value
            for key, value in line.items()
            if key not in ("runs", "trials", "backward")
        }
        print(shown)  # noqa: T201


def save(args: argparse.Namespace, lines: list[dict[str, Any]]) -> None:
    path = args.output or FOLDER / f"distributed-{args.command}.json"
    content = {
        "command": "python -m benchmarks.distributed " + " ".join(sys.argv[1:]),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine("default"),
        "lines": lines,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"results: {path}")  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.distributed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--output", type=Path, help="a JSON file, by default in benchmarks/results")
    for name, budgets in (("bytes", [0.1, 0.05]), ("accuracy", [0.5, 0.25, 0.1]), ("link", [0.1])):
        own = commands.add_parser(name, parents=[common])
        own.add_argument("--budgets", type=float, nargs="+", default=budgets)
        if name == "accuracy":
            own.add_argument("--seeds", type=int, default=3)
            own.add_argument("--epochs", type=int, default=2)
            own.add_argument("--batch", type=int, default=256)
            own.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.03, 0.01])
        if name == "link":
            own.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
            own.add_argument("--rounds", type=int, default=15)
            own.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if getattr(args, "rank", None) is not None:
        work(args.rank, "tcp://10.77.0.1:29577", str(args.output), args)
        return
    lines = over_links(args) if args.command == "link" else on_this_machine(args)
    show(lines)
    save(args, lines)


if __name__ == "__main__":
    main()
