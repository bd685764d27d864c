"""What is built, installed where nothing else is: torch, what torch needs, and the wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import pytest
from filelock import FileLock
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


class Installed(NamedTuple):
    wheel: Path
    sdist: Path
    python: Path


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Installed:
    """The distribution and an environment with it, made once for all workers of a test run."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheel"
    with FileLock(f"{shared}.lock"):
        if not (shared / "ready").exists():
            build(shared / "dist")
            make_environment(shared)
            (shared / "ready").touch()
    (wheel,) = (shared / "dist").glob("*.whl")
    (sdist,) = (shared / "dist").glob("*.tar.gz")
    return Installed(wheel, sdist, shared / "env" / "bin" / "python")


def build(target: Path) -> None:
    """As ``make dist`` does: the sdist from here, the wheel from the unpacked sdist."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(ROOT)]
    checked(command)


def make_environment(shared: Path) -> None:
    """An empty environment that sees torch and what torch itself requires, by symbolic links."""
    env, links = shared / "env", shared / "torch-only"
    checked([sys.executable, "-m", "venv", "--without-pip", str(env)])
    links.mkdir()
    for name in needed_by("torch"):
        for top in {path.parts[0] for path in distribution(name).files or ()} - {"..", "bin"}:
            source = Path(str(distribution(name).locate_file(top)))
            if top != "__pycache__" and not (links / top).exists():
                (links / top).symlink_to(source)
    (site,) = env.glob("lib/python*/site-packages")
    (site / "torch-only.pth").write_text(f"{links}\n", encoding="utf-8")
    # With dependencies and without an index: pip must find all that the wheel asks for.
    (wheel,) = (shared / "dist").glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(env / "bin" / "python")]
    checked([*pip, "install", "--quiet", "--no-index", str(wheel)])


def needed_by(name: str, known: frozenset[str] = frozenset()) -> frozenset[str]:
    """A distribution and all that it requires without extras."""
    known |= {name}
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in known:
            known |= needed_by(requirement.name, known)
    return known


def checked(command, **options) -> str:
    options = {"cwd": ROOT, "env": clean(), **options}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def clean() -> dict[str, str]:
    """Nothing in the environment that leads back to this checkout."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MYPY"))}


def run(installed, code, folder) -> str:
    return checked([str(installed.python), "-c", textwrap.dedent(code)], cwd=folder)


def first_example() -> str:
    """The first block of Python in the README that uses the package."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return next(block for block in blocks if "import sketchprop" in block)


# --- what is in them -------------------------------------------------------------------------


def test_the_wheel_holds_the_package_and_nothing_else(installed):
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    assert "sketchprop/py.typed" in names
    files = (p for kind in ("*.py", "*.jinja") for p in (ROOT / "src").rglob(kind))
    sources = {str(p.relative_to(ROOT / "src")) for p in files}
    assert sources <= names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"sketchprop"}


def test_the_sdist_holds_what_is_needed_to_build_and_test(installed):
    with tarfile.open(installed.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "Makefile"}
    needed |= {"constraints.txt", "src/sketchprop/py.typed", "tests/law_table.py"}
    needed |= {"benchmarks/__main__.py", "examples/pipeline.py", "experiments/__main__.py"}
    needed |= {"demo/kept_tokens.py"}
    assert needed <= names
    assert not [name for name in names if name.endswith((".sqlite", ".pyc"))]


# --- in an empty environment -----------------------------------------------------------------


def test_the_environment_is_empty_but_for_torch(installed, tmp_path):
    code = """
        import sys
        from importlib.metadata import distributions
        print(*sorted(d.name.lower() for d in distributions()))
        print("numpy" in sys.modules)
    """
    names, _ = run(installed, code, tmp_path).splitlines()
    expected = {re.sub(r"[-_.]+", "-", n.lower()) for n in needed_by("torch")} | {"sketchprop"}
    assert {re.sub(r"[-_.]+", "-", n) for n in names.split()} == expected
    assert not {"numpy", "rich", "matplotlib", "pytest", "transformers"} & expected


def test_the_first_example_of_the_readme_runs(installed, tmp_path):
    block = "model.blocks[0]"
    code = first_example() + f"print(type({block}).__name__, {block}.mlp[0].weight.grad.any())"
    out = run(installed, code, tmp_path)
    assert "Candidates" in out  # what was tried for the model
    assert out.endswith("Block tensor(True)\n")
    assert (tmp_path / "model.pt").is_file()


def test_a_sketched_step_is_made(installed, tmp_path):
    code = """
        import torch
        from torch import nn
        import sketchprop as sp
        assert "env" in sp.__file__, sp.__file__
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
        sp.sketch_(model, sp.L1(0.25))
        model(torch.randn(16, 32)).square().mean().backward()
        print(int((model[0].weight.grad.norm(dim=1) > 0).sum()))
        print(sp.check_unbiased(sp.L1(0.25)).ok)
    """
    rows, unbiased = run(installed, code, tmp_path).split()
    assert int(rows) <= 16  # a quarter of 64 rows has a gradient, less where a ReLU is dead
    assert unbiased == "True"


def test_importing_brings_nothing_but_torch_and_the_standard_library(installed, tmp_path):
    code = """
        import sys, torch
        before = set(sys.modules)
        import sketchprop
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(*sorted(new - set(sys.stdlib_module_names) - {"torch"}))
    """
    assert run(installed, code, tmp_path).split() == ["sketchprop"]
    # Here, where everything is installed, too.
    assert checked([sys.executable, "-c", textwrap.dedent(code)]).split() == ["sketchprop"]


def test_the_command_helps(installed, tmp_path):
    command = str(installed.python.with_name("sketchprop"))
    out = checked([command, "--help"], cwd=tmp_path)
    for word in ("check", "measure", "plan", "report", "exit codes"):
        assert word in out
    assert "unbiased" in checked([command, "check", "L1(0.3)"], cwd=tmp_path)
    page = ["report", "--batches", "2", "--draws", "2", "--rounds", "0", "--batch-size", "4"]
    done = subprocess.run(
        [command, *page], cwd=tmp_path, env=clean(), check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "pip install 'sketchprop[cli]'" in done.stderr  # the extra has matplotlib


# --- types -----------------------------------------------------------------------------------


def test_a_type_checker_sees_the_types_of_the_wheel(installed, tmp_path):
    (tmp_path / "use.py").write_text(
        textwrap.dedent(
            """
            import sketchprop as sp
            from torch import nn

            model = nn.Linear(3, 3)
            reveal_type(sp.L1(0.1))
            reveal_type(sp.summary(model))
            reveal_type(sp.measure(model, lambda m, b: m(b).sum(), []).pays)
            reveal_type(sp.Ladder({0: 1.0})(3))
            sp.sketch_(model, sp.L1(0.1), planner=sp.Every(50))
            sp.sketch_(model, sp.L1(0.1), planner=0.1)
            sp.sketch_(model, 0.1)
            sp.L1("a tenth")
            """
        ).lstrip(),
        encoding="utf-8",
    )
    # torch's own types take minutes and are torch's; without them its classes are Any.
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "mypy", "--python-executable", str(installed.python)]
    command += ["--config-file", "mypy.ini", "--cache-dir", str(tmp_path / "cache"), "use.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=clean(), capture_output=True, text=True, check=False
    )
    lines = {int(m[1]): m[0] for m in re.finditer(r"^use\.py:(\d+): .*$", done.stdout, re.M)}
    assert 'type is "sketchprop.sketches.columns.L1"' in lines[5], done.stdout + done.stderr
    assert 'type is "sketchprop.layers.summary.Summary"' in lines[6]
    assert 'type is "bool"' in lines[7]
    assert 'type is "float | int"' in lines[8] or 'type is "int | float"' in lines[8]
    assert 9 not in lines
    for wrong in (10, 11, 12):
        assert "error" in lines[wrong], done.stdout
