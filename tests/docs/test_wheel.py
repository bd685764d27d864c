"""What is built, installed where nothing else is: torch, what torch needs, and the wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
IMPORT = """
import sys, torch
before = set(sys.modules)
import sketchprop
layers = (torch.nn.Linear(4, 4) for _ in range(2))
sketchprop.sketch_(torch.nn.Sequential(*layers), sketchprop.L1(0.5))
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - set(sys.stdlib_module_names) - {"torch"}))
"""


def installed(wheel: Path, folder: Path) -> Path:
    """An empty environment's ``bin``; it sees torch and what torch requires, by symbolic links."""
    env, links = folder / "env", folder / "torch-only"
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
    pip = [sys.executable, "-m", "pip", "--python", str(env / "bin" / "python")]
    checked([*pip, "install", "--quiet", "--no-index", str(wheel)])
    return env / "bin"


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


def first_example() -> str:
    """The first block of Python in the README that uses the package."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return next(block for block in blocks if "import sketchprop" in block)


def test_the_wheel_of_the_sdist_works_where_nothing_but_torch_is(tmp_path):
    dist = tmp_path / "dist"
    checked([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(ROOT)])
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    files = (p for kind in ("*.py", "*.jinja", "py.typed") for p in (ROOT / "src").rglob(kind))
    assert {str(p.relative_to(ROOT / "src")) for p in files} <= names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"sketchprop"}
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"pyproject.toml", "LICENSE", "Makefile", "constraints.txt", "tests/law_table.py"}
    assert needed | {"examples/pipeline.py", "experiments/__main__.py"} <= names
    assert not [name for name in names if name.endswith((".sqlite", ".pyc"))]

    scripts = installed(wheel, tmp_path)
    block = "model.blocks[0]"
    code = (
        f"{IMPORT}{first_example()}print(type({block}).__name__, {block}.mlp[0].weight.grad.any())"
    )
    first, *_, last = checked([str(scripts / "python"), "-c", code], cwd=tmp_path).splitlines()
    assert first == "sketchprop"
    assert last == "SketchedZooBlock tensor(True)"
    # Here, where everything is installed, import and use bring nothing else either.
    assert checked([sys.executable, "-c", IMPORT]).split() == ["sketchprop"]

    command = str(scripts / "sketchprop")
    assert "unbiased" in checked([command, "check", "L1(0.3)"], cwd=tmp_path)
    page = ["report", "--batches", "2", "--draws", "2", "--rounds", "0", "--batch-size", "4"]
    done = subprocess.run(
        [command, *page], cwd=tmp_path, env=clean(), check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "pip install 'sketchprop[cli]'" in done.stderr  # the extra has matplotlib
