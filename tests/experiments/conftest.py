"""Fixtures that several tests of the experiments share."""

import pytest
import torch

from experiments.data import VARIABLE


@pytest.fixture
def no_files(tmp_path, monkeypatch):
    """Neither data nor a cache: made-up data must do."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing"))
    monkeypatch.setenv("SKETCHPROP_CACHE", str(tmp_path / "no cache"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
