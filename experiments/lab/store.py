"""Finished runs on disk. A run is in the store whole or not at all, and never twice."""

from __future__ import annotations

import contextlib
import csv
import errno
import gzip
import io
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import ExperimentError

DATABASE = "runs.sqlite"
TABLE = "results.csv"
LARGE = 2_000_000
"""Bytes from which on the table is kept compressed, as ``results.csv.gz``."""
PATIENCE = 60.0
"""Seconds to wait for a reader or the writer, each of which needs the file for a moment."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Schema:
    """The columns of a study's rows and what they hold: text, whole and real numbers, lists."""

    kinds: Mapping[str, type]
    order: tuple[str, ...]
    """By which rows are sorted."""
    times: tuple[str, ...]
    """What differs between two executions of the same run."""
    added: tuple[str, ...] = ()
    """Texts that tables of older runs lack: empty there."""

    @property
    def columns(self) -> list[str]:
        return sorted(self.kinds, key=lambda name: (str, int, float, list).index(self.kinds[name]))

    def packed(self, row: Mapping[str, Any]) -> list[Any]:
        return [json.dumps(row[n]) if self.kinds[n] is list else row[n] for n in self.columns]

    def unpacked(self, row: Mapping[str, Any]) -> Row:
        row = {**dict.fromkeys(self.added, ""), **row}
        return {
            name: json.loads(row[name]) if self.kinds[name] is list else self.kinds[name](row[name])
            for name in self.columns
        }

    def sorted(self, rows: Iterable[Row]) -> list[Row]:
        return sorted(rows, key=lambda row: tuple(row[name] for name in self.order))


class Store(contextlib.AbstractContextManager["Store"]):
    """One SQLite file, written by one process at a time; every ``add`` is one transaction.

    Where only a table was kept, as in a clone, a new one begins with its runs.
    """

    def __init__(self, folder: Path, schema: Schema) -> None:
        self.folder, self.schema = folder, schema
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(folder / f"{DATABASE}.lock")
            begun = not (folder / DATABASE).is_file() and table_path(folder).is_file()
            kept = _read_table(table_path(folder), schema) if begun else []
            self.connection = sqlite3.connect(folder / DATABASE, PATIENCE, isolation_level=None)
            self.connection.execute("PRAGMA synchronous=FULL")
            columns = ", ".join(f"{name} NOT NULL" for name in schema.columns[1:])
            self.connection.execute(
                f"CREATE TABLE IF NOT EXISTS runs (run TEXT PRIMARY KEY, {columns})"
            )
        self.add(kept)

    def add(self, rows: Sequence[Row]) -> None:
        """All of the rows or, if anything goes wrong, none."""
        names = ", ".join(self.schema.columns)
        marks = ", ".join("?" * len(self.schema.columns))
        values = [self.schema.packed(row) for row in rows]
        with explained(self.folder):
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                self.connection.executemany(f"INSERT INTO runs ({names}) VALUES ({marks})", values)
                self.connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.OperationalError):  # a full disk rolls back itself
                    self.connection.execute("ROLLBACK")
                raise

    def rows(self) -> list[Row]:
        with explained(self.folder):
            return _read_database(self.connection, self.schema)

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self._lock.close()


def read_rows(folder: Path, schema: Schema) -> list[Row]:
    """All stored runs, from the database or, where only that was kept, from the table."""
    database, table = folder / DATABASE, table_path(folder)
    if database.is_file():
        with (
            explained(folder),
            contextlib.closing(sqlite3.connect(database, PATIENCE)) as connection,
        ):
            return _read_database(connection, schema)
    if not table.is_file():
        raise ExperimentError(f"{folder} holds no results: neither {DATABASE} nor {TABLE}")
    return _read_table(table, schema)


def rows_so_far(folder: Path, schema: Schema) -> list[Row]:
    """None where nothing was stored yet."""
    stored = (folder / DATABASE).is_file() or table_path(folder).is_file()
    return read_rows(folder, schema) if stored else []


def table_path(folder: Path) -> Path:
    """Where the table is, or would be."""
    large = folder / f"{TABLE}.gz"
    return large if large.is_file() else folder / TABLE


def _read_table(table: Path, schema: Schema) -> list[Row]:
    opener: Any = gzip.open if table.suffix == ".gz" else open
    with opener(table, "rt", newline="", encoding="utf-8") as file:
        try:
            return [schema.unpacked(row) for row in csv.DictReader(file)]
        except (KeyError, ValueError, TypeError) as error:
            raise ExperimentError(
                f"{table} is no table of these runs ({error!r}); move it away to start anew"
            ) from error


def write_table(rows: Sequence[Row], folder: Path, schema: Schema) -> Path:
    """The rows as CSV, in a fixed order."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(schema.columns)
    for row in schema.sorted(rows):
        writer.writerow(schema.packed(row))
    content, path = text.getvalue().encode(), folder / TABLE
    if len(content) < LARGE:
        return write_file(path, content)
    path.unlink(missing_ok=True)
    return write_file(folder / f"{TABLE}.gz", gzip.compress(content, mtime=0))


def write_file(path: Path, content: bytes) -> Path:
    """Whole or not at all: under another name first."""
    with explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    return path


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """What the disk or the database reports, in words that help."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "full" in str(error):
            raise ExperimentError(_full(folder)) from error
        raise ExperimentError(f"{folder / DATABASE}: {error}") from error
    except sqlite3.DatabaseError as error:
        raise ExperimentError(
            f"{folder / DATABASE} cannot be used ({error}); move it away to start anew"
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ExperimentError(_full(folder)) from error
        raise ExperimentError(f"{folder}: {error}") from error


def _full(folder: Path) -> str:
    return (
        f"no space left for {folder}; the runs stored so far are safe. Free some space and give "
        "the same command again: it continues"
    )


def _lock(path: Path) -> io.TextIOWrapper:
    """Held until this process ends, however it ends."""
    import fcntl

    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ExperimentError(
            f"another sweep is writing to {path.parent}; wait for it, or give another --out"
        ) from None
    return file


def _read_database(connection: sqlite3.Connection, schema: Schema) -> list[Row]:
    found = connection.execute(f"SELECT {', '.join(schema.columns)} FROM runs").fetchall()
    rows = (dict(zip(schema.columns, values, strict=True)) for values in found)
    return schema.sorted(schema.unpacked(row) for row in rows)
