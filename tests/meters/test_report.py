"""The HTML report: its numbers are those of the reports, and it needs nothing from elsewhere."""

from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn

import sketchprop as sp
from sketchprop.cli.show import Progress
from sketchprop.core.table import Column, Table, plain_data, words
from sketchprop.meters import Estimate, criterion
from sketchprop.meters.words import ratio, with_error
from sketchprop.report import html_report, setup_facts
from sketchprop.report.pictures import MOST_ROWS, BarChart, as_svg, noise_chart

VOID = {"meta"}
NASTY = 'a<script>alert("x")</script>&amp;'


class Page(HTMLParser):
    """Reads a page, insists that every element is closed in order, collects what is in it."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert len({name for name, _ in attributes}) == len(attributes)
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]][-1] += data

    @property
    def words(self):
        everything = [t for tag, texts in self.texts.items() if tag != "style" for t in texts]
        return "\n".join(everything)


class Odd(nn.Module):
    """Layers under names that HTML would take for its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({NASTY: nn.Linear(12, 48), "b": nn.Linear(48, 32)})
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x).relu()
        return self.head(x)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def reports():
    torch.manual_seed(0)
    model = Odd()
    batches = [(torch.randn(16, 12), torch.randint(4, (16,))) for _ in range(3)]
    measured = sp.measure(model, loss_fn, batches, sp.L1(0.25), draws=4, rounds=2)
    return measured, sp.plan(model, loss_fn, batches[0], sketch=sp.L1(0.25), rounds=1)


@pytest.fixture(scope="module")
def page(reports):
    measured, planned = reports
    return html_report(measured, [planned], title=f"Model {NASTY}", facts={"command": NASTY})


def test_the_numbers_are_those_of_the_reports(reports, page):
    measured, planned = reports
    words = Page(page).words
    for verdict in (measured.by_time, measured.by_flops):
        assert with_error(verdict.change, verdict.error) in words
    assert ratio(measured.verdict.cost) in words
    assert ratio(1 + measured.relative.value) in words
    assert ratio(measured.flops.kept) in words
    assert str(measured.relative) in words
    assert f"V = {measured.added} (" in words
    assert f"σ² = {measured.sigma2} (" in words
    cells = set(words.split("\n"))
    for table in (*measured.tables()[1:], *planned.tables()):
        assert table.rows
        assert set(table.header) <= cells
        for row in table.cells():
            assert set(row) <= cells
    for line in measured.variance.layers:
        assert {line.layer, str(line.injected), str(line.relative)} <= cells
    for line in planned.layers:
        assert {str(line.rows), f"{1e3 * line.seconds:.3f}"} <= cells


def test_all_numbers_are_there_as_json(reports, page):
    measured, planned = reports
    (text,) = Page(page).texts["pre"]
    data = json.loads(text)
    assert data["measure"] == json.loads(json.dumps(plain_data(measured.as_dict())))
    assert data["plans"] == json.loads(json.dumps([plain_data(planned.as_dict())]))
    assert data["facts"]["batches"] == "3"
    assert data["facts"]["draws for each batch"] == "4"


# --- pictures --------------------------------------------------------------------------------


def drawn(chart):
    """What a chart draws: names, lengths of the bars, one column after the other, and a note."""
    axes = Figure().subplots()
    chart.draw(axes)
    names = [tick.get_text() for tick in axes.get_yticklabels()]
    return names, [bar.get_width() for bar in axes.patches], axes.get_xlabel()


def table(*values):
    columns = (words("layer"), Column("exact", ".1f", scale=1e3), Column("sketched"))
    return Table("t", columns, [(f"layer {i}", value, value) for i, value in enumerate(values)])


def test_bars_are_as_long_as_the_numbers_of_the_table(reports):
    odd = (0.5, Estimate(2.0, 1.0, 0.25), None, math.inf, -1.0)
    names, lengths, _ = drawn(BarChart(table(*odd), ("exact", "sketched")))
    assert names == [f"layer {i}" for i in range(5)]
    assert lengths == [500.0, 2000.0, 0.0, 0.0, -1000.0, 0.5, 2.0, 0.0, 0.0, -1.0]
    noise = [line.relative.value for line in reports[0].variance.layers]
    assert drawn(noise_chart(reports[0]))[1] == noise


def test_a_chart_of_many_layers_shows_the_largest():
    names, _, note = drawn(BarChart(table(*map(float, range(MOST_ROWS + 5))), ("exact",)))
    assert names == [f"layer {i}" for i in range(5, MOST_ROWS + 5)]
    assert note == f"the {MOST_ROWS} largest of {MOST_ROWS + 5}"


@pytest.mark.parametrize("value", [0.0, math.nan, 1e-30, Estimate(1.0, math.inf, math.inf)])
def test_a_chart_of_odd_numbers_and_names_can_be_drawn(value):
    odd = replace(table(value), rows=[("$\\x$ <b>" + 99 * "a", value, value)])
    Page(as_svg(BarChart(odd, ("exact",))))


def test_what_is_not_installed_is_named(reports, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'sketchprop\[cli\]"):
        html_report(reports[0])


# --- one file, any name ----------------------------------------------------------------------


def test_nothing_comes_from_elsewhere(page):
    for tag, attributes in Page(page).tags:
        assert tag not in {"script", "link", "img", "iframe", "object", "embed", "base"}
        assert not {"src", "href", "srcset", "data", "background"} & set(attributes)
        assert attributes.get("xlink:href", "#").startswith("#")  # a part of the same drawing
        assert not any(name.startswith("on") for name in attributes)
        assert not any("url(" in text and "url(#" not in text for text in attributes.values())
    assert "@import" not in page


def test_the_page_is_a_document_for_any_screen(page):
    parsed = Page(page)
    assert page.startswith("<!DOCTYPE html>")
    assert ("meta", {"charset": "utf-8"}) in parsed.tags
    assert any(attributes.get("name") == "viewport" for _, attributes in parsed.tags)
    assert "prefers-color-scheme: dark" in page
    # A heading for each section, a name for each drawing: what a screen reader says.
    assert len(parsed.texts["section"]) == len(parsed.texts["h2"]) == 3
    names = [a["aria-label"] for _, a in parsed.tags if a.get("role") == "img"]
    assert len(names) == len(parsed.texts["svg"]) == 2
    assert all(names)


def test_names_are_escaped(page):
    assert "<script" not in page
    assert "alert(&#34;x&#34;)" in page
    parsed = Page(page)
    assert parsed.texts["h1"] == [f"Model {NASTY}"]
    assert f"layers.{NASTY}" in parsed.texts["td"]
    assert NASTY in parsed.texts["td"]


def test_the_answer_comes_first(reports, page):
    assert page.index('class="verdict') < page.index('class="cards"') < page.index("<section>")
    assert page.rindex("<section>") == page.index("<section><h2>How it was measured")
    style, answer = reports[0].answer()
    assert f'class="verdict {style}"><strong>{answer}' in page
    assert str(reports[0]).startswith(reports[0].answer()[1])


# --- the answer in words ---------------------------------------------------------------------


def judged(report, relative, cost, cost_error=0.0, missed=()):
    estimate = Estimate(relative, 0.01)
    variance = replace(report.variance, relative=estimate, missed=dict.fromkeys(missed, estimate))
    return replace(
        report,
        variance=variance,
        by_time=criterion(estimate, cost, cost_error),
        by_flops=criterion(estimate, 0.5, basis="FLOPs"),
    )


@pytest.mark.parametrize(
    ("given", "style", "says"),
    [
        ({"relative": 0.2, "cost": 0.5}, "yes", "40 % less time"),
        ({"relative": 0.5, "cost": 0.9}, "no", "35 % more time"),
        ({"relative": 4.0, "cost": 0.9}, "no", "4.5 times the time"),
        ({"relative": 74963.0, "cost": 0.9}, "no", "the noise drowns the gradient"),
        ({"relative": 74963.0, "cost": 0.9}, "no", "over 1000 times the time"),
        ({"relative": 0.2, "cost": 0.8, "cost_error": 0.2}, "open", "within two standard errors"),
        (
            {"relative": 0.2, "cost": 0.5, "missed": ["fc.weight"]},
            "open",
            "1 parameter (fc.weight)",
        ),
        ({"relative": 4.0, "cost": 0.9, "missed": ["fc.weight"]}, "no", "larger than shown"),
    ],
)
def test_the_answer_follows_the_verdict(reports, given, style, says):
    report = judged(reports[0], **given)
    assert report.answer()[0] == style
    assert says in report.headline()
    if style == "yes":
        assert report.pays


def test_without_times_it_is_judged_by_flops(reports):
    report = replace(reports[0], times=None, by_time=None)
    page = html_report(report)
    assert "the work (FLOPs) of an exact one" in page
    assert "time of a step" not in page
    assert "The plan for" not in page
    assert setup_facts()["torch"] in page


def test_without_a_split_the_layers_are_left_out(reports):
    variance = replace(reports[0].variance, layers=(), remainder=None)
    page = html_report(replace(reports[0], variance=variance))
    assert "Where the noise is made" not in page
    Page(page)


# --- the command -----------------------------------------------------------------------------


def test_the_command_writes_a_page(run, tmp_path):
    typed = ["report", "--model", "mlp", "--sketch", "0=L1(0.5)", "2=Rows(0.5)", "--draws", "2"]
    typed += ["--batches", "2", "--batch-size", "16", "--rounds", "1", "--steps", "2"]
    typed += ["--json", "r.json", "--output", "r.html", "--seed", "3"]
    code, out, err = run(*typed)
    assert err == ""  # done before the first line of progress is due
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    data = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert code == (0 if data["measure"]["pays"] else 1)
    assert "report: r.html" in out
    parsed = Page(page)
    inside = json.loads(parsed.texts["pre"][0])
    assert inside["measure"] == data["measure"]
    assert [planned["sketch"] for planned in data["plans"]] == ["L1(0.5)", "Rows(0.5)"]
    assert data["facts"]["seed"] == "3"
    assert data["facts"]["exact steps before"] == "2"
    assert data["facts"]["command"].startswith("sketchprop report --model mlp")
    assert "mlp, 55,050 parameters" in parsed.words


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_says_how_long_it_will_take_and_in_a_pipe_now_and_then():
    stream = Terminal()
    with Progress(stream, redraw=0.0) as line:
        line.stage("measuring")
        line.share(0.5)
    assert "measuring: 50 %, 0 s left" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
    stream = io.StringIO()
    with Progress(stream, repeat=0.0) as line:
        line.stage("measuring")
        line.share(0.25)
    assert stream.getvalue() == "sketchprop: measuring: 25 %, 0 s left\n"
    quiet = io.StringIO()
    line = Progress(quiet)
    line.stage("measuring")
    line.share(0.5)  # too soon for another line
    assert quiet.getvalue() == ""
