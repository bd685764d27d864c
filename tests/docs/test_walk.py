"""CONTRIBUTING's walk of one backward is what really happens, file by file."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import sketchprop as sp

ROOT = Path(__file__).parents[2]
PACKAGE = Path(sp.__file__).parent
STEP = re.compile(r"`([\w/]+\.py):([^`]+)`((?:(?:, | → )`[^`]+`)*)")


def written_walk(column):
    """[(file, [function, ...])] of one column of the table, in order."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("## The walk of one backward")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if re.match(r"\| \d", line)]
    steps = []
    for row in rows:
        cell = row[1] if "the same" in row[column] else row[column]
        file, first, more = STEP.search(cell).groups()
        steps.append((file, [first, *re.findall(r"`([^`]+)`", more)]))
    return steps


def calls(sketch):
    """(file, qualified name) of every call into the package, from `sketch_` to the gradients."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    x = torch.randn(12, 6, requires_grad=True)
    seen = []

    def note(frame, event, _):
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents:
            seen.append((file.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        sp.sketch_(model, sketch)
        model(x).sum().backward()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize(("column", "sketch"), [(1, sp.L1(0.5)), (2, sp.Rows(0.5))])
def test_the_walk_is_short_and_true(column, sketch):
    steps = written_walk(column)
    files = [file for file, _ in steps]
    assert len(files) == len(set(files)) <= 9
    seen = calls(sketch)
    place = 0
    for file, functions in steps:
        names = [name for f, name in seen[place:] if f == file]
        for function in functions:
            last = function.rpartition(".")[2]
            assert any(name.rpartition(".")[2] == last for name in names), (file, function)
        place += next(i for i, (f, _) in enumerate(seen[place:]) if f == file)
