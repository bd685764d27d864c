"""Reports and their tables: described once, shown as text here, in HTML and pictures elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Literal


@dataclass(frozen=True)
class Column:
    """A heading, and how the values below it are written.

    ``form`` is a format specification for numbers, which are multiplied by ``scale`` before;
    ``None`` is written as a dash, all else by ``str``.

    >>> Column("ms", ".1f", scale=1e3).write(0.0123), Column("ms", ".1f").write(None)
    ('12.3', '-')
    """

    title: str
    form: str = ""
    scale: float = 1
    align: Literal["<", ">"] = ">"
    empty: str = ""
    """What stands for an empty text."""

    def write(self, value: Any) -> str:
        if value is None:
            return "-"
        if self.form and isinstance(value, int | float):
            return format(value * self.scale, self.form)
        text = " × ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        return text or self.empty


def words(title: str) -> Column:
    """A column of text, to the left."""
    return Column(title, align="<")


LAYER = Column("layer", align="<", empty="(model)")
"""The names of layers; the whole model's is empty."""


@dataclass(frozen=True)
class Table:
    """What a report has to show: columns, rows of values, a title and a note.

    >>> print(Table("Times", (words("layer"), Column("ms", ".1f")), [("a", 2.0), ("b", 30.25)]))
    Times
    layer    ms
    ───────────
    a       2.0
    b      30.2
    """

    title: str
    columns: tuple[Column, ...]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    """A sentence or two on what can be seen."""

    @property
    def header(self) -> list[str]:
        return [column.title for column in self.columns]

    def cells(self) -> Iterator[list[str]]:
        """The rows as text."""
        for row in self.rows:
            yield [c.write(value) for c, value in zip(self.columns, row, strict=True)]

    def __str__(self) -> str:
        lines = [self.header, *self.cells()]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        shown = [
            "  ".join(
                f"{cell:{column.align}{width}}"
                for cell, column, width in zip(cells, self.columns, widths, strict=True)
            ).rstrip()
            for cells in lines
        ]
        head = [text for text in (self.title, self.note) if text]
        return "\n".join([*head, shown[0], "─" * len(shown[0]), *shown[1:]])


class Report:
    """A dataclass that can be shown, the answer first, then tables; and read as plain data."""

    ANSWERS: ClassVar[tuple[str, ...]] = ()
    """Properties that are part of its data, beside its fields."""

    def headline(self) -> str:
        return ""

    def tables(self) -> list[Table]:
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """Dicts, lists and numbers that JSON knows."""
        return _entries(self)

    def __str__(self) -> str:
        return as_text(self)


def as_text(report: Report, tables: Sequence[Table] | None = None) -> str:
    """The headline and every table that has rows; or these tables instead of all."""
    tables = report.tables() if tables is None else tables
    parts = [report.headline(), *(str(t) for t in tables if t.rows)]
    return "\n\n".join(part for part in parts if part)


def plain_data(value: Any) -> Any:
    """Reports as dicts, lists and numbers that JSON knows; what is not finite becomes None."""
    if isinstance(value, Report):
        return value.as_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return _entries(value)
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _entries(value: Any) -> dict[str, Any]:
    """The fields that its text shows, and its ``ANSWERS``."""
    names = [field.name for field in fields(value) if field.repr]
    names += getattr(value, "ANSWERS", ())
    return {name: plain_data(getattr(value, name)) for name in names}
