"""nn.MultiheadAttention and transformers' Conv1D, and the stacks of experts."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import sketchprop as sp
from sketchprop.core.enumeration import expectation
from sketchprop.layers import attention as attention_module

E, H, N, L, S = 8, 2, 3, 4, 5


def layer(**options):
    """With biases that are not zero: fresh ones are."""
    module = nn.MultiheadAttention(E, H, **options).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def sketched(module, sketch):
    return sp.sketch_(copy.deepcopy(module), sketch)


def inputs(kind, *, batch_first=False, kdim=E, vdim=E, batched=True):
    def tensor(length, size):
        shape = (N, length) if batch_first else (length, N)
        shape = shape if batched else (length,)
        return torch.randn(*shape, size, dtype=torch.float64, requires_grad=True)

    query = tensor(L, E)
    if kind == "self":
        return query, query, query
    key = tensor(S, kdim)
    return (query, key, key) if kind == "encoder" else (query, key, tensor(S, vdim))


MODES = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "no bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True, "batch_first": True},
    "both extras": {"add_bias_kv": True, "add_zero_attn": True},
    "kdim and vdim": {"kdim": 6, "vdim": 5, "batch_first": True},
    "kdim, no bias": {"kdim": 6, "bias": False},
    "dropout": {"dropout": 0.4, "batch_first": True},
}
KINDS = ("self", "encoder", "separate")
CASES = [
    (mode, kind)
    for mode, kind in itertools.product(MODES, KINDS)
    if "kdim" not in MODES[mode] or kind == "separate"
]
every_case = pytest.mark.parametrize(("mode", "kind"), CASES)


def setting(mode, kind, **more):
    options = MODES[mode]
    sizes = {k: options[k] for k in ("kdim", "vdim") if k in options}
    if "kdim" in sizes:
        sizes.setdefault("vdim", E)
    module = layer(**options)
    return module, inputs(kind, batch_first=module.batch_first, **sizes, **more)


def masks(source):
    """Attention masks and padding masks as users give them."""
    causal = torch.ones(L, source, dtype=torch.bool).triu(1)
    added = torch.randn(N * H, L, source, dtype=torch.float64)
    padding = torch.zeros(N, source, dtype=torch.bool)
    padding[1, -1] = True
    return {
        "none": {},
        "causal": {"attn_mask": causal},
        "causal hint": {"attn_mask": causal, "is_causal": True},
        "per head": {"attn_mask": added},
        "padding": {"key_padding_mask": padding},
        "all": {"attn_mask": causal, "key_padding_mask": padding, "is_causal": True},
    }


def same(got, wanted, tolerance=1e-12):
    assert (got is None) == (wanted is None)
    if got is not None:
        assert got.shape == wanted.shape
        assert float((got - wanted).detach().abs().max()) <= tolerance


@every_case
@pytest.mark.parametrize("weights", ["none", "mean", "per head"])
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_forward_is_the_parents(mode, kind, weights):
    module, given = setting(mode, kind)
    mine = sketched(module, sp.L1(0.3))
    asked = {"need_weights": weights != "none", "average_attn_weights": weights == "mean"}
    for mask in masks(L if kind == "self" else S).values():
        torch.manual_seed(1)
        wanted = module(*given, **mask, **asked)
        torch.manual_seed(1)
        got = mine(*given, **mask, **asked)
        same(got[0], wanted[0])
        same(got[1], wanted[1])
        assert got[0].stride() == wanted[0].stride()
        assert got[0].grad_fn is not None


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_unbatched_input(batch_first, kind):
    module = layer(batch_first=batch_first)
    given = inputs(kind, batched=False)
    mine = sketched(module, sp.L1(0.3))
    for need_weights in (False, True):
        wanted, got = (m(*given, need_weights=need_weights) for m in (module, mine))
        same(got[0], wanted[0])
        same(got[1], wanted[1])


def gradients(module, given, seed=0, **asked):
    torch.manual_seed(seed)
    out, weights = module(*given, **asked)
    # Uneven weights, so that no gradient vanishes by symmetry (a softmax sums to one).
    loss = (out * torch.arange(out.numel()).view(out.shape).sin()).sum()
    if weights is not None:
        loss = loss + (weights * torch.arange(weights.numel()).view(weights.shape).cos()).sum()
    unique = list({id(x): x for x in given}.values())
    return torch.autograd.grad(loss, [*unique, *module.parameters()])


@every_case
def test_keeping_everything_is_the_parent_bitwise(mode, kind):
    module, given = setting(mode, kind)
    for other in (sketched(module, sp.L1(1.0)), sketched(module, sp.L1(3 * E))):
        assert all(map(torch.equal, gradients(other, given), gradients(module, given)))
    mine = sketched(module, sp.L1(0.3))
    with sp.exact(mine):
        assert all(map(torch.equal, gradients(mine, given), gradients(module, given)))


@every_case
@pytest.mark.parametrize("need_weights", [False, True])
def test_the_gradient_is_that_of_gated_projections(mode, kind, need_weights, monkeypatch):
    """The reference: the same forward, with exact products behind a gate with the same draws."""
    module, given = setting(mode, kind)
    sketch = sp.Diagonal(0.4, exact_bias=False)
    mine = sketched(module, sketch)
    got = gradients(mine, given, need_weights=need_weights)

    def gated(x, weight, bias, sketch, **options):
        return sp.gate(nn.functional.linear(x, weight, bias), sketch, weight=weight)

    monkeypatch.setattr(attention_module, "sketched_linear", gated)
    wanted = gradients(mine, given, need_weights=need_weights)
    for a, b in zip(got, wanted, strict=True):
        same(a, b, 1e-9)


@pytest.mark.parametrize(
    ("kind", "sketch"),
    [
        *(("self", s) for s in (sp.L1(0.3), sp.Diagonal(0.4), sp.GradientSVD(0.5))),
        ("encoder", sp.Diagonal(0.4)),
        ("separate", sp.SampleMask(0.5)),  # with columns the draws of three inputs are too many
    ],
    ids=str,
)
def test_mean_of_every_gradient_is_exact(kind, sketch, monkeypatch):
    """Over every draw of the output projection, and every draw of the inputs' that it leads to."""
    module = layer(batch_first=True)
    given = inputs(kind, batch_first=True)
    mine = sketched(module, sketch)
    wanted = gradients(module, given, need_weights=False)
    original = sp.sketched_linear

    def run(uniforms):
        def chosen(*arguments, **options):
            return original(*arguments, **options, uniforms=uniforms)

        monkeypatch.setattr(attention_module, "sketched_linear", chosen)
        return gradients(mine, given, need_weights=False)

    for total, w in zip(expectation(run), wanted, strict=True):
        same(total, w, 1e-9)


def test_wrong_arguments_are_errors():
    mine = sketched(layer(), sp.L1(0.3))
    given = inputs("encoder")
    with pytest.raises(RuntimeError, match="attn_mask has shape"):
        mine(*given, attn_mask=torch.zeros(1, S, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="is_causal"):
        mine(*given, is_causal=True)
    with pytest.raises(TypeError, match="bool"):
        mine(*given, attn_mask=torch.zeros(L, S, dtype=torch.int64))
    with pytest.raises(AssertionError):
        mine(given[0], given[1], given[1][:-1])


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_torch_transformer_layers(kind, batch_first, norm_first):
    """Training: the same outputs with the same seed. Eval, also on the fast path: bitwise."""
    options = {"batch_first": batch_first, "norm_first": norm_first}
    layer = getattr(nn, f"Transformer{kind}Layer")(E, H, 12, 0.1, **options)
    model = getattr(nn, f"Transformer{kind}")(layer, 2)
    mine = sp.sketch_(copy.deepcopy(model), sp.L1(0.4))
    taken = [layer.name for layer in sp.summary(mine).layers if layer.sketch is not None]
    attentions = 2 if kind == "Encoder" else 4
    assert len(taken) == attentions + 3  # linear1 and linear2 twice, but the last
    x = torch.randn(N, L, E)
    given = (x,) if kind == "Encoder" else (x, torch.randn(N, L, E))
    torch.manual_seed(1)
    wanted = model(*given)
    torch.manual_seed(1)
    got = mine(*given)
    assert torch.allclose(got, wanted, atol=1e-6)
    got.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mine.parameters())
    model.eval(), mine.eval()
    state = torch.get_rng_state()
    assert torch.equal(mine(*given), model(*given))
    with torch.no_grad():
        assert torch.equal(mine(*given), model(*given))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("sketch", [sp.Diagonal(0.4), sp.SampleMask(0.4), sp.L1(1.0)], ids=str)
def test_conv1d_of_transformers(sketch):
    """A linear layer with its weight turned."""
    module = Conv1D(7, 5).double()
    nn.init.normal_(module.bias)
    mine = sp.sketch_(copy.deepcopy(module), sketch, sp.select.everything)
    x = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    G = torch.randn(2, 4, 7, dtype=torch.float64)
    assert torch.equal(mine(x), module(x))
    torch.manual_seed(3)
    got = torch.autograd.grad(mine(x), [x, mine.weight], G)
    torch.manual_seed(3)
    reference = sp.sketched_linear(x, module.weight.mT, module.bias, sketch)
    for a, b in zip(got, torch.autograd.grad(reference, [x, module.weight], G), strict=True):
        same(a, b)
    assert torch.equal(mine.eval()(x), module(x))
    assert f"nf=7, nx=5, sketch={sketch!r}" in repr(mine)
    assert type(pickle.loads(pickle.dumps(mine))) is type(mine)
    assert type(sp.unsketch_(mine)) is type(module)
