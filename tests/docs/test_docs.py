"""The site builds without a warning, has every public name, and no dead link."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

import sketchprop as sp
from docs_pages import DOCS, ROOT, anchors, links, pages
from sketchprop import distributed


def test_the_site(tmp_path):
    """One build for all that is asked of it: it takes most of the time."""
    site = _built(tmp_path)
    _has_every_page_and_every_public_name(site)
    found = {path: _Page(path.read_text()) for path in site.rglob("*.html")}
    _has_no_dead_link(site, found)
    loaded = set().union(*(page.loaded for page in found.values()))
    assert not [target for target in loaded if re.match(r"https?:|//", target)]  # no network


def _built(out):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E"]
    run = subprocess.run(
        [*command, "-d", str(out / "doctrees"), str(DOCS), str(out / "html")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return out / "html"


class _Page(HTMLParser):
    """Ids, links and sources of a page."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.targets, self.loaded = set(), set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if values.get("id"):
            self.ids.add(values["id"])
        for name in ("href", "src"):
            if values.get(name) and tag in ("a", "img", "link", "script"):
                self.targets.add(values[name])
                self.loaded |= {values[name]} if tag != "a" else set()


def _has_every_page_and_every_public_name(site):
    text = "".join(p.read_text() for p in (site / "api").glob("*.html"))
    ids = _Page(text).ids
    public = [f"sketchprop.{name}" for name in sp.__all__ if name != "select"]
    public.append("sketchprop.layers.select.everything")
    public += [f"sketchprop.distributed.{name}" for name in distributed.__all__]
    for trainer in ("transformers", "lightning"):
        public.append(f"sketchprop.integrations.{trainer}.SketchCallback")
    assert not [name for name in public if name not in ids]
    for page in pages():
        if page.is_relative_to(DOCS):
            assert (site / page.relative_to(DOCS).with_suffix(".html")).is_file()


def _has_no_dead_link(site, found):
    dead = []
    for path, page in found.items():
        for target in page.targets:
            if re.match(r"[a-z]+:|//", target):
                continue
            file, _, anchor = target.partition("#")
            other = path if not file else (path.parent / file.split("?")[0]).resolve()
            if not other.exists() or (anchor and other in found and anchor not in found[other].ids):
                dead.append(f"{path.relative_to(site)} -> {target}")
    assert not dead


@pytest.mark.parametrize("name", [*(p.name for p in ROOT.glob("*.md")), "experiments/README.md"])
def test_no_link_in_a_markdown_file_that_is_not_of_the_site_is_dead(name):
    page, dead = ROOT / name, []
    for line, target in links(page):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        if not other.exists() or (
            anchor and other.suffix == ".md" and anchor not in anchors(other)
        ):
            dead.append(f"{name}:{line} -> {target}")
    assert not dead
