"""What the tests of the command line share."""

import sys
import textwrap

import pytest
import torch

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


@pytest.fixture
def two_threads(monkeypatch):
    """Two threads, of which torch only keeps count: the tests have a core each."""
    count = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: count[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: count.__setitem__(0, threads))


FACTORIES = """
    import torch
    from torch import nn
    import sketchprop as sp
    from sketchprop.core.compact import ColumnAtoms
    from sketchprop.sketches import ColumnSketch

    class Half(ColumnSketch):
        def importance(self, vjp):
            return vjp.G.square().sum(-2)

    class Halved(ColumnAtoms):
        def keep(self, vjp, index, scale):
            return super().keep(vjp, index, scale / 2)

    class Wrong(sp.L1):
        def atoms(self, vjp):
            right = super().atoms(vjp)
            return Halved(right.probabilities, right.rank, right.sampling)

    mine = Half(0.3)
    number = 3

    def make(count=3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
        batches = [torch.randn(16, 6) for _ in range(count)]
        return model, lambda m, x: m(x).square().mean(), batches

    def variant(loss_fn=None, change=lambda batches: batches):
        model, usual, batches = make()
        return model, loss_fn or usual, change(batches)

    def endless():
        return variant(change=lambda batches: iter(lambda: torch.randn(16, 6), None))

    def repeated():
        return variant(change=lambda batches: batches[:2] * 9)

    def one():
        return variant(change=lambda batches: batches[:1] * 9)

    def used_up():
        return variant(change=iter)

    def breaks():
        def loss_fn(m, x):
            raise RuntimeError("out of cheese")
        return variant(loss_fn)

    def twice():
        return variant(lambda m, x: (m(x).mean(), x))

    def only_a_model():
        return nn.Linear(3, 3)

    def with_optimizer():
        parts = make(40)
        return *parts, torch.optim.Adam(parts[0].parameters(), lr=1e-2)

    def with_nonsense():
        return *make(), "adam"
"""


@pytest.fixture
def mine(tmp_path):
    """A module of the user's, under a name that no other test imports."""
    name = f"mine_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(FACTORIES))
    return name
