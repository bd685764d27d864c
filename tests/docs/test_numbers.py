"""Measured numbers of README and of the pages come from stored results."""

import re
import sys

import pytest

from docs_pages import DOCS, ROOT, pages

sys.path.insert(0, str(DOCS))

import show_numbers

FILLED = re.compile(r"<!--= .+? -->.*?<!--/-->", re.S)
TYPED = re.compile(r"\d\.\d+ (?:×|times|\(\d|of (?:the|an|exact))|\d ?% (?:less|more)|± ?\d")
OUR_OWN = [page for page in pages() if page.parent in (ROOT, DOCS) or page.name == "index.md"]


def test_what_is_stored_is_what_is_shown(monkeypatch):
    """``python docs/show_numbers.py`` writes it."""
    monkeypatch.chdir(ROOT)
    filled = [page for page in pages() if "<!--= " in page.read_text(encoding="utf-8")]
    assert len(filled) > 8
    for page in filled:
        text = page.read_text(encoding="utf-8")
        assert show_numbers.filled(text) == text, page
        # A comment that begins a line makes it HTML: a whole table or block stands below it.
        assert not re.search(r"^<!--= .+? -->[^\n]", text, re.M), page


@pytest.mark.parametrize("page", OUR_OWN, ids=lambda page: page.name)
def test_no_measured_number_is_typed(page):
    """Ratios, gains and errors, outside of code and of what is filled in; sizes are typed."""
    text = FILLED.sub("", page.read_text(encoding="utf-8"))
    text = re.sub(r"^```.*?^```|`[^`\n]+`", "", text, flags=re.S | re.M)
    assert not TYPED.findall(text)


def test_what_was_not_measured_says_so():
    assert show_numbers.gain("documents", "no such method", 4) == show_numbers.MISSING
    assert show_numbers.pay("no such task", "exact", 4, "end") == show_numbers.MISSING
