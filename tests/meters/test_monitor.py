"""Monitor: the meters while a network trains."""

import copy

import pytest
import torch

import sketchprop as sp
from measure_helpers import Branched, loss_fn, make_batches, mlp
from sketchprop.core.cost import Size
from sketchprop.meters import measure_variance


class Written(list):
    def add_scalar(self, tag, scalar_value, global_step):
        self.append((tag, scalar_value, global_step))


def train(model, batches, monitor=None):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    reports = []
    for batch in batches:
        if monitor is not None:
            reports.append(monitor(batch))
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    return reports


def test_monitoring_does_not_disturb_training():
    torch.manual_seed(13)
    watched = sp.sketch_(Branched(), sp.L1(0.5))
    alone = copy.deepcopy(watched)
    batches = make_batches(9)
    written = Written()
    reports = train(watched, batches, sp.Monitor(watched, loss_fn, every=4, writer=written))
    train(alone, batches)
    for a, b in zip(watched.state_dict().values(), alone.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert [i for i, r in enumerate(reports, 1) if r] == [4, 8]
    assert ("sketchprop/relative", reports[3]["relative"], 4) in written
    assert len(written) == 2 * len(reports[3])


def test_the_running_estimate_agrees_with_the_measurement():
    torch.manual_seed(14)
    model = sp.sketch_(mlp(), sp.L1(0.5))
    batches = make_batches(40)
    truth = measure_variance(model, loss_fn, batches, draws=10, split=False, nodes=False)
    monitor = sp.Monitor(model, loss_fn, every=2, decay=0.999)
    reports = [r for r in map(monitor, batches * 10) if r]
    assert len(reports) == 200
    last = reports[-1]
    now = torch.tensor([[r["relative_now"]] for r in reports])
    assert float(now.std()) > 0
    # 200 pairs (of 20 different ones) against 40 batches: a tenth is three standard errors.
    assert last["sigma2"] == pytest.approx(truth.sigma2.value, rel=0.15)
    assert last["added"] == pytest.approx(truth.added.value, rel=0.1)
    assert last["relative"] == pytest.approx(truth.relative.value, rel=0.2)
    shapes = [(24, 16, 8, False), (24, 16, 16, True)]
    sketched = sum(sp.L1(0.5).cost(Size(*shape)).total for shape in shapes)
    exact = sum(2 * B * n * d * (1 + below) for B, n, d, below in shapes)
    assert last["kept_flops"] == pytest.approx(sketched / exact)


def test_tensorboard_takes_the_numbers(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard")
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    model, batches = sp.sketch_(mlp(), sp.L1(0.5)), make_batches(4)
    with tensorboard.SummaryWriter(tmp_path) as writer:
        reports = train(model, batches, sp.Monitor(model, loss_fn, every=2, writer=writer))
    read = events.EventAccumulator(str(tmp_path)).Reload().Scalars("sketchprop/relative")
    assert [e.step for e in read] == [2, 4]
    assert [e.value for e in read] == pytest.approx([r["relative"] for r in reports if r])


def test_a_monitor_refuses_nonsense():
    with pytest.raises(ValueError, match="every=0"):
        sp.Monitor(mlp(), loss_fn, every=0)
    with pytest.raises(ValueError, match="decay=1"):
        sp.Monitor(mlp(), loss_fn, decay=1)
