"""validate(): all that is the matter, with names; sketch_ refuses what is wrong, all at once."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

import sketchprop as sp
from sketchprop.layers import SketchedLinear
from sketchprop.sketches import ForwardRows
from sketchprop.zoo import ViT


def found(*given, **options):
    return {(f.level, f.name): str(f) for f in sp.validate(*given, **options)}


def wide(*extra):
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), *extra, nn.Linear(64, 64), nn.Linear(64, 4))


def test_a_good_model_has_no_findings_and_nothing_is_changed():
    model = wide()
    assert sp.validate(model, sp.L1(0.3)) == ()
    assert all(type(m) in (nn.Linear, nn.ReLU) for m in model)


@pytest.mark.parametrize(
    "sketch",
    [sp.Rows(0.3), sp.SampleMask(0.3), sp.Split(input=sp.Rows(0.3), weight=None)],
    ids=repr,
)
def test_batch_norm_in_training_mode_is_harmed_by_rows(sketch):
    model = wide(nn.BatchNorm1d(64), nn.BatchNorm1d(64))
    (text,) = found(model, sketch).values()
    assert text.startswith("'2': BatchNorm1d in training mode, and 1 more")
    assert "stay exact" in text
    with pytest.warns(UserWarning, match="BatchNorm1d in training mode"):
        sp.sketch_(model, sketch)


@pytest.mark.parametrize("sketch", [sp.L1(0.3), ForwardRows(0.3), sp.Rows(1.0, by="nonzero")])
def test_batch_norm_is_not_harmed_by_what_leaves_no_rows_out(sketch):
    model = wide(nn.BatchNorm1d(64))
    assert found(model, sketch) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sp.sketch_(model, sketch)


def test_batch_norm_before_blocks_is_left_to_be_measured():
    blocks = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)]
    model = nn.Sequential(nn.BatchNorm1d(16), *blocks, nn.Linear(16, 4))
    assert found(model, sp.Tokens(0.3)) == {}
    assert ("harm", "0") in found(model, sp.Tokens(0.3), sp.select.everything)


class Wrapped(torch.Tensor):
    """A stand-in for a quantised weight: a tensor of a class of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [a.inner if isinstance(a, cls) else a for a in args]
        out = func(*plain, **(kwargs or {}))
        if func is torch.ops.aten.detach.default:
            return return_and_correct_aliasing(func, args, kwargs or {}, cls(out))
        return out


def test_layers_that_stay_exact_are_named_with_a_reason_and_a_way_out():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    model[0].forward = model[0].forward
    model[1].weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.complex64))
    model[2].weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), requires_grad=False)
    model[3].weight = nn.Parameter(Wrapped(torch.zeros(64, 64)), requires_grad=False)
    texts = found(model, sp.L1(0.3), sp.select.everything)
    assert [name for _, name in texts] == ["0", "1", "2", "3"]
    assert {level for level, _ in texts} == {"waste"}
    reasons = ["call sketch_ before", "complex", "quantised", "of the class Wrapped"]
    for text, reason in zip(texts.values(), reasons, strict=True):
        assert "stays exact" in text
        assert reason in text
    sp.sketch_(model, sp.L1(0.3), sp.select.everything)
    assert [type(m) is SketchedLinear for m in model] == [False] * 4 + [True]


def test_errors_are_refused_all_at_once_with_their_names():
    model = wide()
    model[0].forward = model[0].forward
    given = {"0": sp.L1(0.3), "hed": sp.L1(0.3), "2": sp.L1(0.3)}
    errors = [f for f in sp.validate(model, given) if f.level == "error"]
    assert [f.name for f in errors] == ["0", "hed"]
    with pytest.raises(ValueError, match="sketch_ has 2 problems") as caught:
        sp.sketch_(model, given)
    for error in errors:
        assert str(error) in str(caught.value)
    assert "replaced on the instance" in str(caught.value)
    assert "near names" in str(caught.value)
    assert type(model[2]) is nn.Linear


class Spread(nn.Parameter):
    """Looks as a DTensor does."""

    placements = ("Shard(dim=0)",)


def test_tensor_parallel_weights_are_refused_before_training():
    model = wide()
    for place in (0, 2):
        model[place].weight = Spread(model[place].weight.data)
    texts = found(model, sp.L1(0.3))
    assert list(texts) == [("error", "0"), ("error", "2")]
    with pytest.raises(ValueError, match=r"'2'.*tensor-parallel.*filter_fn=") as caught:
        sp.sketch_(model, sp.L1(0.3))
    assert "'0'" in str(caught.value)
    assert found(model, sp.L1(1.0)) == {}
    assert ("error", "0") in found(model, sp.L1(1))
    assert found(model, sp.L1(0.3), lambda m, name: not hasattr(m.weight, "placements")) == {}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 9, bias=False)
        self.head.weight = self.embedding.weight


def test_a_weight_that_an_exact_module_uses_too():
    model = Tied()
    assert found(model, sp.L1(0.3)) == {}  # the head is the last layer
    (text,) = found(model, sp.L1(0.3), sp.select.everything).values()
    assert "'head'" in text
    assert "shares its weight with 'embedding'" in text
    assert "{'head': None}" in text


def test_a_single_block_is_told_of_labels_by_token():
    one, two = (ViT(dim=16, depth=depth, heads=2, hidden=32) for depth in (1, 2))
    (text,) = found(one, sp.Tokens(0.3)).values()
    assert "'blocks.0'" in text
    assert "label" in text
    assert found(two, sp.Tokens(0.3)) == {}


def test_layers_in_eval_mode_and_lazy_ones():
    model = wide(nn.LazyLinear(64))
    model[0].eval()
    texts = found(model, sp.L1(0.3))
    assert "eval mode" in texts["waste", "0"]
    assert "run one batch" in texts["waste", "2"]
    model.eval()
    assert ("waste", "0") not in found(model, sp.L1(0.3))


def test_tiny_layers_are_told_by_the_rows_of_a_batch():
    model = nn.Sequential(nn.Linear(784, 64), nn.Linear(64, 1024), nn.Linear(1024, 4))
    assert found(model, sp.L1(0.1)) == {}
    texts = found(model, sp.L1(0.1), rows=128)
    assert list(texts) == [("waste", "0")]
    assert "tiny" in texts["waste", "0"]
    assert found(model, sp.L1(0.1), rows=1024) == {}


def test_the_findings_are_true_rows_before_batch_norm_add_far_more_noise():
    """What the warning says: V/σ² with BatchNorm in training mode over that in eval mode."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 64), torch.randint(4, (64,))

    def noise(training):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
        model[1].train(training)
        sp.sketch_(model, sp.Rows(0.3, unit="sample"), sp.select.everything)

        def gradient():
            loss = F.cross_entropy(model(x), y)
            return torch.autograd.grad(loss, model[0].weight)[0]

        with sp.exact(model):
            exact = gradient()
        drawn = [(gradient() - exact).square().sum() for _ in range(20)]
        return float(torch.stack(drawn).mean() / exact.square().sum())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert noise(True) > noise(False)


def test_kept_tokens_without_a_block_that_they_know_are_told():
    (text,) = found(wide(), sp.Tokens(0.3)).values()
    assert text.startswith("Tokens(0.3) finds no transformer block that it knows: single layers")
    assert "advise" in text
    model = sp.sketch_(wide(), sp.Tokens(0.3))
    assert (model[0].sketch, type(model[-1])) == (sp.Rows(0.3), nn.Linear)


def test_parts_of_a_block_that_stay_exact_are_named():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    model = nn.Sequential(layer, nn.TransformerEncoderLayer(8, 2, 16))
    assert not sp.validate(model, sp.Tokens(0.5))
    layer.linear1.register_forward_hook(lambda *_: None)
    layer.norm2 = type("Norm", (nn.LayerNorm,), {})(8)
    found = sp.validate(model, sp.Tokens(0.5))
    assert [(f.level, f.name) for f in found] == [("waste", "0.linear1"), ("waste", "0.norm2")]
