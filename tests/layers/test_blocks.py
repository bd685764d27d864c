"""Blocks on kept tokens: the zoo's and torch's own."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

import sketchprop as sp
from sketchprop import Tokens
from sketchprop.cli.expressions import parse_sketch
from sketchprop.core.enumeration import expectation
from sketchprop.core.sampling import draw_uniforms
from sketchprop.layers import SketchedBlock
from sketchprop.layers.share import kept_flops
from sketchprop.meters import saved_bytes
from sketchprop.sketches import Every
from sketchprop.zoo import Block, ViT
from stack_helpers import blocks

N, LENGTH, WIDTH = 4, 10, 16


def vit(dropout: float = 0.0) -> ViT:
    torch.manual_seed(0)
    return ViT(16, 4, 3, WIDTH, depth=2, heads=4, hidden=24, dropout=dropout)


class Encoder(nn.Module):
    """Two of torch's layers and a head on the mean token."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)
        self.tokens = 1 if layer.self_attn.batch_first else 0

    def forward(self, x: Tensor, **masks: Any) -> Tensor:
        x = x if self.tokens else x.transpose(0, 1)
        logits: Tensor = self.head(self.encoder(x, **masks).mean(self.tokens))
        return logits


class Decoder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerDecoderLayer(WIDTH, 4, 24, **options)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.tokens = 1 if layer.self_attn.batch_first else 0

    def forward(self, x: Tensor, **masks: Any) -> Tensor:
        memory = torch.linspace(-1, 1, N * 3 * WIDTH).view(N, 3, WIDTH).sin()
        if not self.tokens:
            x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        y: Tensor = self.decoder(x, memory, **masks).mean(self.tokens)
        return y[:, :3]


def padding() -> Tensor:
    mask = torch.zeros(N, LENGTH, dtype=torch.bool)
    mask[1:, 7:] = True
    return mask


CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)

Make = Callable[..., nn.Module]
CASES: dict[str, tuple[Make, dict[str, Any], dict[str, Any]]] = {
    "zoo": (vit, {}, {}),
    "encoder": (Encoder, {}, {}),
    "encoder, batch first": (Encoder, {"batch_first": True}, {}),
    "encoder, norm first, gelu": (
        Encoder,
        {"batch_first": True, "norm_first": True, "activation": "gelu"},
        {},
    ),
    "encoder, padding": (Encoder, {"batch_first": True}, {"src_key_padding_mask": padding()}),
    "encoder, causal": (Encoder, {}, {"mask": CAUSAL, "is_causal": True}),
    "encoder, both masks": (
        Encoder,
        {"norm_first": True, "activation": nn.SiLU()},
        {"mask": CAUSAL, "src_key_padding_mask": padding().float().mul(-1e4)},
    ),
    "encoder, a function": (Encoder, {"batch_first": True, "activation": F.softplus}, {}),
    "decoder": (Decoder, {}, {"tgt_mask": CAUSAL, "tgt_is_causal": True}),
    "decoder, batch first": (
        Decoder,
        {"batch_first": True, "norm_first": True},
        {"tgt_key_padding_mask": padding()},
    ),
}


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (N, 3, 16, 16) if isinstance(model, ViT) else (N, LENGTH, WIDTH)
    return torch.randn(shape, generator=generator), torch.tensor([0, 1, 2, 0])


def gradients(model: nn.Module, **masks: Any) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of one seeded pass."""
    x, labels = batch(model)
    model.zero_grad()
    torch.manual_seed(5)
    output = model(x, **masks)
    F.cross_entropy(output, labels).backward()
    return output.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(data[0]), data[1])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("case", CASES)
def test_the_forward_pass_is_the_plain_models_and_budget_one_its_gradient(
    case: str, dropout: float
) -> None:
    make, options, masks = CASES[case]
    plain = make(dropout=dropout, **options)
    model = sp.sketch_(copy.deepcopy(plain), Tokens(0.3))
    assert len(blocks(model)) == 2
    output, exact = gradients(plain, **masks)
    same, sketched = gradients(model, **masks)
    # The same masks of dropout; weights of attention are rounded once more where they drop out.
    torch.testing.assert_close(same, output, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(a, b) for a, b in zip(sketched, exact, strict=True))
    for a, b in zip(gradients(sp.set_budget_(model, 1.0), **masks)[1], exact, strict=True):
        assert torch.equal(a, b)
    sp.set_budget_(model, 0.3)
    with sp.exact(model):
        for a, b in zip(gradients(model, **masks)[1], exact, strict=True):
            assert torch.equal(a, b)
    x, _ = batch(model)
    assert torch.equal(model.eval()(x, **masks), plain.eval()(x, **masks))


@pytest.mark.parametrize("case", CASES)
def test_the_mean_over_draws_is_the_exact_gradient(case: str) -> None:
    make, options, masks = CASES[case]
    model = sp.sketch_(make(dropout=0.1, **options), Tokens(0.3, queries=0.4, keys=0.7))

    def masked(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(data[0], **masks), data[1])

    assert sp.check_unbiased(model, masked, batch(model), draws=80).ok


def tiny_zoo() -> tuple[nn.Module, tuple[Any, ...]]:
    return Block(4, 2, 5), ()


def tiny_encoder(**options: Any) -> Callable[[], tuple[nn.Module, tuple[Any, ...]]]:
    def make() -> tuple[nn.Module, tuple[Any, ...]]:
        pad = torch.tensor([[False, False, False], [False, False, True]])
        layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True, **options)
        return layer, (None, pad)

    return make


@pytest.mark.parametrize(
    "make", [tiny_zoo, tiny_encoder(), tiny_encoder(norm_first=True, activation="gelu")]
)
@pytest.mark.parametrize("tokens", [Tokens(2, queries=2), Tokens(3, queries=1, keys=4)], ids=repr)
def test_the_mean_over_all_draws_is_exact_in_float64(
    make: Callable[[], tuple[nn.Module, tuple[Any, ...]]], tokens: Tokens
) -> None:
    torch.manual_seed(0)
    block, masks = make()
    block = block.double()
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, 4, dtype=torch.float64)
    inputs = [x, *block.parameters()]
    true = torch.autograd.grad((block(x, *masks) * weight).sum(), inputs)
    sp.sketch_(block, tokens)
    assert isinstance(block, SketchedBlock)

    def one(uniforms: Any) -> tuple[Tensor, ...]:
        y = block.run(block.anatomy(x, *masks), tokens, uniforms)
        return torch.autograd.grad((y * weight).sum(), inputs)

    for mean, exact in zip(expectation(one), true, strict=True):
        torch.testing.assert_close(mean, exact, rtol=1e-11, atol=1e-12)


def test_nothing_of_the_model_changes_and_unsketch_leaves_no_trace() -> None:
    plain = vit()
    model = sp.sketch_(copy.deepcopy(plain), Tokens(0.3))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert type(copy.deepcopy(model).blocks[0]) is type(model.blocks[0])
    again = pickle.loads(pickle.dumps(model))
    assert again.blocks[1].sketch == Tokens(0.3)
    whole = io.BytesIO()
    torch.save(model, whole)
    sp.unsketch_(model)
    for a, b in zip(model.modules(), plain.modules(), strict=True):
        assert type(a) is type(b)
        assert vars(a).keys() == vars(b).keys()


@pytest.mark.parametrize("save", ["activations", "input"])
def test_what_is_saved(save: str) -> None:
    model = vit()

    exact = saved_bytes(model, loss, batch(model)).total
    report = saved_bytes(sp.sketch_(model, Tokens(0.3, save=save)), loss, batch(model))
    assert report.total < (0.9 if save == "activations" else 0.5) * exact
    assert [line.layer for line in report.layers] == ["embed", "blocks.0", "blocks.1", "head"]


@pytest.mark.parametrize(("first", "tensors"), [(True, 2), (False, 3)], ids=["first", "last"])
def test_a_block_saves_its_input_and_those_of_its_norms(first: bool, tensors: int) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=first)
    model = sp.sketch_(nn.Sequential(layer, layer, nn.Flatten()), Tokens(0.3, save="input"))
    x = torch.randn(N, LENGTH, 64, requires_grad=True)
    report = saved_bytes(model, lambda model, x: model(x).square().sum(), x)
    saved = sum(line.saved for line in report.layers) / 2
    assert tensors <= saved / (4 * x.numel()) < tensors + 0.3


def test_summary_says_what_each_block_does_and_why_not_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "sketchprop"):
        model = sp.sketch_(vit(), Tokens(0.3))
    assert "2 ZooBlock by Tokens(0.3); exact: embed, head" in caplog.text
    lines = {line.name: line for line in sp.summary(model, rows=4096).layers}
    assert lines["blocks.0"].note == "rows 0.3, queries 0.4, keys 0.7 (even: not measured yet)"
    assert lines["blocks.0.mlp.0"].note == "a part of 'blocks.0': rows"
    assert lines["blocks.0.attn.out"].kept == pytest.approx(0.4, abs=0.05)
    assert lines["head"].sketch is None
    assert kept_flops(model, 4096) < 0.7
    model.blocks[0].attn.register_forward_hook(lambda *_: None)
    model.blocks[1].mlp[0].register_forward_hook(lambda *_: None)
    gradients(model)
    lines = {line.name: line for line in sp.summary(model).layers}
    assert "its attention is exact: Attention has hooks" in lines["blocks.0"].note
    assert "its feed-forward part is exact: Sequential has hooks" in lines["blocks.1"].note


def test_a_part_that_differentiates_in_its_forward_pass_trains() -> None:
    def energy(x: Tensor) -> Tensor:
        """A force field: minus the gradient of an energy."""
        (force,) = torch.autograd.grad(F.gelu(x).square().sum() / 2, x, create_graph=True)
        return force

    plain = Encoder(activation=energy, dropout=0.0, batch_first=True)
    model = sp.sketch_(copy.deepcopy(plain), Tokens(0.5))
    x = torch.randn(N, LENGTH, WIDTH)
    out = model(x)
    assert torch.equal(out, plain(x))
    out.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_frozen_block_below_all_that_trains_is_the_plain_one(monkeypatch) -> None:
    model, x = sp.sketch_(vit(), Tokens(0.3, share="even")), torch.randn(N, 3, 16, 16)
    model(x)
    ran = []
    run = SketchedBlock.run
    monkeypatch.setattr(SketchedBlock, "run", lambda *a, **k: ran.append(a[0]) or run(*a, **k))
    for part in (model.embed, model.position, model.blocks[0]):
        part.requires_grad_(False)
    model(x)
    assert ran == [model.blocks[1]]


def test_hooks_inside_a_block_run_and_gradients_stay_unbiased() -> None:
    model = sp.sketch_(vit(), Tokens(0.3))
    gradients(model)  # the first batch runs both ways
    seen: list[str] = []
    model.blocks[0].attn.qkv.register_forward_hook(lambda *_: seen.append("qkv"))
    model.blocks[1].mlp[0].register_forward_pre_hook(lambda *_: seen.append("mlp"))
    gradients(model)
    assert seen == ["qkv", "mlp"]

    assert sp.check_unbiased(model, loss, batch(model), draws=60).ok


def test_sketches_of_layers_still_take_the_layers_of_blocks_and_each_replaces_the_other() -> None:
    model = sp.sketch_(vit(), sp.L1(0.5))
    assert not blocks(model)
    assert model.blocks[0].mlp[0].sketch == sp.L1(0.5)
    sp.sketch_(model, Tokens(0.3))
    assert len(blocks(model)) == 2
    assert type(model.blocks[0].mlp[0]) is nn.Linear
    sp.sketch_(model, {"blocks.0.mlp.*": sp.L1(0.5)})
    assert [m is model.blocks[1] for m in blocks(model)] == [True]
    gradients(model)


def test_patterns_and_filters_name_blocks() -> None:
    model = sp.sketch_(vit(), {"blocks.1": Tokens(0.3), "head": sp.L1(0.5)})
    assert blocks(model) == [model.blocks[1]]
    assert model.head.sketch == sp.L1(0.5)
    model = sp.sketch_(vit(), {"*": Tokens(0.3)})
    assert len(blocks(model)) == 2
    assert model.head.sketch == sp.Rows(0.3)
    assert type(model.blocks[0].mlp[0]) is nn.Linear
    model = sp.sketch_(vit(), Tokens(0.3), lambda module, name: name == "blocks.0")
    assert blocks(model) == [model.blocks[0]]
    with pytest.raises(ValueError, match="a block; name its layers"):
        sp.sketch_(vit(), {"blocks.0": sp.L1(0.5), "blocks.1": Tokens(0.3)})
    assert parse_sketch("Tokens(0.3, keys=0.5)") == Tokens(0.3, keys=0.5)
    with pytest.raises(ValueError, match="leave out planner"):
        sp.sketch_(vit(), Tokens(0.3), planner=Every(5))


def test_a_block_that_was_sharded_before_is_refused_with_the_right_order() -> None:
    model = vit()
    model.blocks[1].__class__ = type("FSDPBlock", (FSDPModule, Block), {})
    with pytest.raises(ValueError, match=r"'blocks\.1'.*call sketch_ first, then fully_shard"):
        sp.sketch_(model, Tokens(0.3))


def test_equal_shares_of_rows_and_queries_carry_one_draw() -> None:
    """0.3 of 16 tokens are 5 in each sample and 20 of 4, 0.3 of 64 rows are 19: rounding alone."""
    drawn: list[tuple[int, ...]] = []

    def uniforms(p: Tensor, shape: tuple[int, ...]) -> Tensor:
        drawn.append(tuple(p.shape))
        return draw_uniforms(p, shape)

    for tokens in (9, 16):  # 3 and 5 of a sample: once more rows than queries, once fewer
        model = sp.sketch_(vit(), Tokens(0.3, queries=0.3, keys=1.0))
        x = torch.randn(5, tokens, WIDTH, requires_grad=True)
        block = model.blocks[0]
        drawn.clear()
        call = block.anatomy(x)
        block.run(call, block.sketching.sketch, uniforms).square().sum().backward()
        assert drawn[0] == (5 * tokens,)
        assert all(size[0] < 5 * tokens for size in drawn[1:])  # among the queries, if at all


def test_budgets_follow_the_first_unless_they_were_given() -> None:
    assert Tokens(0.3).with_budget(0.5).query_budget == pytest.approx(0.6)
    assert Tokens(0.3, queries=0.9).with_budget(0.5) == Tokens(0.5, queries=0.9)
    model = sp.sketch_(vit(), Tokens(0.3, keys=0.5))
    sp.set_budget_(model, 0.2)
    assert model.blocks[0].sketch == Tokens(0.2, keys=0.5)
    assert repr(Tokens(0.3, save="input")) == "Tokens(0.3, save='input')"
    with pytest.raises(ValueError, match="save='activations'"):
        Tokens(0.3, save="nothing")
    with pytest.raises(ValueError, match="kept fraction"):
        Tokens(0.3, queries=1.5)


def test_meters_split_noise_by_block() -> None:
    model = vit()
    data = [(torch.randn(N, 3, 16, 16), torch.tensor([0, 1, 2, 0])) for _ in range(2)]

    report = sp.measure(model, loss, data, sketch=Tokens(0.3), draws=4, rounds=0)
    assert [line.layer for line in report.variance.layers] == ["blocks.0", "blocks.1"]
    assert 0.3 < report.flops.kept < 0.8
    plan = sp.plan(model, loss, data[0], sketch=Tokens(0.3), rounds=1)
    assert [line.layer for line in plan.layers] == ["embed", "blocks.0", "blocks.1", "head"]
    tuner = sp.Tuner(sp.sketch_(model, Tokens(0.3)), loss, share=1.0, frozen=True)
    (entry,) = filter(None, map(tuner, data * 2))
    assert entry["added"] > 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_draw_once(reentrant: bool) -> None:
    model = sp.sketch_(vit(dropout=0.2), Tokens(0.3, share="even"))
    body = model.blocks

    def run(stored: bool) -> list[Tensor]:
        x = torch.linspace(-1, 1, 2 * 16 * WIDTH).view(2, 16, WIDTH).sin().requires_grad_()
        model.zero_grad()
        torch.manual_seed(0)
        y = body(x) if stored else checkpoint(body, x, use_reentrant=reentrant)
        torch.manual_seed(1)
        y.square().mean().backward()
        return [p.grad.clone() for p in body.parameters()]

    for a, b in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_and_accumulation() -> None:
    model = sp.sketch_(vit(), Tokens(0.3, share="even"))
    x, labels = batch(model)
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        F.cross_entropy(model(x), labels).backward()
    first = [p.grad.clone() for p in model.parameters()]
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        F.cross_entropy(model(x), labels).backward()
    for p, g in zip(model.parameters(), first, strict=True):
        assert p.grad is not None
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, 2 * g, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("case", ["zoo", "encoder, padding"])
def test_it_compiles_without_a_break(case: str) -> None:
    make, options, masks = CASES[case]
    model: Any = make(dropout=0.0, **options)
    del (model.blocks if case == "zoo" else model.encoder.layers)[1:]
    sp.sketch_(model, Tokens(0.3))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    output, _ = gradients(model, **masks)
    x, labels = batch(model)
    model.zero_grad()
    again = compiled(x, **masks)
    torch.testing.assert_close(again.detach(), output)
    F.cross_entropy(again, labels).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_bad_input_is_right_or_refused_as_the_plain_layer_refuses_it() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    plain = copy.deepcopy(layer)
    sp.sketch_(layer, Tokens(0.3))
    one = torch.randn(3, 1, 8)
    assert torch.equal(layer(one), plain(one))
    layer(one).sum().backward()
    empty = torch.randn(0, 5, 8, requires_grad=True)
    layer(empty).sum().backward()
    single = torch.randn(5, 8)
    assert torch.equal(layer(single), plain(single))
    assert "add an axis of samples" in layer.sketching.note
    with pytest.raises(RuntimeError, match=r"attn_mask has shape"):
        layer(torch.randn(2, 5, 8), src_mask=torch.zeros(3, 4))
    block = sp.sketch_(Block(8, 2, 16), Tokens(0.3), check=False)
    block.attn.heads = 5
    with pytest.raises(ValueError, match="do not divide"):
        block(torch.randn(2, 5, 8))


def test_exported_graphs_are_the_plain_models() -> None:
    model = sp.sketch_(vit(), Tokens(0.3))
    x, _ = batch(model)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))
