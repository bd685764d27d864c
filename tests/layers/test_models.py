"""Models as people train them: one call of sketch_, nothing else."""

import copy
import os

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import sketchprop as sp
from sketchprop.layers import SketchedModule

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

WIDTH, TOKENS, BATCH, VOCABULARY = 32, 12, 4, 50


def language(model):
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
    return model, lambda m: m(input_ids=tokens, labels=tokens).loss


SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
}
TEXT = {**SIZES, "vocab_size": VOCABULARY}


def bert():
    config = transformers.BertConfig(**TEXT, max_position_embeddings=TOKENS)
    return language(transformers.BertForMaskedLM(config))


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH, n_layer=2, n_head=4
    )
    return language(transformers.GPT2LMHeadModel(config))


def llama():
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=2)
    return language(transformers.LlamaForCausalLM(config))


def mixtral():
    config = transformers.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=4)
    return language(transformers.MixtralForCausalLM(config))


def vit():
    config = transformers.ViTConfig(**SIZES, image_size=16, patch_size=4, num_labels=5)
    images = torch.randn(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(BATCH)
    model = transformers.ViTForImageClassification(config)
    return model, lambda m: m(pixel_values=images, labels=labels).loss


class Classifier(nn.Module):
    """torch's own encoder behind a linear embedding."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
        self.embed = nn.Linear(10, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x)).mean(1))


class Residual(nn.Module):
    """A bottleneck as in residual networks: 1 × 1, strided 3 × 3, 1 × 1, and a shortcut."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.narrow = nn.Sequential(nn.Conv2d(WIDTH, 16, 1, bias=False), nn.BatchNorm2d(16))
        self.conv = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.widen = nn.Conv2d(16, 2 * WIDTH, 1)
        self.shortcut = nn.Conv2d(WIDTH, 2 * WIDTH, 1, stride=2)
        self.head = nn.Linear(2 * WIDTH, 5)

    def forward(self, x):
        x = self.stem(x).relu()
        y = self.widen(self.conv(self.narrow(x).relu()).relu()) + self.shortcut(x)
        return self.head(y.relu().mean((2, 3)))


def classifier(model, *shape):
    x = torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(BATCH)
    return model, lambda m: nn.functional.cross_entropy(m(x), labels)


def encoder():
    return classifier(Classifier(), TOKENS, 10)


def residual():
    return classifier(Residual(), 3, 8, 8)


def parts(layers, *names):
    return {f"{layers}.{i}.{name}" for i in (0, 1) for name in names}


ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
MLP = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
TAKEN = {
    bert: {
        *parts("bert.encoder.layer", *(f"attention.self.{n}" for n in ("query", "key", "value"))),
        *parts("bert.encoder.layer", "attention.output.dense", "intermediate.dense"),
        *parts("bert.encoder.layer", "output.dense"),
        "cls.predictions.transform.dense",
    },
    gpt2: parts("transformer.h", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    llama: parts("model.layers", *ATTENTION, *MLP),
    mixtral: parts("model.layers", *ATTENTION),
    vit: None,
    encoder: {"embed", *parts("encoder.layers", "self_attn", "linear1", "linear2")},
    residual: {"stem", "narrow.0", "conv", "widen", "shortcut"},
}
every_model = pytest.mark.parametrize("build", TAKEN, ids=lambda build: build.__name__)


def taken(model):
    return {layer.name for layer in sp.summary(model).layers if layer.sketch is not None}


@every_model
def test_one_call_takes_every_layer_but_the_last(build):
    model, _ = build()
    keys = list(model.state_dict())
    plain = copy.deepcopy(model)
    sp.sketch_(model, sp.L1(0.25))
    wanted = TAKEN[build]
    if wanted is None:  # every linear layer and the patch embedding, whatever they are called
        layers = [n for n, m in plain.named_modules() if type(m) in (nn.Linear, nn.Conv2d)]
        wanted = set(layers[:-1])
        assert len(wanted) == 2 * 6 + 1
    assert taken(model) == wanted
    assert list(model.state_dict()) == keys
    plain.load_state_dict(model.state_dict())
    sp.unsketch_(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]


@every_model
def test_training(build):
    torch.manual_seed(1)
    model, loss_of = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # before sketch_: nothing to redo
    sp.sketch_(model, sp.L1(0.5))
    model.train()
    losses = []
    for _ in range(12):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert min(losses[-3:]) < losses[0] - 0.1
    model.eval()
    plain = sp.unsketch_(copy.deepcopy(model))
    with torch.no_grad():
        assert torch.equal(loss_of(model), loss_of(plain))


def backward_flops(model, loss_of):
    torch.manual_seed(0)
    loss = loss_of(model)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return counter.get_total_flops()


@every_model
def test_the_backward_products_are_smaller_by_what_is_dropped(build):
    """To the FLOP: each taken matrix of n rows costs r/n of what it did."""
    model, loss_of = build()
    model.train()
    exact = backward_flops(model, loss_of)
    sketch = sp.L1(0.125)
    sp.sketch_(model, sketch)
    saved = []

    def note(module, inputs, output):
        y = output[0] if isinstance(output, tuple) else output
        products = 2 + 2 * inputs[0].requires_grad  # dW, and dX where it is wanted
        channels_first = isinstance(module, nn.Conv2d)
        for n, d in module.matrices(module):
            size = y.shape[1] if channels_first else y.shape[-1]
            saved.append(products * (y.numel() // size) * (n - sketch.rank(n)) * d)

    for module in model.modules():
        if isinstance(module, SketchedModule):
            module.register_forward_hook(note)
    sketched = backward_flops(model, loss_of)
    assert sketched == exact - sum(saved)
    assert sketched < 0.7 * exact


def transposed():
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Conv1D(2 * WIDTH, 10), nn.GELU(), nn.Linear(2 * WIDTH, 5))
    return classifier(model, 10)


@pytest.mark.parametrize("build", [encoder, residual, transposed], ids=lambda build: build.__name__)
def test_compiled_without_graph_breaks(build):
    """Convolutions, attention and Conv1D: the gradients of the eager run with the same seed."""
    model, loss_of = build()
    sp.sketch_(model.train(), sp.L1(0.25))
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.MultiheadAttention):  # its draws are not ours
            setattr(module, "p" if isinstance(module, nn.Dropout) else "dropout", 0.0)

    def gradients(run):
        loss = loss_of(run)
        torch.manual_seed(0)
        return torch.autograd.grad(loss, list(model.parameters()))

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(gradients(compiled), gradients(model), strict=True):
        assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-6)


def test_experts_are_left_exact_and_named():
    model, _ = mixtral()
    sp.sketch_(model, sp.L1(0.25))
    notes = {layer.name: layer.note for layer in sp.summary(model).layers}
    assert "gate_up_proj, down_proj" in notes["model.layers.0.mlp.experts"]
    assert "MixtralTopKRouter" in notes["model.layers.0.mlp.gate"]
