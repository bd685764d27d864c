"""The site builds without a warning, has every public name, and no dead link."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

import sketchprop as sp
from docs_pages import DOCS, ROOT, anchors, links, pages
from sketchprop import distributed
from sketchprop.meters.words import change_in_words


def test_the_site(tmp_path):
    """One build for all that is asked of it: it takes most of the time."""
    site = _built(tmp_path)
    _has_every_page_and_every_public_name(site)
    found = {path: _Page(path.read_text()) for path in site.rglob("*.html")}
    _has_no_dead_link(site, found)
    _reaches_every_page_from_the_front_page(site, found)
    _needs_no_network(site)


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
        self.ids, self.targets = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if values.get("id"):
            self.ids.add(values["id"])
        for name in ("href", "src"):
            if values.get(name) and tag in ("a", "img", "link", "script"):
                self.targets.add(values[name])


def _has_every_page_and_every_public_name(site):
    text = "".join(p.read_text() for p in (site / "api").glob("*.html"))
    ids = _Page(text).ids
    public = [f"sketchprop.{name}" for name in sp.__all__ if name != "select"]
    public += [
        f"sketchprop.layers.select.{name}"
        for name in ("adapters", "everything", "last", "linear", "wide")
    ]
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


def _needs_no_network(site):
    for path in site.rglob("*.html"):
        outside = [
            t
            for t in re.findall(
                r"<(?:script|link|img)[^>]+?(?:src|href)=\"([^\"]+)\"", path.read_text()
            )
            if re.match(r"https?:|//", t)
        ]
        assert not outside, path


FILES = {p.relative_to(ROOT).as_posix(): p for p in [*pages(), *ROOT.glob("*.md")]}
FILES["experiments/README.md"] = ROOT / "experiments" / "README.md"


@pytest.mark.parametrize("name", FILES)
def test_no_link_in_a_markdown_file_is_dead(name):
    page = FILES[name]
    dead = []
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


def _reaches_every_page_from_the_front_page(site, found):
    seen, front = set(), [site / "index.html"]
    while front:
        path = front.pop()
        if path in seen or path not in found:
            continue
        seen.add(path)
        front += [
            (path.parent / t.split("#")[0]).resolve() for t in found[path].targets if t[0] != "#"
        ]
    wanted = {site / p.relative_to(DOCS).with_suffix(".html") for p in pages()[1:]}
    assert wanted <= seen


def test_every_option_of_a_sketch_is_explained():
    """In its own docstring, or in the tables of the API's front page."""
    page = (DOCS / "api" / "index.md").read_text()
    common = set(re.findall(r"`(\w+)`", page.split("## Options")[1]))
    for name in sp.__all__:
        kind = getattr(sp, name)
        if isinstance(kind, type) and issubclass(
            kind, sp.Sketch | sp.Split | sp.Tokens | sp.Planner
        ):
            own = set(re.findall(r"``(\w+)", kind.__doc__))
            options = {p for p in inspect.signature(kind).parameters if p[0] != "_"}
            assert options <= common | own, (name, options - common - own)


# -- figures that README and the guide repeat ------------------------------------------------------

_COLUMNS = {
    "`L1`": ("L1", 0.1),
    "`L1` at 0.5": ("L1", 0.5),
    "`Diagonal`": ("Diagonal", 0.1),
    "`SampleMask`": ("SampleMask", 0.1),
    "`GradientSVD`": ("GradientSVD", 0.1),
    "the same, `Every(50)`": ("GradientSVD, Every(50)", 0.1),
    "floor": ("floor", 0.1),
}


_TASKS = {
    "ViT of width 96": "vit",
    "BERT of reactions": "yields",
    "MiniLM on sentence pairs": "mrpc",
    "MiniLM on sentences": "sst2",
}


def test_times_of_steps_by_the_size_of_the_batch_are_those_that_were_measured():
    checked = 0
    for page in pages():
        for name, sketch, cells in re.findall(
            r"^\| ([^|]+?), (?:\d+ tokens, )?`(Tokens\([\d.]+\))` \| (\d+:&nbsp;.*?) \|$",
            page.read_text(),
            re.MULTILINE,
        ):
            stored = json.loads((ROOT / f"docs/results/pay/{_TASKS[name]}/times.json").read_text())[
                "costs"
            ]
            for cell in cells.split(" · "):
                size, ratio = cell.split(":&nbsp;")
                assert ratio == f"{stored[f'{sketch}/{size}'] / stored[f'/{size}']:.2f}", (
                    page,
                    cell,
                )
                checked += 1
    assert checked >= 20


def test_times_to_equal_quality_are_those_of_the_evidence():
    evidence = (ROOT / "docs/results/pay/README.md").read_text()
    checked = 0
    for page in [p for p in pages() if p.parent.parent.name != "results"]:
        for text in re.findall(r"(?:> 1|\d\.\d\d) \((?:≤ )?\d\.\d\d to [^)]+\)", page.read_text()):
            assert text in evidence, (page, text)
            checked += 1
    assert checked >= 20


def test_the_clock_agrees_with_what_was_counted_as_well_as_readme_says():
    text = (ROOT / "README.md").read_text().replace("\n", " ")
    (percent,) = re.findall(r"needs what was counted, within (\d+) %", text)
    stored = [json.loads(p.read_text()) for p in ROOT.glob("docs/results/pay/*/earnest.json")]
    assert len(stored) == 5
    assert max(abs(one["ratio"] / one["share"] - 1) for one in stored) <= int(percent) / 100


def test_the_answer_that_readme_shows_was_given():
    stored = json.loads((ROOT / "docs/results/advise/results.json").read_text())["vit"]
    text = (ROOT / "README.md").read_text()
    for part in (stored["line"], stored["reason"], change_in_words(stored["change"], "time")):
        assert part in text


@pytest.mark.parametrize("name", ["README.md", "docs/choosing.md"])
def test_times_of_layers_are_those_that_were_measured(name):
    stored = json.loads((ROOT / "benchmarks/results/linear-1-thread.json").read_text())["lines"]
    times = {(s["case"], s["method"], s["budget"]): s["ratio"]["median"] for s in stored}
    times |= {(s["case"], "floor", s["budget"]): s["floor"] for s in stored}
    header, checked = [], 0
    for line in (ROOT / name).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if "rows × inputs × outputs" in cells[0] and line.startswith("|"):
            header = cells[1:]
        elif header and re.fullmatch(r"\d+ × \d+ × \d+", cells[0]):
            for column, cell in zip(header, cells[1:], strict=True):
                if cell:
                    digits = len(cell.partition(".")[2])
                    assert cell == f"{times[cells[0], *_COLUMNS[column]]:.{digits}f}", (
                        line,
                        column,
                    )
                    checked += 1
    assert checked >= 25
