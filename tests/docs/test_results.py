"""Committed pages are what the committed code makes of the committed numbers."""

import shutil
from importlib.metadata import version

import pytest
import torch

from docs_pages import DOCS
from experiments.__main__ import main

COMMANDS = {
    "mnist-cpu": ["mnist"],
    "cifar-vit-cpu": ["cifar", "--model", "vit"],
    "cifar-bagnet17-cpu": ["cifar", "--model", "bagnet17"],
    "rcs-cpu": ["rcs"],
    "advise": ["advise"],
    "pay": ["pay"],
    "tokens-noise/gpt": ["noise", "--task", "gpt"],
    "tokens-noise/mrpc": ["noise", "--task", "mrpc"],
    "tokens-noise/sst2": ["noise", "--task", "sst2"],
    "tokens-noise/vit": ["noise", "--task", "vit"],
    "tokens-noise/yields": ["noise", "--task", "yields"],
}


@pytest.mark.parametrize("folder", COMMANDS)
def test_a_page_is_drawn_from_its_numbers(folder, tmp_path, capsys):
    committed, out = DOCS / "results" / folder, tmp_path / folder
    kept = shutil.ignore_patterns("checkpoints", "runs.sqlite*", "README.md", "*.png", "*.svg")
    shutil.copytree(committed, out, ignore=kept)
    threads = torch.get_num_threads()
    try:
        call = [*COMMANDS[folder], "--preset", "cpu", "--stored", "--quiet", "--out", str(out)]
        assert main(call) == 0
    finally:
        torch.set_num_threads(threads)
        capsys.readouterr()
    for path in committed.glob("*.*"):
        if path.suffix == ".png":
            continue
        content = path.read_text()
        if path.suffix != ".svg" or f"Matplotlib v{version('matplotlib')}" in content:
            assert (out / path.name).read_text() == content, path.name


def test_every_folder_of_results_has_its_command_or_is_archived():
    results = DOCS / "results"
    folders = {path.parent.relative_to(results).as_posix() for path in results.rglob("README.md")}
    archived = [name for name in folders - set(COMMANDS)]
    assert set(COMMANDS) < folders
    for name in archived:
        assert (
            "Archived: the code of this study was removed"
            in (results / name / "README.md").read_text()
        )
