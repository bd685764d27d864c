"""Tables and legends of the page; every cell is escaped here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape


def prose(text: str) -> str:
    """Escaped, and no line ends between a number and its sign or unit."""
    for sign in (" ×", " ± ", " %", " ms", " MB", " kB"):
        text = text.replace(sign, sign.replace(" ", "\u00a0"))
    return escape(text)


def html_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = ()
) -> str:
    """Names to the left, numbers to the right; ``words``: further columns of text, which wrap."""
    head = "".join(
        f'<th scope="col"{_class(i, words)}>{escape(name)}</th>' for i, name in enumerate(header)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{_class(i, words)}>{escape(cell)}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    # Reachable by keyboard, because it scrolls.
    return (
        '<div class="scroll" tabindex="0"><table><thead><tr>'
        f"{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def facts_table(facts: Mapping[str, str]) -> str:
    """Two columns: what, and how much of it."""
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in facts.items()
    )
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def legend(entries: Mapping[str, str]) -> str:
    """What the colours mean: style to text."""
    items = "".join(
        f'<li><span class="{style}"></span>{escape(text)}</li>' for style, text in entries.items()
    )
    return f'<ul class="legend">{items}</ul>'


def section(title: str, text: str, chart: str, table: str) -> str:
    """A chart beside its table, below a heading and what can be seen."""
    return (
        f"<section><h2>{escape(title)}</h2><p>{prose(text)}</p>"
        f'<div class="pair"><div>{chart}</div><div>{table}</div></div></section>'
    )


def _class(column: int, words: Sequence[int]) -> str:
    return ' class="words"' if column in words else ""
