"""PEFT's LoRA: sketched before or after, frozen base layers save no input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import sketchprop as sp
from sketchprop.layers import SketchedLinear
from stack_helpers import Z_LIMIT, batch, equal, gradients, largest_z, net


def lora(model: nn.Module) -> nn.Module:
    """Adapters on both hidden layers, with a B that is not zero: every gradient is."""
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["0", "3"], init_lora_weights=False, lora_dropout=0.1)
    return get_peft_model(model, config)


def before(sketch: sp.Sketch) -> nn.Module:
    return lora(sp.sketch_(net(), sketch))


def after(sketch: sp.Sketch) -> nn.Module:
    return sp.sketch_(lora(net()), sketch, filter_fn=lambda module, name: True)


BOTH = pytest.mark.parametrize("build", [before, after])


def loss(model: nn.Module) -> Callable[[], Tensor]:
    x, y = batch()
    return lambda: F.cross_entropy(model(x), y)


def trainable(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def test_adapters_and_unused_originals_are_left_alone() -> None:
    """LoRA's factors have nothing to save; PEFT never calls what it trains a copy of."""
    config = LoraConfig(r=4, target_modules=["0", "3"], modules_to_save=["5"])
    model = sp.sketch_(get_peft_model(net(), config), sp.Rows(0.5))
    taken = [name for name, m in model.named_modules() if isinstance(m, SketchedLinear)]
    assert taken == [f"base_model.model.{i}.base_layer" for i in "03"]
    layers = sp.select.sketchable_layers(model)
    picks = sp.select.usual(layers)
    spare = [name for name, layer in layers.items() if not picks(layer, name)]
    assert sum("lora_" in name for name in spare) == 4
    assert spare[-2:] == [
        f"base_model.model.5.{n}" for n in ("original_module", "modules_to_save.default")
    ]


@BOTH
def test_the_mean_is_the_exact_gradient(build) -> None:
    """z ≤ 5 over 300 draws; dropout off."""
    plain, model = lora(net()), build(sp.Diagonal(0.3))
    for module in (*plain.modules(), *model.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    truth = gradients(trainable(plain), loss(plain), 0)
    assert len(truth) == 4
    assert not equal(truth, gradients(trainable(model), loss(model), 0))

    def draw(k: int) -> list[Tensor]:
        return gradients(trainable(model), loss(model), k)

    assert largest_z(truth, draw, 300) <= Z_LIMIT


@BOTH
def test_a_zero_b_gets_a_gradient(build) -> None:
    """LoRA starts with B = 0: a sketch that looks at W must not stop there."""
    model = build(sp.Diagonal(0.3))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.zeros_(p)
    gradients(trainable(model), loss(model), 0)
    grads = {name: p.grad for name, p in model.named_parameters() if "lora_B" in name}
    assert len(grads) == 2
    assert all(float(g.norm()) > 0 for g in grads.values())


@BOTH
def test_a_frozen_base_layer_saves_no_input(build) -> None:
    model = build(sp.L1(0.3))
    saved: list[Tensor] = []
    inputs: list[Tensor] = []
    base = [m for name, m in model.named_modules() if name.endswith("base_layer")]
    assert [type(m) for m in base] == [SketchedLinear] * 2

    def count(layer: nn.Module, x: Tensor) -> int:
        """How many saved tensors of a pass through ``layer`` share the input's memory."""
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            layer(x)
        return sum(t.data_ptr() == x.data_ptr() for t in saved)

    for layer in base:
        x = torch.randn(8, layer.in_features, requires_grad=True)
        inputs.append(x)
        assert count(layer, x) == 0
        assert [t.data_ptr() for t in saved] == [layer.weight.data_ptr()]  # for dX
        assert count(sp.sketch_(nn.Linear(x.shape[1], 9), sp.L1(0.3), lambda *_: True), x) == 1


@BOTH
def test_merged_and_unloaded_it_is_the_plain_merge(build) -> None:
    plain, model = lora(net()).merge_and_unload(), build(sp.L1(0.3)).merge_and_unload()
    assert list(plain.state_dict()) == list(model.state_dict())
    assert equal(plain.state_dict().values(), model.state_dict().values())
    sp.unsketch_(model)
    assert [type(m) for m in plain] == [type(m) for m in model]


@BOTH
def test_adapter_keys_stay(build) -> None:
    assert list(build(sp.L1(0.3)).state_dict()) == list(lora(net()).state_dict())
