"""The whole way: from MNIST's files to figures, killed in between, and with broken data."""

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from experiment_helpers import without

from experiments import data
from experiments.__main__ import main
from experiments.data import digits
from experiments.lab.store import DATABASE, TABLE
from experiments.lab.store import read_rows as read_any
from experiments.mnist import stack
from experiments.mnist.study import FIGURES, MNIST

ROOT = Path(stack.__file__).parents[2]
TINY = """
figures = []
[protocol]
epochs = 2
batch_size = 32
train_rows = 640
validation_rows = 100
test_rows = 100
learning_rates = [0, 2]
seeds = [0, 1]
budgets = [0.1, 0.5]
widen = 1
stack = 3
[[extra]]
methods = ["exact", "l1", "gsv-independent", "sample"]
"""


@pytest.fixture(autouse=True)
def fresh_data():
    stack.load.cache_clear()
    yield
    stack.load.cache_clear()


@pytest.fixture
def real_data():
    try:
        data.mnist(train=False, download=False)
    except data.DataError as error:
        pytest.skip(f"MNIST is not on this machine: {error}")


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)


def read_rows(folder):
    return read_any(folder, MNIST.schema)


def rows_without_time(folder):
    return without(read_rows(folder), *MNIST.schema.times)


@pytest.mark.usefixtures("real_data")
def test_smoke_makes_every_figure_from_nothing(tmp_path, capsys):
    out = tmp_path / "out"
    command = ["mnist", "--preset", "smoke", "--out", str(out), "--workers", "0"]
    assert main([*command, "--quiet"]) == 0
    names = {f"figure-{name}.{suffix}" for name in FIGURES for suffix in ("png", "svg")}
    assert names | {"README.md", TABLE} <= {p.name for p in out.iterdir()}
    rows = read_rows(out)
    assert all(row["wall_seconds"] > 0 and row["torch_version"] for row in rows)
    assert len({row["run"] for row in rows}) == len(rows)

    # From the table alone the same page; one figure leaves the page as it is.
    (out / DATABASE).unlink()
    page = (out / "README.md").read_bytes()
    for path in out.glob("figure-*"):
        path.unlink()
    assert main([*command, "--figure", "2b", "--stored"]) == 0
    assert {p.name for p in out.glob("figure-*")} == {"figure-2b.png", "figure-2b.svg"}
    assert (out / "README.md").read_bytes() == page
    assert main([*command, "--stored"]) == 0
    assert names <= {p.name for p in out.iterdir()}
    assert (out / "README.md").read_bytes() == page
    capsys.readouterr()


@pytest.mark.usefixtures("real_data")
def test_equal_nominal_cost_trains_longer_with_smaller_budgets(tmp_path, capsys):
    out = tmp_path / "out"
    command = ["iso-flop", "--preset", "smoke", "--out", str(out), "--workers", "0", "--quiet"]
    assert main(command) == 0
    page = (out / "README.md").read_text()
    for label in ("ℓ1", "RCS, independent", "per element", "rows by importance"):
        assert f"| {label} | 0.5 | 4 |" in page
        assert f"| {label} | 0.25 | 8 |" in page
    assert "| baseline | 1 | 2 |" in page
    (out / DATABASE).unlink()
    assert main([*command, "--stored"]) == 0
    assert (out / "README.md").read_text() == page
    capsys.readouterr()


def stored_count(folder):
    """Opened for writing too: the first to open a database after a kill has to tidy it up."""
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{folder / DATABASE}?mode=rw", 60, uri=True)
        ) as c:
            return c.execute("SELECT count(*) FROM runs").fetchone()[0]
    except sqlite3.OperationalError:
        return 0


@pytest.mark.usefixtures("real_data")
def test_killed_twice_the_table_is_that_of_an_undisturbed_run(tmp_path, tiny):
    """kill -9 at two random moments of a sweep on two processes; the moments are printed."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(["mnist", "--preset", tiny, "--out", str(whole), "--workers", "0", "--quiet"]) == 0
    total = len(read_rows(whole))
    command = [sys.executable, "-m", "experiments", "mnist", "--preset", tiny, "--out", str(broken)]
    command += ["--workers", "2", "--quiet"]
    chance = random.Random()
    kills = 0
    while kills < 2:
        already = stored_count(broken)
        wanted = already + chance.randrange(1, max(2, (total - already) // 2))
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        while stored_count(broken) < wanted and process.poll() is None:
            time.sleep(0.002)
        pause = chance.random() * 0.1
        time.sleep(pause)
        process.kill()
        if process.wait() != -signal.SIGKILL:  # on a busy machine it may have come to its end
            assert process.returncode == 0
            shutil.rmtree(broken)
            kills = 0
            continue
        kills += 1
        print(f"killed {pause:.3f} s after run {wanted} of {total}, {stored_count(broken)} stored")
    assert 0 < stored_count(broken) <= total
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert rows_without_time(broken) == rows_without_time(whole)


@pytest.mark.usefixtures("real_data")
@pytest.mark.parametrize("victim", ["sweep", "worker"])
def test_nothing_outlives_a_sweep_that_dies(tmp_path, tiny, victim):
    """Killed, it takes its workers along; without a worker it says what to do, and ends."""
    Path(tiny).write_text(TINY.replace("epochs = 2", "epochs = 2000"))
    command = [sys.executable, "-m", "experiments", "mnist", "--preset", tiny, "--quiet"]
    command += ["--workers", "1", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    children = []
    try:
        wait_until(lambda: children.extend(_workers(process.pid)) or children)
        os.kill(process.pid if victim == "sweep" else children[0], signal.SIGKILL)
        code = process.wait(60)
    finally:
        process.kill()
    wait_until(lambda: not any("spawn_main" in _command_line(p) for p in children))
    assert code == (-signal.SIGKILL if victim == "sweep" else 1)
    if victim == "worker":
        assert "a worker process died" in process.stderr.read()
    process.stderr.close()
    assert stored_count(tmp_path / "out") == 0


def wait_until(true, seconds=60):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _workers(pid):
    return [p for p in _children(pid) if "spawn_main" in _command_line(p)]


def _children(pid):
    path = Path(f"/proc/{pid}/task/{pid}/children")
    if not path.exists():
        pytest.skip("needs /proc")
    return [int(child) for child in path.read_text().split()]


def _command_line(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def test_missing_data_is_an_error_and_nothing_counts_as_done(tmp_path, tiny, monkeypatch, capsys):
    monkeypatch.setenv(data.VARIABLE, str(tmp_path / "nothing"))
    monkeypatch.setenv("SKETCHPROP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digits, "MNIST", replace(digits.MNIST, urls={}))
    out = tmp_path / "out"
    code = main(["mnist", "--preset", tiny, "--out", str(out), "--workers", "0", "--quiet"])
    assert code == 1
    assert "is not on this machine" in capsys.readouterr().err
    assert stored_count(out) == 0
    assert not (out / TABLE).exists()


@pytest.mark.usefixtures("real_data")
def test_a_local_ray_finds_the_same_numbers(tmp_path, tiny):
    pytest.importorskip("ray")
    Path(tiny).write_text(TINY.replace("[0.1, 0.5]", "[0.5]").replace("widen = 1", "widen = 0"))
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(["mnist", "--preset", tiny, "--out", str(one), "--workers", "0", "--quiet"]) == 0
    command = [sys.executable, "-m", "experiments", "mnist", "--preset", tiny, "--out", str(two)]
    command += ["--engine", "ray", "--workers", "2", "--quiet"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert rows_without_time(one) == rows_without_time(two)
