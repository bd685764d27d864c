"""What is in the Markdown pages: code blocks, commands, links, headings.

The fenced blocks ``python`` of a page are run, in order and as they stand: nothing that they need
is hidden. What a block prints may stand below it, in a block ``text`` after ``<!-- output -->``
(the same but for numbers) or ``<!-- output of one run -->`` (words may differ too, as the advice of
a meter does). ``python docs/show_outputs.py`` writes it there.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^(`{3,})(\S*)\n(.*?)^\1`*$", re.MULTILINE | re.DOTALL)
_OUTPUT = re.compile(r"<!-- output( of one run)? -->\n\Z")
_LINK = re.compile(r"(?<!\\)\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^()\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: Path
    line: int
    language: str
    code: str
    output: str = ""
    """How a block shows what the one before it prints: ``"same"``, ``"one run"`` or not at all."""

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """README and the pages of the site; built sites are not pages."""
    found = [p for p in DOCS.rglob("*.md") if "_build" not in p.parts]
    return [ROOT / "README.md", *sorted(found)]


def blocks(page: Path) -> list[Block]:
    """In the order of the page."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        shown = _OUTPUT.search(text[: match.start()])
        output = "" if not shown else "one run" if shown[1] else "same"
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(page, line, match[2], match[3], output))
    return found


def run(page: Path) -> Iterator[tuple[Block, str]]:
    """Runs the blocks of Python in order, in one module, each with what it printed."""
    # A module, as dataclasses and pickle expect of the code that they are given.
    module = types.ModuleType("page")
    before = sys.modules.get("page")
    sys.modules["page"] = module
    try:
        for block in blocks(page):
            if block.language == "python":
                lines = "\n" * (block.line - 1) + block.code
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    exec(compile(lines, str(block.page), "exec"), module.__dict__)
                yield block, printed.getvalue()
    finally:
        sys.modules.pop("page")
        if before is not None:
            sys.modules["page"] = before


def without_numbers(text: str) -> list[str]:
    """The words of what was printed: times, losses and the widths of columns differ by machine."""
    plain = re.sub(r"(?<![A-Za-z])[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "#", text)
    return re.sub(r"[-─]{3,}", "---", plain).split()


def commands(block: Block) -> Iterator[str]:
    """The commands of a shell block, continued lines joined, comments dropped."""
    for line in block.code.replace("\\\n", " ").splitlines():
        command = re.sub(r"(^|\s)#.*", "", line).strip()
        if command:
            yield command


def links(page: Path) -> Iterator[tuple[int, str]]:
    """Line and target of each link and image outside of code."""
    text = page.read_text(encoding="utf-8")
    for pattern in (_FENCE, re.compile(r"`[^`\n]+`")):
        text = pattern.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
    for match in _LINK.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[1]


def anchors(page: Path) -> set[str]:
    """What ``#...`` may follow a link to this page: headings, as GitHub and MyST write them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *#*$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(next(s for s in _numbered(plain) if s not in found))
    return found


def _numbered(slug: str) -> Iterator[str]:
    yield slug
    yield from (f"{slug}-{n}" for n in range(1, 100))
