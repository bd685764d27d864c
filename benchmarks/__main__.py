"""python -m benchmarks linear | conv | model | tokens | launches | compiled | tuner | memory | ...

Times exact and sketched work in turns, in random order, in one process, and reports the median of
the ratios within a round, with quartiles. Both sides run under the same allocator settings; by
default these are pinned (pages are kept), because the default allocator is bistable. Results go
to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sketchprop.cli.expressions import parse_sketch
from sketchprop.cli.show import say
from sketchprop.core.table import Column, Table, words

from . import (
    compiled,
    device_table,
    imports,
    launches,
    layers,
    limits,
    models,
    peak,
    profile,
    tokens,
    tuner,
)
from .page import write_page
from .results import FOLDER, Line, compare, plot, save, show
from .timing import restart_pinned


def main() -> None:
    args = _parser().parse_args()
    if args.command == "page":
        say(f"page: {write_page()}")
        return
    if args.command == "compare":
        say(str(compare(args.before, args.after)))
        return
    if getattr(args, "device", None):
        device_table.check_device(args.device)
    if args.command not in ("memory", "peak", "import", "launches"):
        restart_pinned(args.allocator)
    torch.set_num_threads(args.threads)
    command = "python -m benchmarks " + shlex.join(sys.argv[1:])
    name = f"{args.command}{_kind(args)}-{args.threads}-thread{'s' * (args.threads > 1)}"
    output = args.output or FOLDER / f"{name}.json"
    title = f"{args.command}: time over exact, {args.threads} thread(s), {args.allocator} allocator"
    allocator = "default" if args.command in ("import", "peak", "launches") else args.allocator
    kept = partial(save, output, command, allocator, [])
    if args.command == "limits":
        stored = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {}
        kept(limits.limits(args.gigabytes, args.seconds, stored, kept, args.small))
        say(f"results: {output}")
        return
    lines, extras = _measure(args)
    if lines:
        show(title, lines, extras)
    if args.command == "linear" and args.sketches and not args.output:
        return  # one reader's question: printed, not a result of the page
    save(output, command, allocator, lines, extras)
    say(f"results: {output}")
    if lines and (args.plot or args.command == "linear"):
        picture = args.plot or output.with_suffix(".png")
        plot(picture, lines, title)
        say(f"picture: {picture}")


def _kind(args: argparse.Namespace) -> str:
    """Compiled models are lines beside others; on kept tokens they are a table of their own."""
    words_of = ("compile", "profile", "proof") if args.command == "tokens" else ()
    device = getattr(args, "device", None)
    where = f"-{device}" if device else ""
    return "".join(f"-{word}" for word in words_of if getattr(args, word)) + where


def _measure(args: argparse.Namespace) -> tuple[list[Line], dict[str, object]]:
    """The results of a command: lines of ratios, or rows as it shows them."""
    extras: dict[str, object] = {}
    lines: list[Line] = []
    if args.command == "linear":
        lines, extras = _linear(args)
    elif args.command == "conv":
        lines = list(
            layers.conv(args.batch, tuple(args.channels), args.size, args.budgets, args.seconds)
        )
    elif args.command == "model":
        names = _named(models.MODELS, args.only)
        lines = list(models.models(names, args.budgets, args.seconds, args.compile))
    elif args.command == "tokens":
        lines, extras = _tokens(args)
    elif args.command == "launches":
        device = args.device or torch.device("cpu")
        names = _named(launches.MODELS, args.only)
        rows = list(launches.launches(names, args.modes, device))
        extras = {"rows": rows, "counted": launches.COUNTED, "target": launches.TARGET}
        _show_rows("Kernels that a step launches", rows, LAUNCHES)
    elif args.command == "compiled":
        lines, rows = compiled.compiled(_named(compiled.CASES, args.only), args.seconds, args.whole)
        extras = {"rows": rows}
        _show_rows("Compiling: seconds, times of steps, and steps after which it has paid", rows)
    elif args.command == "import":
        rows = imports.imports(args.seconds)
        extras = {"rows": rows, "target": f"{imports.TARGET_SECONDS:g} s added"}
        _show_rows("Time of an import in a fresh process", rows)
    elif args.command == "tuner":
        rows = list(tuner.tuner(_named(tuner.CASES, args.only), args.small))
        extras = {"rows": rows, "target": tuner.TARGET}
        _show_rows("Training with a tuner, over training without", rows, TUNER)
    elif args.command == "peak":
        names = _named(peak.MODELS, args.only)
        found, shares = peak.peaks(names, args.small, tuple(args.methods))
        extras = {"rows": found, "shares": shares}
    else:
        names = _named(models.MODELS, args.only)
        rows = models.memory(names, args.budgets[0], args.seconds, args.threads)
        extras = {"rows": rows}
        _show_rows("Allocator settings, each in a fresh process, in turns", rows, MEMORY)
    return lines, extras


def _linear(args: argparse.Namespace) -> tuple[list[Line], dict[str, object]]:
    shapes = args.shapes or list(layers.LINEAR)
    if args.sketches:
        sketches = [parse_sketch(text) for text in args.sketches]
        return list(layers.linear_with(sketches, shapes, args.seconds)), {}
    lines = list(layers.linear(shapes, args.budgets, args.seconds))
    return lines, layers.overhead(args.seconds)


def _tokens(args: argparse.Namespace) -> tuple[list[Line], dict[str, object]]:
    if args.device:
        return [], _on_device(args)
    names = _named(tokens.MODELS, args.only)
    if not args.profile:
        run = tokens.compiled if args.compile else tokens.proofs if args.proof else tokens.tokens
        return list(run(names, args.seconds)), {}
    found = profile.profiles(names, args.steps)
    _show_rows("Shares of the exact step, by operation", found, PROFILE)
    return [], {"rows": found}


def _on_device(args: argparse.Namespace) -> dict[str, object]:
    """Printed as Markdown: to paste into an issue."""
    names = _named(tokens.MODELS, args.only or "ViT 96")
    # Sizes of a batch are asked for, so that each model is there once.
    models = {name.split(",")[0]: tokens.MODELS[name] for name in names}
    found = list(
        device_table.rows(
            models, args.device, args.batches, args.modes, args.seconds, args.autocast
        )
    )
    lines = [[row[column.title] for column in device_table.COLUMNS] for row in found]
    about = f"{device_table.about(args.device)}, {args.autocast or 'float32'}"
    table = Table("", device_table.COLUMNS, lines)
    text = ["| " + " | ".join(cells) + " |" for cells in (table.header, *table.cells())]
    text.insert(1, "|---" * len(device_table.COLUMNS) + "|")
    say("\n".join([about, "", *text, "", device_table.LEGEND]))
    return {"rows": found, "about": about}


def _named(cases: Iterable[str], part: str) -> list[str]:
    return [name for name in cases if part.lower() in name.lower()]


MEMORY = (
    *(words("model"), words("allocator"), Column("exact_ms", ".4g"), Column("sketched_ms", ".4g")),
    *(Column("ratio", ".4g"), Column("page_faults", ",.0f"), Column("peak_mb", ",.0f")),
)
TUNER = (
    *(words("case"), Column("steps"), Column("ratio", ".4f"), Column("counted", ".4f")),
    *(Column("probes"), words("ends_exact"), words("why")),
)
MODES = ("eager", "compiled")
LAUNCHES = (*(words("model"), words("mode"), words("step"), Column("forward"), Column("backward")),)

PROFILE = (
    *(words("model"), words("budgets"), words("operations")),
    *(
        Column(f"{kind} {way}", ".3f")
        for kind in ("exact", "kept")
        for way in ("forward", "backward")
    ),
    Column("above the floor", ".3f"),
)


def _show_rows(
    title: str, rows: list[dict[str, object]], columns: Sequence[Column] | None = None
) -> None:
    """A row for each dict; by default its first entry is text and the others are numbers."""
    first, *others = rows[0]
    chosen = tuple(columns or (words(first), *(Column(name, ".4g") for name in others)))
    values = [[row[column.title] for column in chosen] for row in rows]
    say(str(Table(title, chosen, values)))


def _shape(text: str) -> tuple[int, int, int]:
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) != 3 or not all(p.strip().isdigit() for p in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no shape; rows x inputs x outputs: 512x768x3072"
        )
    B, d, n = map(int, parts)
    return B, d, n


def _add_tokens(commands: Any, common: argparse.ArgumentParser) -> None:
    """Kept tokens: times, launches, compiled blocks."""
    kept = commands.add_parser("tokens", parents=[common], help="training steps on kept tokens")
    kept.add_argument("--only", default="", help="models whose name contains this")
    how = kept.add_mutually_exclusive_group()
    how.add_argument("--compile", action="store_true", help="compiled steps instead")
    how.add_argument("--profile", action="store_true", help="what is left above the floor instead")
    how.add_argument("--proof", action="store_true", help="what proving the blocks costs instead")
    kept.add_argument("--steps", type=int, default=3, help="of a profile")
    how.add_argument(
        "--device", type=torch.device, help="instead: one table on cpu, cuda, mps, xpu"
    )
    kept.add_argument("--batches", type=int, nargs="+", default=device_table.BATCHES)
    kept.add_argument("--autocast", choices=("bfloat16", "float16"), help="on a device")
    kept.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="on a device")
    number = commands.add_parser("launches", parents=[common], help="kernels that a step launches")
    number.add_argument("--only", default="", help="models whose name contains this")
    number.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    number.add_argument("--device", type=torch.device, help="cpu, cuda, mps, xpu")
    blocks = commands.add_parser("compiled", parents=[common], help="steps of compiled blocks")
    blocks.add_argument("--only", default="", help="cases whose name contains this")
    blocks.add_argument("--whole", action="store_true", help="and the exact model as one graph")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--threads", type=int, default=1)
    common.add_argument("--seconds", type=float, default=6.0, help="for each case and budget")
    common.add_argument("--allocator", choices=("pinned", "default"), default="pinned")
    common.add_argument("--output", type=Path, help="a JSON file, by default in benchmarks/results")
    common.add_argument("--plot", type=Path, help="a PNG file: ratio against budget")
    commands = parser.add_subparsers(dest="command", required=True)
    linear = commands.add_parser("linear", parents=[common], help="backward of one linear layer")
    linear.add_argument("--shapes", type=_shape, nargs="+", help="rows x inputs x outputs")
    linear.add_argument("--budgets", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.5])
    linear.add_argument("--sketches", nargs="+", help="instead: 'Rows(0.3)', module:Mine(0.1)")
    conv = commands.add_parser("conv", parents=[common], help="backward of one convolution")
    conv.add_argument("--batch", type=int, default=128)
    conv.add_argument("--channels", type=int, nargs=2, default=[256, 512])
    conv.add_argument("--size", type=int, default=8)
    conv.add_argument("--budgets", type=float, nargs="+", default=[0.1])
    for name, text in (("model", "whole training steps"), ("memory", "allocator settings")):
        model = commands.add_parser(name, parents=[common], help=text)
        model.add_argument("--only", default="", help="models whose name contains this")
        model.add_argument("--budgets", type=float, nargs="+", default=[0.1])
        if name == "model":
            model.add_argument("--compile", action="store_true", help="compiled steps too")
    _add_tokens(commands, common)
    most = commands.add_parser("peak", parents=[common], help="peak memory and largest batch")
    most.add_argument("--only", default="", help="models whose name contains this")
    most.add_argument("--methods", nargs="+", choices=peak.METHODS, default=peak.METHODS)
    most.add_argument("--small", action="store_true", help="with a sixteenth of the batch")
    within = commands.add_parser("limits", parents=[common], help="largest batch under a limit")
    within.add_argument("--gigabytes", type=float, nargs="+", default=[2, 4, 8])
    within.add_argument("--small", action="store_true", help="a tiny model and made-up data")
    tuned = commands.add_parser("tuner", parents=[common], help="what a tuner costs")
    tuned.add_argument("--only", default="", help="cases whose name contains this")
    tuned.add_argument("--small", action="store_true", help="made-up data and few steps")
    commands.add_parser("import", parents=[common], help="what importing sketchprop adds")
    commands.add_parser("page", help="docs/results/speed.md from the stored results")
    two = commands.add_parser("compare", help="two stored results, before and after a change")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    return parser


if __name__ == "__main__":
    main()
