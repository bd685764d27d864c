"""advise(): the answer follows from time and noise, and nothing is left behind."""

import copy
import itertools
import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sketchprop as sp
from measure_helpers import Branched, loss_fn, make_batches, mlp
from sketchprop.core import stopwatch
from sketchprop.layers import SketchedModule
from sketchprop.meters import Advice, Candidate, Option
from sketchprop.meters.advising import candidates, meter
from sketchprop.meters.advising.advice import OUT_OF_TIME, VISIBLE
from sketchprop.meters.advising.candidates import rows_seen
from sketchprop.zoo import ViT

TOKENS = Option(
    "Tokens(0.3)", "sp.sketch_(model, sp.Tokens(0.3))", 0.7, 0.1, 0.77, 0.01, memory=0.6
)
SLOW = Option("L1(0.3)", "sp.sketch_(model, sp.L1(0.3))", 1.2, 0.05, 1.26, 0.01, memory=1.0)
HALF = Option("half of the batch", "", 0.52, 0.9, 0.988, 0.01)


def advice(*options, control=HALF):
    known = {repr(sketch): Candidate(sketch) for sketch in (sp.Tokens(0.3), sp.L1(0.3))}
    return Advice(options, control, 0.1, 2.0, 1.0, 64.0, 8, 8, 70, 12.0, (), known)


def test_it_advises_the_option_with_the_least_time_to_equal_quality():
    answer = advice(SLOW, TOKENS)
    assert answer.pays
    assert answer.best is TOKENS
    assert answer.change == 0.77
    assert answer.line == "sp.sketch_(model, sp.Tokens(0.3))"
    assert answer.interval == pytest.approx((0.7, 1.2 * 0.77 + 2 * 0.01))
    assert answer.headline().startswith(
        "It pays: 23 % less time to the same quality (between 30 % and 6 % less)."
    )
    assert answer.line in answer.headline()
    model = ViT(dim=16, depth=1, heads=2, hidden=32)
    assert answer.apply_(model) is model
    assert model.blocks[0].sketch == sp.Tokens(0.3)


@pytest.mark.parametrize(
    ("options", "control", "reason"),
    [
        ([SLOW], HALF, "nothing that was tried makes a step faster"),
        ([replace(TOKENS, noise=0.5, change=1.05)], HALF, "drowns"),
        ([replace(TOKENS, noise=0.3, change=0.99)], HALF, "not worth the noise"),
    ],
)
def test_it_says_stay_exact_and_why(options, control, reason):
    answer = advice(*options, control=control)
    assert not answer.pays
    assert (answer.line, answer.change) == ("", 1.0)
    assert reason in answer.reason
    assert answer.headline().startswith("Stay exact")
    model = ViT(dim=16, depth=1, heads=2, hidden=32)
    answer.apply_(model)
    assert not any(isinstance(m, SketchedModule) for m in model.modules())


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (replace(TOKENS, noise=0.25, change=0.875), "between 30 % less and 7 % more time"),
        (replace(TOKENS, error=0.4), "between 30 % less and 72 % more time"),
    ],
)
def test_a_gain_that_whole_trainings_may_not_find_is_too_close_to_call(option, said):
    answer = advice(option, SLOW)
    assert (answer.pays, answer.line, answer.change) == (False, "", 1.0)
    first, second, *_ = answer.headline().splitlines()
    assert first == f"Too close to call: {said} to the same quality with Tokens(0.3)."
    assert "--trial" in second


@pytest.mark.parametrize("option", [TOKENS, replace(TOKENS, noise=0.5, change=1.05)])
def test_where_the_batches_do_not_show_the_gradient_there_is_no_answer(option):
    hidden = replace(advice(option, SLOW), visible=0.4)
    assert not hidden.pays
    assert hidden.headline().startswith("No answer yet: the noise of the batches hides")
    assert "Train exactly for 100 steps and ask again" in hidden.headline()
    assert "Train exactly for 300 steps" in replace(hidden, steps=300).headline()
    assert "for as many steps again and ask" in replace(hidden, steps=None).headline()
    assert "worth the noise" not in hidden.headline()
    few = replace(hidden, batches=3, given=3)
    assert few.headline().startswith("No answer yet: 3 batches cannot show the gradient")
    assert "at least 8" in few.headline()
    assert "more minutes" in replace(few, given=20).headline()
    # What is not faster, or has no noise, needs no gradient to be held against.
    assert replace(hidden, options=(SLOW,)).headline().startswith("Stay exact")
    free = replace(SLOW, time=0.6, noise=0.0, change=0.6)
    answer = replace(hidden, options=(replace(TOKENS, change=0.55), free))
    assert answer.pays
    assert answer.line == SLOW.line


@pytest.mark.parametrize("visible", [0.4, 3.0])
def test_without_noise_the_time_alone_is_in_doubt(visible):
    free = replace(TOKENS, time=0.86, noise=0.0, change=0.86, error=0.005)
    assert free.interval == pytest.approx((0.86, 1.1 * 0.86 + 2 * 0.005))
    answer = replace(advice(free, SLOW), visible=visible)
    assert answer.pays
    answer = replace(advice(replace(free, error=0.1), SLOW), visible=visible)
    assert answer.headline().startswith("Too close to call: between 14 % less and 15 % more")


@pytest.mark.parametrize("tail", [None, 3.0], ids=["normal", "heavy"])
@pytest.mark.parametrize("optimizer", [None, torch.optim.Adam])
def test_a_gradient_is_seen_where_there_is_one(tail, optimizer):
    """g_k are the batches themselves. Of 200 sets without a mean 7 % are beyond 1.5 errors; with
    ‖g‖²/σ² of a fifth or more nearly all are. Binomial bounds of 1 in 10,000."""
    noise = torch.distributions.StudentT(tail) if tail else torch.distributions.Normal(0.0, 1.0)

    def seen(shift, seed):
        torch.manual_seed(seed)
        model = nn.Linear(20, 1, bias=False)
        batches = [noise.sample((1, 20)) + shift for _ in range(32)]
        given = optimizer and optimizer(model.parameters())
        return meter.Meter(model, lambda m, b: m(b).sum(), batches, given, 0, 1.0).visible

    assert 3 <= sum(seen(0.0, seed) > VISIBLE for seed in range(200)) <= 30
    assert sum(seen(0.8, seed) > VISIBLE for seed in range(20)) >= 18


def test_noise_of_the_loss_is_no_gradient():
    """Dropout, or a loss that draws: each batch has noise of its own."""

    def seen(seed):
        torch.manual_seed(seed)
        batches = [torch.zeros(1, 20) for _ in range(16)]
        model = nn.Linear(20, 1, bias=False)
        noisy = partial(meter.Meter, model, lambda m, b: m(torch.randn_like(b)).sum())
        return noisy(batches, None, seed, 1.0).visible

    assert sum(seen(seed) > VISIBLE for seed in range(40)) <= 11  # binomial, 1 in 10,000


def test_candidates_begin_with_the_buffers_that_the_model_has(monkeypatch):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    seen = []
    measured = meter.Meter.measured

    def noting(self, *rest):
        seen.append(int(self.model[1].num_batches_tracked))
        return measured(self, *rest)

    monkeypatch.setattr(meter.Meter, "measured", noting)
    batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(4)]
    sp.advise(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batches, minutes=0.02)
    assert seen
    assert set(seen) == {0}


def test_where_half_of_the_batch_does_more_that_comes_first_and_the_line_for_this_batch_after():
    answer = advice(TOKENS, control=replace(HALF, change=0.6))
    assert answer.gains
    assert not answer.pays
    assert (answer.line, answer.change) == ("", 1.0)
    lines = answer.headline().splitlines()
    assert lines[0] == (
        "Halve the batch: exact steps on half of it need 40 % less time (0.600 ± 0.01 ×) to the "
        "same quality. Then ask again."
    )
    assert lines[2] == "With the batch as it is, 23 % less time:"
    assert lines[4].strip() == TOKENS.line
    assert answer.reason.startswith("half of the batch gains more: exact steps on half of it need")
    assert "half" not in lines[6]
    stays = advice(replace(TOKENS, noise=0.5, change=1.05), control=replace(HALF, change=0.8))
    first, *rest = stays.headline().splitlines()
    assert first == "Stay exact: no sketch pays here."
    assert any(line.startswith("Half of the batch: exact steps on half") for line in rest)
    assert "Half of the batch:" not in advice(SLOW).headline()  # 0.988 ± 0.01: too little


def test_the_table_has_the_best_first_and_the_control_last():
    (table,) = advice(SLOW, TOKENS, replace(SLOW, name="none", change=None)).tables()
    names = [row[0] for row in table.rows]
    assert names == ["Tokens(0.3)", "L1(0.3)", "none", "half of the batch"]
    assert "padding" not in table.note
    (padded,) = replace(advice(TOKENS), live=0.8).tables()
    assert "80% of the gradient's rows are not zero" in padded.note


def test_the_optimizer_is_timed_on_a_copy_and_counts_in_each_step(monkeypatch):
    now, hooks = [0.0], []

    class Slow(torch.optim.Adam):
        def step(self, closure=None):
            now[0] += 3.0 if all(p.grad is not None for p in self.param_groups[0]["params"]) else 9
            return super().step(closure)

    monkeypatch.setattr(stopwatch, "clock_of", lambda device: lambda: now[0])
    model = mlp()
    optimizer = Slow(model.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda *_: hooks.append(1))
    before = copy.deepcopy(model.state_dict())
    assert meter.optimizer_seconds(optimizer) == 3.0
    assert not optimizer.state
    assert not hooks
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert meter.optimizer_seconds(None) == 0.0
    lbfgs = torch.optim.LBFGS(model.parameters())  # needs a closure: cannot be called alone
    assert meter.optimizer_seconds(lbfgs) == 0.0
    # An optimizer that takes a thousand times as long as all else leaves nothing to be saved.
    monkeypatch.undo()
    monkeypatch.setattr(meter, "optimizer_seconds", lambda optimizer: 1e3)
    answer = sp.advise(mlp(), loss_fn, make_batches(3), minutes=0.3)
    times = [o.time for o in (*answer.options, answer.control) if o.time is not None]
    assert times == pytest.approx([1.0] * len(times), abs=1e-3)
    assert sp.advise(mlp(), loss_fn, make_batches(3), minutes=0.3, control=False).control is None


def test_half_of_the_batch_is_no_more_certain_than_a_sketch():
    gaining = replace(TOKENS, noise=0.01, change=0.707, error=0.0)
    likely, sure = (replace(HALF, change=change, error=0.0) for change in (0.6, 0.9))
    assert advice(gaining, control=likely).answer == "halve the batch"
    free = replace(gaining, noise=0.0, change=0.7)
    assert replace(advice(free, control=likely), visible=0.4).answer == "it pays"
    close = advice(replace(gaining, time=0.9, change=0.95), control=sure)
    assert close.answer == "too close to call"
    assert "Half of the batch: " in close.headline()


def test_a_control_that_is_ahead_by_chance_alone_does_not_decide():
    assert advice(TOKENS, control=replace(HALF, change=0.7, error=0.1)).pays
    assert advice(TOKENS, control=None).pays


def test_where_most_were_not_tried_there_is_no_answer_yet():
    missing = [Option(f"L1({p})", "", note=OUT_OF_TIME) for p in (0.1, 0.2, 0.5)]
    answer = advice(SLOW, *missing)
    assert not answer.pays
    first = answer.headline().splitlines()[0]
    assert first == (
        "No answer yet: 3 of 4 sketches were not tried in the time; give 1 minutes, or smaller "
        "batches."
    )
    assert advice(TOKENS, *missing).headline().startswith("It pays")
    assert advice(SLOW, SLOW, missing[0]).headline().startswith("Stay exact")
    # A control for which there was no time is in the table and decides nothing.
    answer = advice(TOKENS, control=Option("half of the batch", "", note=OUT_OF_TIME))
    assert answer.pays
    assert OUT_OF_TIME in str(answer)


def tried(model, loss, batches):
    ticks, optimizer = itertools.count().__next__, torch.optim.SGD(model.parameters(), 0.1)
    return sp.trial(model, loss, batches, optimizer, sp.L1(0.5), minutes=4, clock=ticks)


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("ask", [partial(sp.advise, minutes=0.3), tried], ids=["advise", "trial"])
def test_where_other_programs_have_the_cores_one_thread_is_timed_and_it_says_so(
    ask, busy, monkeypatch, two_threads
):
    monkeypatch.setattr(stopwatch, "_threads_help", lambda threads: not busy)
    seen = set()

    def watched(model, batch):
        seen.add(torch.get_num_threads())
        return loss_fn(model, batch)

    answer = ask(mlp(), watched, make_batches(8))
    assert seen == {1 if busy else 2}
    assert torch.get_num_threads() == 2
    assert ("other programs have the cores" in str(answer)) == busy


def test_threads_come_back_after_an_error(monkeypatch, two_threads):
    monkeypatch.setattr(stopwatch, "_threads_help", lambda threads: False)
    with pytest.raises(ZeroDivisionError), stopwatch.unhurried(torch.device("cpu")):
        _ = 1 / 0
    assert torch.get_num_threads() == 2


def test_threads_are_held_against_one_by_the_time_of_products(monkeypatch):
    """Clocks that say how long ten products take: on one thread 1 s, on all ``wall``."""
    for wall, helps in ((0.55, True), (3.3, False)):
        clocks = {"process_time": 1.0, "perf_counter": wall}
        for name, step in clocks.items():
            monkeypatch.setattr(stopwatch, name, partial(next, itertools.count(0, step)))
        assert stopwatch._threads_help(torch.get_num_threads()) == helps


@pytest.mark.parametrize(("calm", "second"), [(0.0, 0.5), (9.0, 0.1)])
def test_every_candidate_that_fits_is_measured_and_the_table_says_so(monkeypatch, calm, second):
    monkeypatch.setattr(candidates, "CALM", calm)
    torch.manual_seed(0)
    model = ViT(dim=16, depth=2, heads=2, hidden=32)
    batches = [(torch.randn(6, 3, 32, 32), torch.randint(10, (6,))) for _ in range(3)]
    shares = []
    answer = sp.advise(model, loss_fn, batches, minutes=1 / 6, progress=shares.append)
    names = [option.name for option in answer.options]
    assert names[:3] == ["Tokens(0.3)", f"Tokens({second})", "Tokens(0.2)"]
    assert {"Rows(0.3)", "Rows(0.3, unit='sample')", "L1(0.3)"} == set(names[3:])
    noise = {option.name: option.noise for option in answer.options}
    ordered = [noise[f"Tokens({p})"] for p in sorted((second, 0.3, 0.2), reverse=True)]
    assert 0 < ordered[0] < ordered[1] < ordered[2]
    for option in answer.options:
        assert option.change == pytest.approx(option.time * (1 + option.noise))
    assert answer.control.name == "half of the batch"
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert "Tokens(0.3)" in str(answer.tables()[0])
    data = json.loads(json.dumps(answer.as_dict()))
    assert data["pays"] == answer.pays
    assert len(data["options"]) == 6


def test_the_noise_agrees_with_that_of_measure():
    """Two batches and four draws against eight: within a half, as the spread of V allows."""
    torch.manual_seed(1)
    model, batches = mlp(), make_batches(8, rows=64)
    answer = sp.advise(model, loss_fn, batches, minutes=1 / 6)
    report = sp.measure(model, loss_fn, batches, sp.L1(0.3), split=False, rounds=0, draws=8)
    (option,) = [o for o in answer.options if o.name == "L1(0.3)"]
    total = report.sigma2.value * (1 + answer.signal)
    assert option.noise == pytest.approx(report.added.value / total, rel=0.5)


def test_batch_norm_in_training_mode_is_warned_of_and_rows_are_not_tried():
    torch.manual_seed(2)
    model = Branched(dropout=0.0)
    answer = sp.advise(model, loss_fn, make_batches(3), minutes=0.3)
    assert [option.name for option in answer.options] == ["L1(0.3)"]
    assert "BatchNorm1d in training mode" in answer.headline()
    assert "Such sketches were not tried" in answer.headline()
    model.norm.eval()
    names = [option.name for option in sp.advise(model, loss_fn, make_batches(3)).options]
    assert "Rows(0.3)" in names


def test_where_rows_are_padding_it_tries_to_leave_them_out_and_scales_the_budgets():
    torch.manual_seed(5)
    options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    layers = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, **options), 2, enable_nested_tensor=False
    )
    model = nn.ModuleDict({"layers": layers, "head": nn.Linear(16, 5)})
    padded = torch.zeros(4, 20, dtype=torch.bool)
    padded[:, 8:] = True
    batches = [(torch.randn(4, 20, 16), torch.randint(5, (4,))) for _ in range(4)]

    def pooled(model, batch):
        x = model["layers"](batch[0], src_key_padding_mask=padded)
        mean = (x * ~padded.unsqueeze(-1)).sum(1) / 8
        return F.cross_entropy(model["head"](mean), batch[1])

    answer = sp.advise(model, pooled, batches, minutes=0.2)
    assert answer.live == pytest.approx(8 / 20)
    by_name = {option.name: option for option in answer.options}
    free = by_name[repr(sp.Rows(1.0, by="nonzero"))]
    assert free.noise < 1e-6
    assert sp.sketch_(model, eval(free.line.split("model, ")[1][:-1])) is model
    assert "Tokens(0.12)" in by_name
    assert "40% of the gradient's rows are not zero" in str(answer)


@pytest.mark.parametrize("empty", ["head", "labels"])
def test_where_hardly_a_row_has_a_gradient_all_rows_count(empty):
    """Below a head of zeros; of a first batch without labels the second one is asked."""
    torch.manual_seed(0)
    model = ViT(dim=16, depth=2, heads=2, hidden=32, patch=8)
    labels = torch.randint(10, (4, 6))
    if empty == "head":
        nn.init.zeros_(model.head.weight)
    else:
        labels[0] = -100
    batches = [(torch.randn(6, 3, 32, 32), own) for own in labels]

    def summed(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    answer = sp.advise(model, summed, batches, minutes=0.1)
    assert answer.live == 1.0
    assert answer.options[0].name == "Tokens(0.3)"


def test_a_label_for_each_token_is_warned_of():
    torch.manual_seed(3)
    options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    layers = [nn.TransformerEncoderLayer(16, 2, 32, **options) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(16, 5))
    batches = [(torch.randn(4, 12, 16), torch.randint(5, (4, 12))) for _ in range(6)]

    def by_token(model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def by_sample(model, batch):
        return F.cross_entropy(model[-1](model[:-1](batch[0])[:, 0]), batch[1][:, 0])

    def by_first_token(model, batch):
        return F.cross_entropy(model(batch[0])[:, 0], batch[1][:, 0])

    answer = sp.advise(model, by_token, batches, minutes=0.2)
    assert any("each token has a label of its own" in text for text in answer.warnings)
    for loss in (by_sample, by_first_token):
        seen = rows_seen(model, loss, batches)
        assert not seen.labelled
    assert rows_seen(model[:1], by_token, batches) == (1.0, True, 1.0)  # a single block too
    assert rows_seen(model, by_token, batches).per_label == 1
    assert rows_seen(model, by_sample, batches).per_label == 12  # what is behind attention


def test_a_head_at_each_token_below_their_mean_has_one_label_a_sample():
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(16, 5))
    batches = [(torch.randn(4, 12, 16), torch.randint(5, (4,)))]
    seen = rows_seen(model, lambda m, b: F.cross_entropy(m(b[0]).mean(1), b[1]), batches)
    assert (seen.labelled, seen.per_label) == (False, 12)


def test_samples_that_are_compared_with_each_other_are_not_cut_in_halves():
    torch.manual_seed(3)
    batches = [torch.randn(16, 8) for _ in range(6)]

    def contrasted(m, x):
        y = F.normalize(m(x), dim=-1)
        return F.cross_entropy(y @ y.T, torch.arange(len(x)))

    answer = sp.advise(mlp(), contrasted, batches, minutes=0.1)
    assert (answer.control.change, "another loss" in answer.control.note) == (None, True)
    answer = sp.advise(mlp(), lambda m, x: m(x).square().mean(), batches, minutes=0.1)
    assert answer.control.change is not None


def test_a_loss_that_differentiates_twice_is_left_exact():
    batches = [torch.randn(64, 8) for _ in range(4)]

    def penalty(m, x):
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        return g.square().mean()

    with pytest.raises(ValueError, match=r"does not run: .*cannot be differentiated again"):
        sp.advise(mlp(), penalty, batches, minutes=0.1)


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (0.0, "zero on these batches"),
        (math.nan, "4 of 4 batches have a gradient that is not finite, the first is batch 1"),
    ],
)
def test_without_a_gradient_there_is_nothing_to_advise(factor, message):
    def loss(m, batch):
        return factor * loss_fn(m, batch)

    with pytest.raises(ValueError, match=message):
        sp.advise(mlp(), loss, make_batches(4), minutes=0.1)


def test_an_optimizer_without_a_state_is_warned_of():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    answer = sp.advise(model, loss_fn, make_batches(3), optimizer=optimizer, minutes=0.3)
    assert any("not made a step yet" in text for text in answer.warnings)


def test_an_endless_loader_is_not_drained():
    taken = []

    def endless():
        while True:
            taken.append(make_batches(1)[0])
            yield taken[-1]

    assert sp.advise(mlp(), loss_fn, endless(), minutes=0.3).batches == len(taken) == 32


def test_a_trial_follows_where_it_is_asked_for():
    torch.manual_seed(6)
    model, batches = mlp(), make_batches(40)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    answer = sp.advise(model, loss_fn, batches, optimizer=optimizer, minutes=0.3, trial=0.05)
    names = [way.name for way in answer.trial.ways]
    assert names == ["exact", names[1], "half of the batch"]
    assert names[1] in [option.name for option in answer.options]
    assert f"Tried: {names[1]} is" in answer.headline()
    assert [table.title for table in answer.tables()] == ["Candidates", "The trial"]
    assert answer.as_dict()["trial"]["ahead"] == answer.trial.ahead
    with pytest.raises(ValueError, match="optimizer="):
        sp.advise(model, loss_fn, batches, trial=1)
