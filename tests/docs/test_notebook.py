"""The tutorial as a notebook: made from the page, and it runs."""

from __future__ import annotations

import contextlib
import io
import json
import sys

from docs_pages import DOCS, blocks, without_numbers

sys.path.insert(0, str(DOCS))

import show_outputs

NOTEBOOK = DOCS / "tutorial.ipynb"


def test_it_is_the_page():
    """``python docs/show_outputs.py`` writes it."""
    made = show_outputs.notebook((DOCS / "tutorial.md").read_text(encoding="utf-8"))
    assert json.loads(NOTEBOOK.read_text(encoding="utf-8")) == made
    code = ["".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "code"]
    page = [b.code.rstrip("\n") for b in blocks(DOCS / "tutorial.md") if b.language == "python"]
    assert code == page
    words = "".join("".join(c["source"]) for c in made["cells"] if c["cell_type"] == "markdown")
    assert not [mark for mark in ("<!--", "{download}", "](path") if mark in words]


def test_its_cells_run_in_order_and_print_what_they_show(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    space: dict[str, object] = {"__name__": "notebook"}
    shown = 0
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec("".join(cell["source"]), space)
        for output in cell["outputs"]:
            shown += 1
            if "advise" not in "".join(cell["source"]):  # its words depend on the machine
                told = without_numbers("".join(output["text"]))
                assert told == without_numbers(printed.getvalue())
    assert shown >= 5
