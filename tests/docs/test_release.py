"""Version, changelog and citation say the same."""

import re
from pathlib import Path

import sketchprop as sp

ROOT = Path(__file__).parents[2]
VERSION = re.fullmatch(r"(\d+\.\d+\.\d+)(\.dev\d+)?", sp.__version__)


def headings() -> list[str]:
    """What the changelog has, newest first."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return re.findall(r"^## (.+)$", text, re.MULTILINE)


def test_the_version_is_a_release_or_on_the_way_to_one():
    assert VERSION, sp.__version__


def test_the_changelog_begins_with_this_version():
    top = headings()[0]
    if VERSION[2]:
        assert top == "Unreleased", f"{sp.__version__} is not released; the top is {top!r}"
    else:
        assert re.fullmatch(rf"{re.escape(sp.__version__)} - \d{{4}}-\d\d-\d\d", top)


def test_released_versions_fall_and_come_once():
    released = [re.match(r"(\d+)\.(\d+)\.(\d+) - \d{4}-\d\d-\d\d$", h) for h in headings()]
    numbers = [tuple(map(int, m.groups())) for m in released if m]
    assert len(numbers) + headings().count("Unreleased") == len(headings())
    assert numbers == sorted(set(numbers), reverse=True)
    assert headings().count("Unreleased") <= 1


def test_the_citation_names_this_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", text, re.MULTILINE) == [VERSION[1]]
    assert bool(re.search(r"^date-released: ", text, re.MULTILINE)) is not bool(VERSION[2])


def test_the_procedure_names_files_that_exist():
    text = (ROOT / "RELEASING.md").read_text(encoding="utf-8")
    named = re.findall(r"[\w/.-]+\.(?:py|md|cff)\b", text)
    assert {"src/sketchprop/_version.py", "CHANGELOG.md", "CITATION.cff"} <= set(named)
    for name in named:
        assert (ROOT / name).exists() or (ROOT / "src/sketchprop" / name).exists(), name
