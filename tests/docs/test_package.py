"""The public surface, what importing it costs, and the version that all files name."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import sketchprop as sp

ROOT = Path(__file__).parents[2]
VERSION = re.fullmatch(r"(\d+\.\d+\.\d+)(\.dev\d+)?", sp.__version__)


def test_every_public_name_has_a_docstring():
    for name in sp.__all__:
        if not name.startswith("__"):
            assert getattr(sp, name).__doc__, name


def test_import_leaves_the_random_state_and_the_threads_alone():
    code = (
        "import torch; s, t = torch.get_rng_state(), torch.get_num_threads(); import sketchprop; "
        "print(torch.equal(s, torch.get_rng_state()), t == torch.get_num_threads())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "True"]


def test_version_changelog_and_citation_say_the_same():
    number, unreleased = VERSION.groups()
    top = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)[1]
    wanted = "Unreleased" if unreleased else rf"{re.escape(number)} - \d{{4}}-\d\d-\d\d"
    assert re.fullmatch(wanted, top)
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", citation, re.M) == [number]
    assert bool(re.search(r"^date-released: ", citation, re.M)) is not bool(unreleased)
    assert sp.__version__ == version("sketchprop")
