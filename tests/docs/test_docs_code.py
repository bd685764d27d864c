"""Every code block of README and the site is run; every command that they show is parsed."""

from __future__ import annotations

import argparse
import importlib
import re
import runpy
import shlex
import sys

import pytest
import torch

from docs_pages import DOCS, ROOT, blocks, commands, pages, run, without_numbers
from sketchprop.cli.expressions import UsageError, parse_sketches

PYTHON = {p.relative_to(ROOT).as_posix(): p for p in pages() if "```python" in p.read_text()}
del PYTHON["docs/tutorial.md"]  # run as a notebook: test_notebook.py
SHELL = {"bash", "sh", "shell", "console", ""}


@pytest.mark.parametrize("page", PYTHON)
def test_the_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKETCHPROP_CACHE", str(tmp_path))
    threads = torch.get_num_threads()
    in_order = blocks(PYTHON[page])
    try:
        for block, printed in run(PYTHON[page]):
            below = in_order[in_order.index(block) + 1 :][:1]
            if below and below[0].output:
                assert printed.strip(), f"{block.where} prints nothing"
            if below and below[0].output == "same":
                assert without_numbers(printed) == without_numbers(below[0].code), (
                    f"{block.where} prints\n{printed}"
                )
    finally:
        torch.set_num_threads(threads)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


class _ParsedError(Exception):
    """Raised in place of running a command whose arguments were understood."""

    def __init__(self, options):
        self.options = options


@pytest.fixture
def parse_only(monkeypatch):
    """Arguments are parsed by the real parser, and nothing is run."""
    original = argparse.ArgumentParser.parse_args

    def parse_args(self, args=None, namespace=None):
        raise _ParsedError(original(self, args, namespace))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)

    def start(words):
        if words[0] == "sketchprop":
            importlib.import_module("sketchprop.cli").main()
        elif words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=False)
        else:
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")

    def parse(command):
        words = [w for w in shlex.split(command) if not re.match(r"[A-Z_]+=", w)]
        if words[0] == "torchrun":  # its own options end where the script begins
            words = words[next(i for i, w in enumerate(words) if w.endswith(".py")) :]
        if words[:2] == ["python", "-m"]:
            words = words[1:]
        monkeypatch.setattr(sys, "argv", words[1:] if words[0] == "-m" else words)
        with pytest.raises(_ParsedError) as caught:
            start(words)
        return caught.value.options

    return parse


def _checkable(command):
    return re.match(r"(?:[A-Z_]+=\S+ )*(sketchprop|python -m|torchrun|python \S+\.py)\b", command)


SHOWN = sorted(
    {
        command
        for page in [*pages(), ROOT / "experiments" / "README.md"]
        for block in blocks(page)
        if block.language in SHELL
        for command in commands(block)
        if _checkable(command)
    }
    | {
        # Commands in the running text and in tables.
        command
        for page in [*pages()]
        for command in re.findall(r"`((?:python -m|sketchprop) [^`]+)`", page.read_text())
        if " --" in command and "|" not in command and "--help" not in command
    }
)


@pytest.mark.parametrize("command", SHOWN)
def test_a_command_can_be_typed_as_shown(command, parse_only):
    options = parse_only(command)
    for text in getattr(options, "sketches", None) or []:
        if ":" not in text:  # those of the reader's own module
            try:
                parse_sketches([text])
            except UsageError as error:
                pytest.fail(f"{command}: {error}")


# -- the paper map ---------------------------------------------------------------------------

MAP = (DOCS / "paper-map.md").read_text()
SYMBOL = r"`((?:sketchprop|pseudo_code|experiments|benchmarks)(?:\.\w+)+)`"
SYMBOLS = sorted(set(re.findall(SYMBOL, MAP)))


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_a_symbol_of_the_paper_map_exists(symbol):
    parts = symbol.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return
    pytest.fail(symbol)
