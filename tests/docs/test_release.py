"""Version, changelog and citation say the same."""

import re
from importlib.metadata import version
from pathlib import Path

import sketchprop as sp

ROOT = Path(__file__).parents[2]
VERSION = re.fullmatch(r"(\d+\.\d+\.\d+)(\.dev\d+)?", sp.__version__)


def test_version_changelog_and_citation_say_the_same():
    number, unreleased = VERSION.groups()
    top = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)[1]
    wanted = "Unreleased" if unreleased else rf"{re.escape(number)} - \d{{4}}-\d\d-\d\d"
    assert re.fullmatch(wanted, top)
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", citation, re.M) == [number]
    assert bool(re.search(r"^date-released: ", citation, re.M)) is not bool(unreleased)
    assert sp.__version__ == version("sketchprop")
