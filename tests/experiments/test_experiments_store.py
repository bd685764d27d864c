"""The store: whole or not at all, never twice, and clear about what went wrong."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from experiment_helpers import changed

from experiments.lab import ExperimentError
from experiments.lab import store as stored
from experiments.lab.engine import missing_jobs, run_sweep
from experiments.lab.store import Store, read_rows, write_table
from experiments.lab.sweep import Point
from experiments.mnist.study import MNIST

SCHEMA = MNIST.schema


def row(name, **changes):
    values = {str: "text", int: 3, float: 0.25, list: [1.5, None]}
    made = {name: values[kind] for name, kind in SCHEMA.kinds.items()}
    return made | {"run": name} | changes


def test_rows_come_back_as_they_were(tmp_path):
    rows = [row("b", learning_rate=10**-0.25, seed=1), row("a", clip=0.1 + 0.2, seed=0)]
    with Store(tmp_path, SCHEMA) as store:
        store.add(rows)
        assert store.rows() == [rows[1], rows[0]] or store.rows() == rows
        assert read_rows(tmp_path, SCHEMA) == store.rows()
        write_table(store.rows(), tmp_path, SCHEMA)
        expected = store.rows()
    (tmp_path / stored.DATABASE).unlink()
    assert read_rows(tmp_path, SCHEMA) == expected
    with Store(tmp_path, SCHEMA) as store:  # as in a clone, which has the table alone
        assert store.rows() == expected
        store.add([row("c")])
    assert len(read_rows(tmp_path, SCHEMA)) == 3


def test_a_large_table_is_kept_compressed(tmp_path, monkeypatch):
    rows = [row("a"), row("b")]
    plain = write_table(rows, tmp_path, SCHEMA)
    monkeypatch.setattr(stored, "LARGE", 100)
    packed = write_table(rows, tmp_path, SCHEMA)
    assert (packed.name, plain.exists()) == ("results.csv.gz", False)
    assert packed.read_bytes() == write_table(rows, tmp_path, SCHEMA).read_bytes()
    assert [r["run"] for r in read_rows(tmp_path, SCHEMA)] == ["a", "b"]
    with Store(tmp_path, SCHEMA) as store:
        assert len(store.rows()) == 2


def test_a_table_of_other_runs_is_not_gone_on_from(tmp_path):
    (tmp_path / stored.TABLE).write_text("run,colour\na,red\n")
    for _ in range(2):
        with pytest.raises(ExperimentError, match="move it away to start anew"):
            Store(tmp_path, SCHEMA)


def test_no_run_twice_and_no_part_of_a_stack(tmp_path):
    with Store(tmp_path, SCHEMA) as store:
        store.add([row("a")])
        with pytest.raises(ExperimentError, match=r"UNIQUE.*runs\.run"):
            store.add([row("b"), row("a")])
        with pytest.raises(KeyError):
            store.add([row("c"), {"run": "d"}])
        assert [r["run"] for r in store.rows()] == ["a"]
        store.add([row("b")])
    assert {r["run"] for r in read_rows(tmp_path, SCHEMA)} == {"a", "b"}


def test_a_full_disk_stores_nothing_of_the_stack_and_the_sweep_can_go_on(tmp_path):
    """SQLite's own limit of pages gives the same error as a disk without space."""
    with Store(tmp_path, SCHEMA) as store:
        store.add([row("a")])
        pages = store.connection.execute("PRAGMA page_count").fetchone()[0]
        store.connection.execute(f"PRAGMA max_page_count={pages + 2}")
        many = [row(f"r{i}", sketch="x" * 500) for i in range(60)]
        with pytest.raises(ExperimentError, match=r"no space left for .*it continues"):
            store.add(many)
        assert [r["run"] for r in store.rows()] == ["a"]
        store.connection.execute("PRAGMA max_page_count=100000")
        store.add(many)
        assert len(store.rows()) == 61


def test_a_file_that_is_no_database(tmp_path):
    (tmp_path / stored.DATABASE).write_bytes(b"half a file" * 100)
    with pytest.raises(ExperimentError, match=r"cannot be used .*move it away"):
        Store(tmp_path, SCHEMA)
    with pytest.raises(ExperimentError, match=r"cannot be used .*move it away"):
        read_rows(tmp_path, SCHEMA)


def test_no_results(tmp_path):
    with pytest.raises(ExperimentError, match="holds no results"):
        read_rows(tmp_path, SCHEMA)


def test_two_sweeps_do_not_write_to_one_store(tmp_path):
    code = (
        "import sys; from pathlib import Path; from experiments.lab.store import Store\n"
        "from experiments.lab import ExperimentError\n"
        "from experiments.mnist.study import MNIST\n"
        "try:\n    Store(Path(sys.argv[1]), MNIST.schema)\n"
        "except ExperimentError as e:\n    print(e)"
    )
    root = Path(stored.__file__).parents[2]
    command = [sys.executable, "-c", code, str(tmp_path)]
    with Store(tmp_path, SCHEMA):
        taken = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        assert "another sweep is writing" in taken.stdout
    free = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert free.stdout == ""


def fake(run, accuracy):
    cell = run.cell
    return row(run.identity, cell=cell.identity, validation_accuracy=accuracy, seed=run.seed)


def points():
    protocol = changed(MNIST.protocol, learning_rates=(0, 2), seeds=(0, 1, 2), widen=1, stack=4)
    return [Point("l1", "all", budget, protocol) for budget in (0.1, 0.5)]


def test_a_sweep_trains_what_is_missing_widens_and_stops(tmp_path):
    seen = []

    def engine(jobs, workers):
        for job in jobs:
            seen.append(len(job.runs))
            yield job, [fake(run, 50.0 - abs(run.rate_index - 2)) for run in job.runs]

    with Store(tmp_path, SCHEMA) as store:
        assert run_sweep(partial(missing_jobs, points()), store, engine, 1) == 18
        assert sorted(seen) == [2, 2, 3, 3, 4, 4]  # two stacks each, then one more rate each
        assert run_sweep(partial(missing_jobs, points()), store, engine, 1) == 0
