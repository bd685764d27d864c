"""keep_pages: in a process of its own, because it changes the allocator for good."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sketchprop.core.allocator import keep_pages

FAULTS = """
import resource, sys, torch
from sketchprop.core.allocator import keep_pages
print(int(keep_pages()) if sys.argv[1] == "keep" else 1)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.zeros(4096, 4096)  # above what the allocator keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="for Linux")
def test_pages_are_kept():
    def run(mode):
        call = [sys.executable, "-c", FAULTS, mode]
        done = subprocess.run(call, capture_output=True, text=True, check=True)
        understood, faults = map(int, done.stdout.split())
        return understood, faults

    _, usual = run("usual")
    understood, kept = run("keep")
    if not understood:
        pytest.skip("another C library")
    if usual < 100:
        pytest.skip("this allocator keeps its pages anyway")
    assert kept < usual / 4


def test_a_bad_size_is_refused():
    with pytest.raises(ValueError, match="top_pad=-1"):
        keep_pages(-1)
