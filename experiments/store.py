"""Finished runs on disk. A run is in the store whole or not at all, and never twice."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .methods import ExperimentError

DATABASE = "runs.sqlite"
TABLE = "results.csv"
PATIENCE = 60.0
"""Seconds to wait for a reader or the writer, each of which needs the file for a moment."""

TEXT = ("run", "cell", "sketch", "layers", "widths", "dataset", "pixels", "package_version",
        "torch_version")  # fmt: skip
WHOLE = ("rate_index", "seed", "epochs", "batch_size", "train_rows", "validation_rows", "test_rows",
         "version", "best_epoch", "diverged_epoch")  # fmt: skip
REAL = ("learning_rate", "clip", "validation_accuracy", "test_accuracy", "best_test_accuracy",
        "clipped_fraction", "wall_seconds")  # fmt: skip
LISTS = ("ranks", "validation_curve", "test_curve", "loss_curve")
COLUMNS = (*TEXT, *WHOLE, *REAL, *LISTS)
TIMES = ("wall_seconds",)
"""What differs between two executions of the same run."""

Row = dict[str, Any]


class Store:
    """One SQLite file, written by one process at a time; every ``add`` is one transaction."""

    def __init__(self, folder: Path) -> None:
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(folder / f"{DATABASE}.lock")
            self.connection = sqlite3.connect(folder / DATABASE, PATIENCE, isolation_level=None)
            self.connection.execute("PRAGMA synchronous=FULL")
            columns = ", ".join(f"{name} NOT NULL" for name in COLUMNS[1:])
            self.connection.execute(
                f"CREATE TABLE IF NOT EXISTS runs (run TEXT PRIMARY KEY, {columns})"
            )
        self.folder = folder

    def add(self, rows: Sequence[Row]) -> None:
        """All of the rows or, if anything goes wrong, none."""
        marks = ", ".join("?" * len(COLUMNS))
        values = [[_packed(name, row[name]) for name in COLUMNS] for row in rows]
        with explained(self.folder):
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                self.connection.executemany(f"INSERT INTO runs VALUES ({marks})", values)
                self.connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.OperationalError):  # a full disk rolls back itself
                    self.connection.execute("ROLLBACK")
                raise

    def rows(self) -> list[Row]:
        with explained(self.folder):
            return _read_database(self.connection)

    def close(self) -> None:
        self.connection.close()
        self._lock.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_rows(folder: Path) -> list[Row]:
    """All stored runs, from the database or, where only that was kept, from the table."""
    database, table = folder / DATABASE, folder / TABLE
    if database.is_file():
        with (
            explained(folder),
            contextlib.closing(sqlite3.connect(database, PATIENCE)) as connection,
        ):
            return _read_database(connection)
    if not table.is_file():
        raise ExperimentError(f"{folder} holds no results: neither {DATABASE} nor {TABLE}")
    with table.open(newline="", encoding="utf-8") as file:
        return [
            {name: _unpacked(name, row[name]) for name in COLUMNS} for row in csv.DictReader(file)
        ]


def write_table(rows: Sequence[Row], folder: Path) -> Path:
    """The rows as CSV, in a fixed order."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in sorted(rows, key=_order):
        writer.writerow([_packed(name, row[name]) for name in COLUMNS])
    return write_file(folder / TABLE, text.getvalue().encode())


def write_file(path: Path, content: bytes) -> Path:
    """Whole or not at all: under another name first."""
    with explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.part")
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


def _read_database(connection: sqlite3.Connection) -> list[Row]:
    found = connection.execute(f"SELECT {', '.join(COLUMNS)} FROM runs").fetchall()
    rows = [
        {name: _unpacked(name, value) for name, value in zip(COLUMNS, values, strict=True)}
        for values in found
    ]
    return sorted(rows, key=_order)


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("widths", "epochs", "clip", "sketch", "layers", "cell", "seed", "rate_index")
    return tuple(row[name] for name in names)


def _packed(name: str, value: Any) -> Any:
    return json.dumps(value) if name in LISTS else value


def _unpacked(name: str, value: Any) -> Any:
    if name in LISTS:
        return json.loads(value)
    return int(value) if name in WHOLE else float(value) if name in REAL else str(value)
