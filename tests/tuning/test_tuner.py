"""Tuner on networks: it finds what pays, disturbs nothing, and goes on where it stopped.

Time is told by a clock that the budgets move, so that no test depends on the machine's.
"""

import copy
import json
import math
from statistics import fmean

import pytest
import torch
import torch.nn.functional as F

import sketchprop as sp
from measure_helpers import Branched, loss_fn, make_batches, mlp
from sketchprop.meters import measure_variance
from sketchprop.sketches import Every
from sketchprop.zoo import ViT
from stack_helpers import BudgetClock, wide


def train(model, batches, tuner=None, optimizer=None, seed=0):
    torch.manual_seed(seed)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for batch in batches:
        if tuner is not None:
            tuner(batch)
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize(("build", "planner"), [(Branched, None), (mlp, None), (mlp, Every(4))])
def test_a_frozen_tuner_leaves_the_loss_curve_as_it_is_bitwise(build, planner):
    torch.manual_seed(13)
    watched = sp.sketch_(build(), sp.L1(0.5), planner=planner)
    alone = copy.deepcopy(watched)
    tuner = sp.Tuner(watched, loss_fn, share=1.0, frozen=True)
    batches = make_batches(30)
    assert all(
        torch.equal(a, b)
        for a, b in zip(train(watched, batches, tuner), train(alone, batches), strict=True)
    )
    assert [entry["step"] for entry in tuner.log] == list(range(4, 31, 4))
    assert list(tuner.budgets.values()) == [0.5]
    for a, b in zip(watched.state_dict().values(), alone.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_frozen_tuner_finds_the_noise_that_is_measured():
    torch.manual_seed(14)
    model = sp.sketch_(mlp(), {"0": sp.L1(0.5), "2": sp.L1(0.4)})
    batches = make_batches(41)
    truth = measure_variance(model, loss_fn, batches, draws=10, split=False)
    tuner = sp.Tuner(model, loss_fn, share=1.0, frozen=True, clock=BudgetClock(model))
    for batch in batches * 20:
        tuner(batch)
    assert [m.sketch for m in (model[0], model[2])] == [sp.L1(0.5), sp.L1(0.4)]
    assert len(tuner.log) == 205
    assert all(entry["moved"] is False for entry in tuner.log)
    names = ("added", "sigma2", "noise", "worst", "time")
    mean = {k: fmean(e[k] for e in tuner.log) for k in names}
    # 205 pairs (of 41 different ones) against 41 batches: a tenth is three standard errors.
    assert mean["sigma2"] == pytest.approx(truth.sigma2.value, rel=0.15)
    assert mean["added"] == pytest.approx(truth.added.value, rel=0.1)
    total = truth.sigma2.value + truth.signal
    assert mean["noise"] == pytest.approx(truth.added.value / total, rel=0.25)
    assert mean["worst"] == pytest.approx(truth.worst.share, rel=0.25)
    assert mean["worst"] > 1.1 * mean["noise"]
    assert mean["time"] < 1
    assert len({entry["added"] for entry in tuner.log}) > 20


def test_a_frozen_tuner_follows_budgets_that_others_move():
    model = wide()
    tuner = sp.Tuner(model, loss_fn, share=1.0, frozen=True)
    noise = []
    for budget in (0.5, 1.0, 0.1):
        sp.set_budget_(model, budget)
        noise += [entry["added"] for batch in make_batches(8) if (entry := tuner(batch))]
        assert list(tuner.budgets.values()) == [budget]
    assert noise[2:4] == [0.0, 0.0]
    assert 0 < max(noise[:2]) < min(noise[4:])


def test_the_log_is_plain_data():
    model = wide()
    tuner = sp.Tuner(model, loss_fn, share=1.0, clock=BudgetClock(model))
    train(model, make_batches(10), tuner)
    assert tuner.log
    assert json.loads(json.dumps(tuner.log)) == tuner.log


def test_only_the_batch_before_a_probe_is_kept_alive():
    model = wide()
    tuner = sp.Tuner(model, loss_fn, share=0.2)
    alive = []
    for batch in make_batches(2 * tuner.next_probe):
        tuner(batch)
        alive.append(tuner._before is not None)
    assert sum(alive) <= 2


def test_a_training_may_take_its_labels_out_of_the_batch():
    tuner = sp.Tuner(wide(), lambda m, b: loss_fn(m, (b["x"], b.pop("y"))), share=0.2)
    for x, y in make_batches(2 * tuner.next_probe):
        batch = {"x": x, "y": y}
        tuner(batch)
        assert batch.pop("y") is y
    assert tuner.log


def test_budgets_fall_where_time_is_saved_and_noise_is_small():
    model = wide()
    tuner = sp.Tuner(model, loss_fn, share=1.0, clock=BudgetClock(model, rest=1, slope=16))
    assert [m.sketch.budget for m in (model[0], model[2])] == [1.0, 1.0]
    train(model, make_batches(60, rows=256), tuner)
    assert tuner.log[0]["moved"]
    assert min(tuner.budgets.values()) < 0.5
    assert [m.sketch.budget for m in (model[0], model[2])] == list(tuner.budgets.values())
    assert tuner.log[-1]["change"] < 0.9


def test_where_no_time_is_saved_it_stays_exact_and_says_so():
    model = wide()
    tuner = sp.Tuner(model, loss_fn, share=0.5, clock=BudgetClock(model, slope=0))
    train(model, make_batches(200), tuner)
    assert len(tuner.log) >= 2
    assert set(tuner.budgets.values()) == {1.0}
    gaps = [b["step"] - a["step"] for a, b in zip(tuner.log, tuner.log[1:], strict=False)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 2 * gaps[0]
    notes = [layer.note for layer in sp.summary(model).layers]
    assert sum("tuned at step" in note and "exact" in note for note in notes) == 2


def test_an_exact_layer_asks_nothing_of_its_sketch_until_somebody_sets_a_budget():
    model = wide()
    sp.Tuner(model, loss_fn)
    x, _ = make_batches(1)[0]
    assert type(model[0](x).grad_fn).__name__ == "AddmmBackward0"
    sp.set_budget_(model, 0.5)
    assert "Sketched" in type(model[0](x).grad_fn).__name__


def test_probes_take_no_more_than_their_share():
    model = wide()
    clock = BudgetClock(model)
    tuner = sp.Tuner(model, loss_fn, share=0.1, clock=clock)
    for batch in make_batches(400):
        tuner(batch)
        clock.now += 16  # the step itself: in this world as long as a pass
    assert len(tuner.log) >= 2
    assert 0 < tuner.spent <= 0.1 * clock.now


@pytest.mark.parametrize("slope", [16, 0])
def test_a_training_of_known_length_is_probed_early_and_within_its_share(slope):
    model, steps = wide(), 480
    clock = BudgetClock(model, rest=1, slope=slope)
    tuner = sp.Tuner(model, loss_fn, steps=steps, clock=clock)
    assert len(tuner.groups) == 1  # three probes fit
    assert len(sp.Tuner(wide(), loss_fn, steps=5000).groups) == 2
    batches, start = make_batches(4, rows=4096), clock.now
    for step in range(steps):
        tuner(batches[step % 4])
        clock()  # the step itself: as long as a pass
    probed = [entry["step"] for entry in tuner.log]
    assert probed[0] == 24  # of 480 its twentieth; without steps= it would be 133
    assert len(probed) >= 2
    assert 0 < tuner.spent <= 0.03 * (clock.now - start)
    if slope:
        assert tuner.log[0]["moved"]
        assert tuner.log[-1]["change"] < 0.95
    else:
        assert set(tuner.budgets.values()) == {1.0}
    # Longer than was said: it goes on as without.
    before = len(tuner.log)
    for step in range(2000):
        tuner(batches[step % 4])
    assert before < len(tuner.log) < before + 20


def test_a_training_too_short_for_a_probe_is_told_so(caplog):
    model = wide()
    with caplog.at_level("WARNING", "sketchprop"):
        tuner = sp.Tuner(model, loss_fn, steps=90, start=0.5, clock=BudgetClock(model))
    assert "no probe fits into 3% of 90 steps" in caplog.text
    assert "larger share=" in caplog.text
    assert "no probe fits" in str(sp.summary(model))
    train(model, make_batches(90), tuner)
    assert not tuner.log
    assert set(tuner.budgets.values()) == {0.5}


def test_a_training_that_is_made_longer_goes_on_with_its_groups():
    first = sp.Tuner(wide(), loss_fn, steps=480)
    second = sp.Tuner(wide(), loss_fn, steps=5000)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert list(second.groups) == list(first.groups)
    assert second.steps == 5000
    third = sp.Tuner(wide(), loss_fn)
    third.load_state_dict(first.state_dict())
    assert third.steps == 480
    third.log.append({"step": 3})
    with pytest.raises(RuntimeError, match="probed already"):
        third.expect(10)


@pytest.mark.parametrize("steps", [None, 70])
def test_stopped_and_resumed_it_goes_on_bitwise(steps):
    batches = make_batches(70, rows=64)
    whole, part = wide(), wide()

    def fresh(model):
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        options = {"steps": steps, "share": 1.0, "clock": BudgetClock(model)}
        tuner = sp.Tuner(model, loss_fn, optimizer=optimizer, **options)
        return tuner, optimizer

    tuner, optimizer = fresh(whole)
    train(whole, batches[:40], tuner, optimizer, 0)
    rest = train(whole, batches[40:], tuner, optimizer, 1)

    first, first_optimizer = fresh(part)
    train(part, batches[:40], first, first_optimizer, 0)
    assert first.controller.frozen_times
    saved = json.loads(json.dumps(first.state_dict()))
    resumed = wide()
    resumed.load_state_dict(part.state_dict())
    second, second_optimizer = fresh(resumed)
    second_optimizer.load_state_dict(first_optimizer.state_dict())
    second.load_state_dict(saved)
    second.clock = lambda: 0.0  # another machine
    again = train(resumed, batches[40:], second, second_optimizer, 1)
    assert all(torch.equal(a, b) for a, b in zip(rest, again, strict=True))
    assert tuner.budgets == second.budgets != dict.fromkeys(tuner.budgets, 1.0)
    decisions = [{k: v for k, v in entry.items() if k != "spent"} for entry in tuner.log]
    assert decisions == [{k: v for k, v in e.items() if k != "spent"} for e in second.log]
    assert len(second.log) > len(first.log)


def test_a_state_of_another_network_is_refused():
    tuner = sp.Tuner(wide(), loss_fn)
    with pytest.raises(ValueError, match="the same groups="):
        sp.Tuner(wide(), loss_fn, groups=1).load_state_dict(tuner.state_dict())


def test_noise_where_the_gradient_is_next_to_zero_counts_as_adam_will_see_it():
    """The bias of keys moves no output of attention: its gradient is 0, and its noise is not."""
    torch.manual_seed(14)
    model = ViT(dim=16, depth=2, heads=2, hidden=32)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    batches = [(torch.randn(16, 3, 32, 32), torch.randint(10, (16,))) for _ in range(4)]
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    sp.sketch_(model, sp.Tokens(0.5))
    tuner = sp.Tuner(model, loss_fn, optimizer=optimizer, share=1.0, frozen=True)
    tuner.next_probe = 1
    assert tuner(batches[0])["noise"] < 2  # as if v had no noise in it: more than a thousand
    assert sp.advise(model, loss_fn, batches, optimizer=optimizer, minutes=0.2).options[1].noise < 2


def test_with_adam_it_waits_until_there_is_a_state():
    model = wide()
    optimizer = torch.optim.Adam(model.parameters())
    tuner = sp.Tuner(model, loss_fn, optimizer=optimizer, share=1.0)
    for batch in make_batches(12):
        assert tuner(batch) is None
    train(model, make_batches(1), None, optimizer)
    assert tuner(make_batches(1)[0]) is not None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_probe_that_is_not_finite_is_ignored_and_training_goes_on(bad):
    tuner = sp.Tuner(wide(), lambda m, b: loss_fn(m, b) * bad, share=1.0, start=0.5)
    before = tuner.controller.state_dict()
    found = [entry for batch in make_batches(14) if (entry := tuner(batch))]
    assert len(found) >= 2
    assert all("ignored" in entry["why"] and not entry["moved"] for entry in found)
    assert tuner.controller.state_dict() == before


def test_inside_of_exact_nothing_is_probed():
    model = wide()
    tuner = sp.Tuner(model, loss_fn, share=1.0)
    with sp.exact(model):
        assert [tuner(batch) for batch in make_batches(10)] == [None] * 10
    assert tuner(make_batches(1)[0]) is not None


def test_blocks_on_kept_tokens_are_tuned_whole_and_rung_one_draws_nothing():
    torch.manual_seed(0)
    model = ViT(dim=16, depth=3, heads=2, hidden=32)
    sp.sketch_(model, sp.Tokens(0.3, queries=0.4, share="even"))
    images, labels = torch.randn(6, 3, 32, 32), torch.randint(10, (6,))
    loss = lambda m, batch: F.cross_entropy(m(batch[0]), batch[1])  # noqa: E731
    tuner = sp.Tuner(model, loss, share=1.0, groups=2, clock=BudgetClock(model))
    assert len(tuner.groups) == 2
    assert sum(map(len, tuner.groups.values())) == 3
    grads = [torch.autograd.grad(loss(model, (images, labels)), [*model.parameters()])]
    with sp.exact(model):
        grads.append(torch.autograd.grad(loss(model, (images, labels)), [*model.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    entries = [tuner((images, labels)) for _ in range(8)]
    assert any(entries)
    assert "tuned at step" in str(sp.summary(model))


def test_bad_options_are_refused():
    model = wide()
    for options, message in [
        ({"share": 0}, "share=0"),
        ({"start": 0.6}, "give one of"),
        ({"groups": 0}, "groups=0"),
        ({"steps": 0}, "steps=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            sp.Tuner(model, loss_fn, **options)
    with pytest.raises(ValueError, match="no sketched layer"):
        sp.Tuner(mlp(), loss_fn)


class Broken(BudgetClock):
    """A clock that jumps back, runs backwards or stands still."""

    def __init__(self, model, kind):
        super().__init__(model)
        self.kind, self.readings = kind, 0

    def __call__(self):
        now = super().__call__()
        self.readings += 1
        if self.kind == "jumps back" and self.readings % 17 == 0:
            self.now -= 500
        return {"runs backwards": -now, "stands still": 0.0}.get(self.kind, now)


@pytest.mark.parametrize("kind", ["jumps back", "runs backwards", "stands still"])
def test_a_clock_that_goes_back_moves_no_budget_by_itself(kind):
    model = wide()
    tuner = sp.Tuner(model, loss_fn, share=1.0, clock=Broken(model, kind))
    train(model, make_batches(40), tuner)
    ignored = [entry for entry in tuner.log if "the clock stood still" in entry["why"]]
    assert ignored
    assert not any(entry["moved"] for entry in ignored)
    assert tuner.spent >= 0
    if kind != "jumps back":
        assert len(ignored) == len(tuner.log)
        assert all(p == 1.0 for p in tuner.budgets.values())
