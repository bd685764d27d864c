"""Runs the blocks of pages and writes what they print below them; the tutorial becomes a notebook.

    python docs/show_outputs.py                      every page that shows outputs
    python docs/show_outputs.py docs/vision.md       this one

A block that shows an output is followed by ``<!-- output -->`` and a block ``text``.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from docs_pages import DOCS, Block, blocks, pages, run  # noqa: E402

TUTORIAL = DOCS / "tutorial.md"
_MARKED = re.compile(r"(<!-- output(?: of one run)? -->\n```text\n)(.*?)(^```$)", re.S | re.M)
_CELL = re.compile(
    r"^```python\n(.*?)^```$(?:\n+<!-- output[^>]*-->\n```text\n(.*?)^```$)?", re.S | re.M
)


def refreshed(page: Path) -> str:
    """The page with the outputs of a run of now."""
    in_order = blocks(page)
    printed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["SKETCHPROP_CACHE"] = folder
        for block, text in run(page):
            below = in_order[in_order.index(block) + 1 :][:1]
            if below and below[0].output:
                printed.append(
                    "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())
                )
        os.chdir(ROOT)
    outputs = iter(printed)
    return _MARKED.sub(lambda m: m[1] + next(outputs) + m[3], page.read_text(encoding="utf-8"))


def notebook(text: str) -> dict[str, Any]:
    """Cells of a page: its words, its code, and what the code printed."""
    cells: list[dict[str, Any]] = []
    position = 0
    for match in _CELL.finditer(text):
        cells += _words(text[position : match.start()])
        shown = (
            []
            if match[2] is None
            else [
                {
                    "output_type": "stream",
                    "name": "stdout",
                    "text": match[2].splitlines(keepends=True),
                }
            ]
        )
        cells.append(
            {
                "cell_type": "code",
                "id": f"code-{len(cells)}",
                "execution_count": None,
                "metadata": {},
                "source": match[1].rstrip("\n").splitlines(keepends=True),
                "outputs": shown,
            }
        )
        position = match.end()
    cells += _words(text[position:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _words(text: str) -> list[dict[str, Any]]:
    # What Sphinx alone understands, and links between pages of the site, are not for a notebook.
    plain = re.sub(r"^```\{.*?^```$", "", text, flags=re.S | re.M)
    plain = re.sub(r"The same as a notebook:\s+\{download\}`[^`]+`\. ", "", plain)
    plain = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", plain).strip()
    if not plain:
        return []
    source = plain.splitlines(keepends=True)
    return [
        {
            "cell_type": "markdown",
            "id": f"words-{abs(hash_of(plain))}",
            "metadata": {},
            "source": source,
        }
    ]


def hash_of(text: str) -> int:
    """The same in every run, unlike Python's own."""
    return sum((i + 1) * ord(letter) for i, letter in enumerate(text)) % 10**9


def as_text(cells: dict[str, Any]) -> str:
    return json.dumps(cells, indent=1, ensure_ascii=False) + "\n"


def shows_outputs(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.output]


def main() -> None:
    named = [Path(name).resolve() for name in sys.argv[1:]]
    for page in named or [p for p in pages() if shows_outputs(p)]:
        page.write_text(refreshed(page), encoding="utf-8")
        print(page.relative_to(ROOT))
    if TUTORIAL.exists():
        made = as_text(notebook(TUTORIAL.read_text(encoding="utf-8")))
        TUTORIAL.with_suffix(".ipynb").write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
