"""What the tests of the command line share."""

import sys

import pytest

from sketchprop.cli import main


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Runs a command in an empty folder; exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*arguments):
        try:
            code = main(arguments)
        except SystemExit as end:  # argparse: --help and bad options
            code = end.code
        out, err = capsys.readouterr()
        return code, out, err

    return call
