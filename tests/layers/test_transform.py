"""sketch_ changes the class of layers and nothing else; unsketch_ takes it back."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sketchprop as sp
from law_table import SKETCHES
from sketchprop.core.cost import Size
from sketchprop.layers import SketchedLinear
from sketchprop.sketches import ForwardRows

every_sketch = pytest.mark.parametrize("variant", SKETCHES, ids=str)
everything = sp.select.everything


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def batch():
    generator = torch.Generator().manual_seed(7)
    return torch.randn(16, 6, generator=generator), torch.randn(16, 3, generator=generator)


def gradients(model, seed=None):
    if seed is not None:
        torch.manual_seed(seed)
    x, y = batch()
    x.requires_grad_()
    grads = torch.autograd.grad((model(x) - y).square().sum(), [x, *model.parameters()])
    return list(grads)


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def sketched(model):
    return {n: m.sketch for n, m in model.named_modules() if isinstance(m, SketchedLinear)}


# --- exact where it must be ---


@every_sketch
def test_budget_one_is_bitwise_exact(variant):
    expected = gradients(build())
    for budget in (1.0, 16):
        model = sp.sketch_(build(), variant(budget), everything, planner=variant.planner)
        state = torch.get_rng_state()
        assert same(gradients(model), expected)
        assert torch.equal(torch.get_rng_state(), state)


@every_sketch
def test_exact_is_bitwise_exact_and_temporary(variant):
    expected = gradients(build())
    model = sp.sketch_(build(), variant(1), everything, planner=variant.planner)
    state = torch.get_rng_state()
    with sp.exact(model):
        assert same(gradients(model), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert not same(gradients(model), expected)


def test_exact_can_be_nested_and_ends_when_its_body_raises():
    model = sp.sketch_(build(), sp.L1(1))
    expected = gradients(build())
    with pytest.raises(KeyError), sp.exact(model):
        raise KeyError
    assert not same(gradients(model), expected)
    with sp.exact(model):
        with sp.exact(model), sp.exact(model[0]):
            pass
        assert same(gradients(model), expected)
    assert not same(gradients(model), expected)


@every_sketch
def test_eval_and_no_grad_are_the_parent_and_leave_the_generator_alone(variant):
    plain, model = build(), sp.sketch_(build(), variant(0.5), everything, planner=variant.planner)
    x, _ = batch()
    sketch, state = variant(0.5), torch.get_rng_state()
    in_forward = "G" not in sketch.sees or getattr(sketch, "forward", None) is not None
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(x), plain(x))
        # A checkpoint runs so first, and its second pass, with a graph, must draw alike.
        assert torch.equal(torch.get_rng_state(), state) == (not in_forward)
    torch.set_rng_state(state)
    model.eval()
    assert torch.equal(model(x), plain(x))
    assert same(gradients(model), gradients(plain))  # eval(): exact gradients too
    assert torch.equal(torch.get_rng_state(), state)
    model.train()
    assert torch.equal(model(x), plain(x))
    assert torch.equal(torch.get_rng_state(), state) == (not in_forward)  # drawn in backward
    assert not same(gradients(model), gradients(plain))


# --- everything else stays ---


def test_only_the_class_and_one_entry_change():
    model = build()
    parameters = list(model.parameters())
    before = [set(vars(m)) for m in model]
    modules = list(model)
    assert sp.sketch_(model, sp.L1(0.5)) is model
    assert list(model) == modules
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert type(model[0]) is type(model[2]) is SketchedLinear
    assert isinstance(model[0], nn.Linear)
    assert set(vars(model[0])) - before[0] == {"sketching"}
    assert set(vars(model[4])) == before[4]
    assert "sketch=L1(0.5)" in repr(model)
    assert "in_features=6, out_features=8, bias=True" in repr(model)


def test_unsketch_restores_the_class_and_the_dict_exactly():
    model = build()
    model[0].note = "mine"
    before = [(type(m), dict(vars(m))) for m in model.modules()]
    sp.sketch_(model, sp.L1(0.5), everything)
    assert sp.unsketch_(model) is model
    after = [(type(m), dict(vars(m))) for m in model.modules()]
    assert [t for t, _ in after] == [t for t, _ in before]
    for (_, now), (_, then) in zip(after, before, strict=True):
        assert list(now) == list(then)
        assert all(now[k] is then[k] for k in then)
    assert type(model[0]) is nn.Linear
    assert repr(model) == repr(build())
    assert same(gradients(model), gradients(build()))
    sp.unsketch_(model)  # nothing left to do


def test_state_dict_keys_and_loading():
    model = sp.sketch_(build(), sp.L1(0.5), everything)
    plain = build(seed=9)
    assert list(model.state_dict()) == list(plain.state_dict())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    plain.load_state_dict(state)
    assert same(plain.parameters(), model.parameters())
    other = sp.sketch_(build(seed=9), sp.L2(0.1))
    other.load_state_dict(build().state_dict())
    assert same(other.parameters(), model.parameters())
    assert other[0].sketch == sp.L2(0.1)


@every_sketch
def test_deepcopy_copy_and_pickle(variant):
    model = sp.sketch_(build(), variant(1), everything, planner=variant.planner)
    copies = [
        copy.deepcopy(model),
        copy.copy(model),
        pickle.loads(pickle.dumps(model)),
    ]
    expected = gradients(model, seed=3)
    for other in copies:
        assert type(other[0]) is SketchedLinear
        assert other[0].sketch == variant(1)
        assert same(gradients(other, seed=3), expected)
    deep = copies[0]
    sp.unsketch_(deep)
    assert type(model[0]) is SketchedLinear
    shallow = copy.copy(model[0])
    assert shallow.weight is model[0].weight
    assert shallow.sketch == model[0].sketch


def test_a_copy_made_inside_exact_is_not_exact():
    model = sp.sketch_(build(), sp.L1(1), everything)
    with sp.exact(model):
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        assert model[0].sketching.exact
    for other in copies:
        assert not other[0].sketching.exact
        assert not same(gradients(other), gradients(build()))


def test_complex_products_stay_exact():
    x = torch.randn(5, 4, dtype=torch.complex64, requires_grad=True)
    weight = torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)
    got = torch.autograd.grad(
        sp.sketched_linear(x, weight, None, sp.L1(1)).abs().sum(), (x, weight)
    )
    wanted = torch.autograd.grad(F.linear(x, weight).abs().sum(), (x, weight))
    assert same(got, wanted)


def test_nested_tensors_stay_exact():
    layer = nn.Linear(8, 16)
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)

    def grads():
        layer.zero_grad()
        layer(x).values().sum().backward()
        return [p.grad.clone() for p in layer.parameters()]

    plain = grads()
    sp.sketch_(layer, sp.L1(0.5), everything)
    assert same(grads(), plain)


@pytest.mark.parametrize("sketch", [sp.L1(0.5), sp.Rows(0.5), ForwardRows(0.5)], ids=repr)
def test_shapes_are_inferred_on_the_meta_device(sketch):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        x = torch.randn(4, 8, requires_grad=True)
    sp.sketch_(model, sketch, everything)
    model(x).sum().backward()
    assert x.grad.shape == x.shape
    assert x.grad.is_meta
    assert model[0].weight.grad.shape == (16, 8)


def test_summary_of_a_model_with_lazy_layers():
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    assert [line.name for line in sp.summary(model).layers] == ["0"]


def test_hooks_are_kept():
    model = build()
    calls = []
    model[0].register_forward_pre_hook(lambda m, a: calls.append("pre"))
    model[0].register_forward_hook(lambda m, a, out: calls.append("forward"))
    model[0].register_full_backward_hook(lambda m, gi, go: calls.append("backward"))
    model[0].weight.register_hook(lambda g: calls.append("weight"))
    sp.sketch_(model, sp.L1(0.5))
    gradients(model)
    sp.unsketch_(model)
    gradients(model)
    assert sorted(calls) == sorted(2 * ["backward", "forward", "pre", "weight"])


def test_a_backward_hook_sees_the_sketched_input_gradient():
    model = build()
    seen = []
    model[2].register_full_backward_hook(lambda m, grad_in, grad_out: seen.append(grad_in[0]))
    sp.sketch_(model, {"2": sp.SampleMask(1)})
    gradients(model)
    assert (seen[0].abs().sum(1) > 0).sum() <= 1  # one row was kept


def test_moving_and_casting():
    model = sp.sketch_(build(), sp.L1(0.5)).double()
    assert model[0].weight.dtype == torch.float64
    assert type(model.to("meta")[0]) is SketchedLinear


# --- which layers ---


def test_a_filter_sees_each_linear_layer_once():
    seen = []
    sp.sketch_(build(), sp.L1(0.5), lambda module, name: seen.append((type(module), name)) or True)
    assert seen == [(nn.Linear, "0"), (nn.Linear, "2"), (nn.Linear, "4")]


def test_the_first_match_wins_and_none_leaves_a_layer_exact():
    model = sp.sketch_(build(), {"0": None, "[02]": sp.L2(0.5), "*": sp.L1(0.1)})
    assert sketched(model) == {"2": sp.L2(0.5), "4": sp.L1(0.1)}


def test_sketching_again_replaces_the_sketch():
    model = sp.sketch_(build(), sp.L1(0.5))
    sp.sketch_(model, sp.L2(0.25))
    assert sketched(model) == {"0": sp.L2(0.25), "2": sp.L2(0.25)}
    sp.sketch_(model, {"0": None, "4": sp.L1(1)})
    assert sketched(model) == {"2": sp.L2(0.25), "4": sp.L1(1)}
    assert type(model[0]) is nn.Linear
    assert set(vars(model[0])) == set(vars(nn.Linear(1, 1)))
    sp.unsketch_(model)
    assert not sketched(model)


# --- training, and what is shown ---


def test_summary_rows():
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 4), nn.Linear(4, 3))
    sp.sketch_(model, {"0": sp.L1(0.25), "1": sp.L1(8), "2": sp.L2(1.0)})
    report = sp.summary(model, rows=256)
    first, second, whole, exact = report.layers
    assert (first.sketch, exact.sketch) == (sp.L1(0.25), None)
    assert first.kept == second.kept == 0.25
    assert first.flops == pytest.approx(
        sp.L1(8).cost(Size(256, 32, 64)).total / (4 * 256 * 32 * 64)
    )
    assert 0.25 < first.flops < 0.3
    assert whole.kept == whole.flops == 1.0
    assert report.as_dict()["layers"][0]["name"] == "0"


def test_the_log_says_in_one_line_what_was_taken_what_was_left_and_what_is_saved(caplog):
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 10))
    with caplog.at_level("INFO", logger="sketchprop"):
        sp.sketch_(model, sp.Rows(0.25))
    (record,) = caplog.records
    said = record.getMessage()
    assert "\n" not in said
    assert "took 2 Linear by Rows(0.25); exact: 3;" in said
    share = float(said.split("linear layers: ")[1].split(" of the FLOPs")[0])
    exact, kept = 64 * 256 + 256 * 256, 256 * 10  # products of the sketched and the exact layers
    assert share == pytest.approx((0.25 * exact + kept) / (exact + kept), abs=0.02)
