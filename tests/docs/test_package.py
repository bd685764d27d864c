"""The public surface, and what importing it costs."""

import subprocess
import sys
from importlib.metadata import version
from importlib.resources import files

import sketchprop as sp

OPTIONAL = ("rich", "matplotlib", "sklearn", "transformers", "lightning", "tensorboard", "peft")


def test_everything_in_all_can_be_imported():
    assert all(hasattr(sp, name) for name in sp.__all__)


def test_all_is_sorted_without_repetitions():
    def natural(name):
        # ruff's order: CONSTANTS, then Classes, then functions.
        return (not name.isupper(), not name[0].isupper(), name)

    assert list(sp.__all__) == sorted(set(sp.__all__), key=natural)


def test_the_names_of_the_readme_are_there():
    promised = {
        "ColumnMask",
        "SampleMask",
        "ElementMask",
        "L1",
        "L2",
        "Variance",
        "Diagonal",
        "GradientSVD",
        "RankConstrained",
        "optimal_probabilities",
        "sample_fixed",
        "sample_independent",
        "sketched_linear",
        "gate",
        "sketch_",
        "unsketch_",
        "exact",
        "summary",
        "check_unbiased",
    }
    assert promised <= set(sp.__all__)


def test_every_public_name_has_a_docstring():
    for name in sp.__all__:
        if not name.startswith("__"):
            assert getattr(sp, name).__doc__, name


def test_import_brings_no_optional_package():
    code = f"import sys, sketchprop; print([m for m in {OPTIONAL!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_import_leaves_the_random_state_and_the_threads_alone():
    code = (
        "import torch; s, t = torch.get_rng_state(), torch.get_num_threads(); import sketchprop; "
        "print(torch.equal(s, torch.get_rng_state()), t == torch.get_num_threads())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "True"]


def test_version():
    assert sp.__version__ == version("sketchprop")


def test_the_package_is_typed():
    assert files("sketchprop").joinpath("py.typed").is_file()
