"""The documentation site: ``make docs``."""

from __future__ import annotations

import re
from pathlib import Path

import imagesize
from docutils import nodes

import sketchprop

project = "sketchprop"
author = "The sketchprop developers"
copyright = "The sketchprop developers, Apache-2.0"
version = release = sketchprop.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nitpicky = True
# Names of others: their documentation is not at hand when this one is built.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|collections|typing|pathlib|Any|Callable|nn|Rotary|RowPart|Tensor)(\..*)?"),
    # Types of our own that a user never writes down.
    (
        r"py:.*",
        r"sketchprop\..*\.(Filter|Model|RowPart|RowWise|Result|Schedule|Sketched|Stage|Summary)",
    ),
]
# Result folders come and go; a page that is not there yet is not an error.
suppress_warnings = ["toc.empty_glob"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_mock_imports = ["lightning", "pytorch_lightning", "transformers"]
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
add_module_names = False
smartquotes = False
highlight_language = "none"

WIDE = 1300
"""Pixels; pictures of several panels have more, and a phone scrolls them."""
SHORT_CELL = 20
"""Characters; numbers with their errors and shapes of layers are shorter."""

pygments_dark_style = "github-dark"
html_theme = "furo"
html_title = "sketchprop"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}


def _code_blocks(app, what, name, obj, options, lines):  # type: ignore[no-untyped-def]
    """Docstrings show code by indenting it; what is not a doctest needs a directive for that."""
    out: list[str] = []
    inside = False
    for line in lines:
        starts = re.match(r"    \S", line) and (not out or not out[-1].strip())
        if starts and not inside:
            out += [".. code-block:: python", ""]
            inside = True
        elif inside and line.strip() and not line.startswith("    "):
            inside = False
        out.append(line)
    lines[:] = out


def _mark_shapes(app, doctree):  # type: ignore[no-untyped-def]
    """Classes for the style sheet: cells that must not wrap, pictures too wide for a phone."""
    for cell in doctree.findall(nodes.entry):
        if len(cell.astext()) <= SHORT_CELL:
            cell["classes"].append("short")
    for image in doctree.findall(nodes.image):
        path = Path(app.srcdir) / image["uri"]
        if path.is_file() and imagesize.get(path)[0] > WIDE:
            image["classes"].append("wide")
            image.parent["classes"].append("holds-wide")


def _without_marks(app, docname, source):  # type: ignore[no-untyped-def]
    """The comments around numbers that ``show_numbers.py`` fills in would be cells' text."""
    source[0] = re.sub(r"<!--= .+? -->|<!--/-->", "", source[0])


def setup(app):  # type: ignore[no-untyped-def]
    app.connect("source-read", _without_marks)
    app.connect("autodoc-process-docstring", _code_blocks)
    app.connect("doctree-read", _mark_shapes)
