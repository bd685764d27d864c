"""What all meters are given wrongly: a clear error, and everything as before."""

import copy
import math

import pytest
import torch
from torch import nn

import sketchprop as sp
from measure_helpers import loss_fn, make_batches, mlp


def asked(what, model, loss, batches, minutes):
    """Each with the arguments that it has."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if what == "advise":
        sp.advise(model, loss, batches, minutes=minutes)
    elif what == "trial":
        sp.trial(model, loss, batches, optimizer, sp.L1(0.5), minutes=minutes)
    elif what == "measure":
        sp.measure(model, loss, batches, sp.L1(0.5), minutes=minutes)
    elif what == "plan":
        sp.plan(model, loss, batches[0], rounds=1)
    elif what == "tuner":
        tuner = sp.Tuner(sp.sketch_(model, sp.L1(0.5)), loss, share=1.0)
        for batch in batches * 10:
            tuner(batch)


def on_meta():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to("meta")


EVERYONE = ("advise", "trial", "measure", "plan", "tuner")
TIMED = ("advise", "trial", "measure")
CASES = [
    *((what, {"batches": []}, "0 (different )?batch") for what in TIMED),
    *((what, {"batches": make_batches(1)}, "1 (different )?batch") for what in TIMED),
    ("advise", {"batches": make_batches(1) * 5}, "1 different batch"),
    *((what, {"model": mlp().requires_grad_(False)}, "unfreeze") for what in TIMED),
    *((what, {"loss": lambda m, b: m(b[0])}, "return a scalar") for what in EVERYONE),
    *((what, {"model": on_meta()}, "meta device") for what in EVERYONE),
    *((what, {"minutes": 1e-9}, "too short") for what in TIMED),
    *((what, {"minutes": 0}, "is no time") for what in TIMED),
    *((what, {"minutes": math.nan}, "is no time") for what in TIMED),
]


@pytest.mark.parametrize(
    ("what", "given", "message"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x)
)
def test_bad_input_is_refused_and_leaves_everything_as_before(what, given, message):
    torch.manual_seed(0)
    usual = {"model": mlp(), "loss": loss_fn, "batches": make_batches(8), "minutes": 0.05}
    options = {**usual, **given}
    model = options["model"]
    weights = copy.deepcopy(model.state_dict()) if "model" not in given else {}
    random_state = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        asked(what, **options)
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, value in weights.items():
        assert torch.equal(model.state_dict()[name], value)
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training for module in model.modules())
