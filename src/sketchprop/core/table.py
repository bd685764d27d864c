"""Plain text tables for reports: no dependency, no terminal needed."""

from __future__ import annotations

from collections.abc import Sequence

Cells = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A header and the rows under it."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str = "") -> str:
    """Aligned columns under a rule; ``align`` has ``<`` or ``>`` for each column."""
    align = align or "<" * len(header)
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            f"{c:{a}{w}}" for c, a, w in zip(cells, align, widths, strict=True)
        ).rstrip()

    return "\n".join([line(header), "─" * len(line(header)), *map(line, rows)])
