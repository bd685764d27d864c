"""A clone draws every page again: what the code makes of the committed numbers is committed."""

import shutil
from pathlib import Path

import pytest
import torch

from docs_pages import DOCS
from experiments.__main__ import COMMANDS, STUDIES, main

RESULTS = DOCS / "results"


def commands():
    """How each folder of results that a study publishes is drawn, where it is committed."""
    studies = {("cifar", "--model", name): study for name, study in STUDIES.items()}
    studies |= {(study.name,): study for study in COMMANDS}
    for words, study in studies.items():
        for preset, folder in study.published.items():
            for page in RESULTS.glob(f"{folder}/README.md"):
                yield page.parent, [*words, "--preset", preset]
            for page in RESULTS.glob(f"{folder}/*/README.md"):
                yield page.parent, [*words, "--preset", preset, "--task", page.parent.name]


CALLS = {folder.relative_to(RESULTS).as_posix(): call for folder, call in commands()}


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """What is committed of the results, without databases and pages."""
    left_out = shutil.ignore_patterns("checkpoints", "runs.sqlite*", "README.md", "*.png", "*.svg")
    shutil.copytree(RESULTS, tmp_path / "docs" / "results", ignore=left_out)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield tmp_path / "docs" / "results"
    torch.set_num_threads(threads)


@pytest.mark.parametrize("folder", CALLS)
def test_a_page_is_drawn_from_its_numbers(folder, clone, capsys):
    assert main([*CALLS[folder], "--stored", "--quiet"]) == 0
    for path in map(Path, capsys.readouterr().out.split()):
        assert path.parent == Path("docs/results") / folder
        if path.suffix in (".md", ".csv"):
            committed = RESULTS / folder / path.name
            assert path.read_text() == committed.read_text(), path.name


def test_every_folder_of_results_has_its_command_or_names_the_commit_of_its_code():
    folders = {path.parent.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("README.md")}
    assert {"cifar-vit-cpu", "pay", "depth"} <= set(CALLS) < folders
    for name in folders - set(CALLS):
        assert "*Archived:" in (RESULTS / name / "README.md").read_text()
