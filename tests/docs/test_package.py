"""The public surface, and what importing it costs."""

import subprocess
import sys

import sketchprop as sp


def test_every_public_name_has_a_docstring():
    for name in sp.__all__:
        if not name.startswith("__"):
            assert getattr(sp, name).__doc__, name


def test_import_leaves_the_random_state_and_the_threads_alone():
    code = (
        "import torch; s, t = torch.get_rng_state(), torch.get_num_threads(); import sketchprop; "
        "print(torch.equal(s, torch.get_rng_state()), t == torch.get_num_threads())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "True"]
