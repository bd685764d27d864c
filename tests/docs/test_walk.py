"""CONTRIBUTING's walks are what one step of training really enters, file by file, and no more."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import sketchprop as sp
from sketchprop.zoo import Block

ROOT = Path(__file__).parents[2]
PACKAGE = Path(sp.__file__).parent
MOST_FILES = {"L1": 11, "Rows": 13, "Tokens": 12}


def written_walk(name):
    """{file: functions that the table names}, in order."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"\n### [^\n]*`{name}\([^\n]*\n(.*?)\n##", text, re.S)
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", section, re.M)
    files = [file for file, _ in rows]
    assert len(set(files)) == len(files)
    return {file: re.findall(r"`([A-Za-z0-9_.]+)`", about) for file, about in rows}


def traced_walk(model, x):
    """{file: functions called}, by first entry, of one step."""
    seen = {}

    def note(frame, event, _):
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents:
            name = file.relative_to(PACKAGE).as_posix()
            seen.setdefault(name, set()).add(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        model(x).sum().backward()
    finally:
        sys.setprofile(None)
    return seen


def layers():
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)), torch.randn(12, 6, requires_grad=True)


def block():
    return Block(8, 2, 16), torch.randn(4, 10, 8, requires_grad=True)


@pytest.mark.parametrize(
    ("sketch", "made"), [(sp.L1(0.5), layers), (sp.Rows(0.5), layers), (sp.Tokens(0.3), block)]
)
def test_what_is_written_is_what_a_step_enters(sketch, made):
    name = type(sketch).__name__
    model, x = made()
    sp.sketch_(model, sketch)(x).sum().backward()  # the first batch of a block is its proof
    traced, written = traced_walk(model, x), written_walk(name)
    assert list(written) == list(traced)
    assert len(written) <= MOST_FILES[name]
    for file, functions in written.items():
        assert functions, file
        for function in functions:
            assert function in traced[file], (file, function)
