"""Blocks of transformers' models on kept tokens, with one ``sketch_`` call."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama import modeling_llama

import sketchprop as sp
from sketchprop import Tokens
from sketchprop.core.enumeration import expectation
from sketchprop.layers import SketchedBlock
from stack_helpers import blocks

WORDS, SAMPLES, LENGTH = 40, 4, 10
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "num_labels": 3,
}
TEXT = {**SIZES, "vocab_size": WORDS, "max_position_embeddings": 32, "pad_token_id": 0}
GROUPED = {**TEXT, "num_key_value_heads": 2}
PICTURES = {**SIZES, "image_size": 16, "patch_size": 4}


def both(p: float) -> dict[str, float]:
    return {"hidden_dropout_prob": p, "attention_probs_dropout_prob": p}


def gpt2(p: float, **options: Any) -> nn.Module:
    config = hf.GPT2Config(
        n_layer=TEXT["num_hidden_layers"], n_embd=16, n_head=4, n_inner=24, vocab_size=WORDS,
        num_labels=3, pad_token_id=0, bos_token_id=1, eos_token_id=2, n_positions=32, resid_pdrop=p,
        attn_pdrop=p, embd_pdrop=p, **options,
    )  # fmt: skip
    return hf.GPT2ForSequenceClassification(config)


def dino(**options: Any) -> nn.Module:
    sizes = {k: v for k, v in PICTURES.items() if k != "intermediate_size"}
    return hf.Dinov2ForImageClassification(hf.Dinov2Config(**sizes, **options))


MODELS: dict[str, Callable[[float], nn.Module]] = {
    "BERT": lambda p: hf.BertForSequenceClassification(hf.BertConfig(**TEXT, **both(p))),
    "RoBERTa": lambda p: hf.RobertaForSequenceClassification(hf.RobertaConfig(**TEXT, **both(p))),
    "DistilBERT": lambda p: hf.DistilBertForSequenceClassification(
        hf.DistilBertConfig(
            vocab_size=WORDS, dim=16, n_layers=2, n_heads=4, hidden_dim=24, num_labels=3,
            dropout=p, attention_dropout=p, max_position_embeddings=32,
        )
    ),
    "ViT": lambda p: hf.ViTForImageClassification(hf.ViTConfig(**PICTURES, **both(p))),
    "DINOv2": lambda p: dino(mlp_ratio=2, layerscale_value=0.5, **both(p)),
    "DINOv2, gated": lambda p: dino(mlp_ratio=2, use_swiglu_ffn=True, **both(p)),
    "GPT-2": lambda p: gpt2(p, use_cache=False),
    "GPT-2 with a cache": gpt2,
    "Llama": lambda p: hf.LlamaForSequenceClassification(
        hf.LlamaConfig(**GROUPED, attention_dropout=p)
    ),
    "Llama without a cache": lambda p: hf.LlamaForSequenceClassification(
        hf.LlamaConfig(**GROUPED, attention_dropout=p, use_cache=False)
    ),
    "Qwen2": lambda p: hf.Qwen2ForSequenceClassification(
        hf.Qwen2Config(**GROUPED, attention_dropout=p)
    ),
    "Qwen3": lambda p: hf.Qwen3ForSequenceClassification(
        hf.Qwen3Config(**GROUPED, head_dim=4, attention_dropout=p)
    ),
    "Mistral": lambda p: hf.MistralForSequenceClassification(
        hf.MistralConfig(**GROUPED, attention_dropout=p)
    ),
}  # fmt: skip


def model_of(name: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name](dropout).train()


def batch_for(name: str, *, padded: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.tensor([0, 1, 2, 0])
    if name.startswith(("ViT", "DINO")):
        return {
            "pixel_values": torch.randn(SAMPLES, 3, 16, 16, generator=generator),
            "labels": labels,
        }
    ids = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator)
    batch = {"input_ids": ids, "labels": labels}
    if padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1:, 7:] = 0
        ids[1:, 7:] = 0
    return batch


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    torch.manual_seed(5)
    output = model(**batch)
    output.loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return output.logits.detach(), grads


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    value: Tensor = model(**batch).loss
    return value


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", MODELS)
def test_the_forward_pass_is_the_plain_models_and_budget_one_its_gradient(
    name: str, dropout: float
) -> None:
    plain = model_of(name, dropout)
    model = sp.sketch_(copy.deepcopy(plain), Tokens(0.3))
    batch = batch_for(name)
    assert len(blocks(model)) == 2
    output, exact = gradients(plain, batch)
    same, sketched = gradients(model, batch)
    torch.testing.assert_close(same, output, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(a, b) for a, b in zip(sketched, exact, strict=True))
    cached = name in ("GPT-2 with a cache", "Llama", "Qwen2", "Mistral")
    why = "q and k have norms" if name == "Qwen3" else "a cache wants its keys" if cached else ""
    for block in blocks(model):
        note = block.sketching.note
        assert note.startswith(f"its attention is exact: {why}") if why else note == ""
    sp.set_budget_(model, 1.0)
    for a, b in zip(gradients(model, batch)[1], exact, strict=True):
        assert torch.equal(a, b)
    sp.set_budget_(model, 0.3)
    assert torch.equal(model.eval()(**batch).logits, plain.eval()(**batch).logits)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_mean_over_draws_is_the_exact_gradient(name: str, padded: bool) -> None:
    if name.startswith(("ViT", "DINO")) and not padded:
        pytest.skip("pictures have no padding")
    model = sp.sketch_(model_of(name, 0.1), Tokens(0.3, queries=0.4, keys=0.7))
    batch = batch_for(name, padded=padded)
    assert sp.check_unbiased(model, loss, batch, draws=60).ok


@pytest.mark.parametrize("name", MODELS)
def test_nothing_of_the_model_changes_and_unsketch_leaves_no_trace(name: str) -> None:
    plain = model_of(name)
    model = sp.sketch_(copy.deepcopy(plain), Tokens(0.3))
    assert list(model.state_dict()) == list(plain.state_dict())
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert [type(b) for b in blocks(again)] == [type(b) for b in blocks(model)]
    gradients(again, batch_for(name))
    sp.unsketch_(model)
    for a, b in zip(model.modules(), plain.modules(), strict=True):
        assert type(a) is type(b)
        assert vars(a).keys() == vars(b).keys()


def bert_layer() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 5}
    config = hf.BertConfig(**sizes, **both(0.0), attn_implementation="sdpa")
    mask = torch.ones(2, 1, 3, 3, dtype=torch.bool)
    mask[1, :, :, 2] = False
    return BertLayer(config), {"attention_mask": mask}


def gpt2_block() -> tuple[nn.Module, dict[str, Any]]:
    config = hf.GPT2Config(
        n_embd=4, n_head=2, n_inner=5, resid_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa"
    )
    return GPT2Block(config, layer_idx=0), {}


@pytest.mark.parametrize("make", [bert_layer, gpt2_block])
@pytest.mark.parametrize("tokens", [Tokens(2, queries=2), Tokens(3, queries=1, keys=4)], ids=repr)
def test_the_mean_over_all_draws_is_exact_in_float64(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]], tokens: Tokens
) -> None:
    torch.manual_seed(0)
    block, options = make()
    block = block.double().train()
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, 4, dtype=torch.float64)
    inputs = [x, *block.parameters()]
    true = torch.autograd.grad((block(x, **options) * weight).sum(), inputs)
    sp.sketch_(block, tokens)
    assert isinstance(block, SketchedBlock)

    def one(uniforms: Any) -> tuple[Tensor, ...]:
        y = block.run(block.anatomy(x, **options), tokens, uniforms)
        return torch.autograd.grad((y * weight).sum(), inputs)

    for mean, exact in zip(expectation(one), true, strict=True):
        # NewGELUActivation and torch's kernel round tanh in different ways.
        torch.testing.assert_close(mean, exact, rtol=1e-9, atol=1e-10)


def test_what_is_asked_for_beyond_kept_tokens_is_exact_and_said() -> None:
    model = sp.sketch_(model_of("BERT"), Tokens(0.3))
    model.set_attn_implementation("eager")
    batch = batch_for("BERT")
    assert len(model(**batch, output_attentions=True).attentions) == 2
    assert "output_attentions=True" in blocks(model)[0].sketching.note
    assert "output_attentions=True" in str(sp.summary(model))
    gpt = sp.sketch_(model_of("GPT-2 with a cache"), Tokens(0.3))
    first = gpt(**batch_for("GPT-2", padded=False))
    assert first.past_key_values.get_seq_length() == LENGTH
    gpt(torch.ones(SAMPLES, 1, dtype=torch.long), past_key_values=first.past_key_values)
    assert "a cache that holds keys" in blocks(gpt)[0].sketching.note
    torch.manual_seed(0)
    dropping = sp.sketch_(dino(drop_path_rate=0.5).train(), Tokens(0.3))
    gradients(dropping, batch_for("DINOv2"))
    assert "drop_path drops whole samples" in blocks(dropping)[0].sketching.note


def pruned(model: Any) -> Any:
    """Half of the heads are gone from each block, with the keys that they share."""
    for name, part in model.named_modules():
        if name.endswith(("query", "key", "value", "q_proj", "k_proj", "v_proj")):
            half = part.out_features = part.out_features // 2
            part.weight = nn.Parameter(part.weight[:half].detach())
            part.bias = None if part.bias is None else nn.Parameter(part.bias[:half].detach())
        elif name.endswith(("o_proj", "attention.output.dense")):
            half = part.in_features = part.in_features // 2
            part.weight = nn.Parameter(part.weight[:, :half].detach())
    return model


def hooked(model: Any) -> Any:
    for name, part in model.named_modules():
        if name.endswith("drop_path"):
            part.register_forward_hook(lambda module, args, out: out / 2)
    return model


@pytest.mark.parametrize(
    ("name", "change", "options"),
    [
        ("Llama without a cache", pruned, {}),
        ("ViT", pruned, {}),
        ("BERT", pruned, {}),
        ("DINOv2", hooked, {}),
        ("Llama without a cache", lambda model: model, {"is_causal": False}),
    ],
)
def test_what_is_changed_after_the_first_batch_is_asked_for_again(
    name: str, change: Any, options: dict[str, Any]
) -> None:
    plain = model_of(name)
    model = sp.sketch_(copy.deepcopy(plain), Tokens(0.99, keys=1.0, share="even"))
    batch = batch_for(name, padded=False)
    gradients(model, batch)
    torch.testing.assert_close(
        gradients(change(model), {**batch, **options})[0],
        gradients(change(plain), {**batch, **options})[0],
    )


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("Llama without a cache", ["q_proj", "v_proj", "o_proj", "gate_proj"]),
        ("Llama without a cache", ["k_proj", "down_proj"]),
        ("GPT-2", ["attn.c_proj", "c_fc"]),
        ("DistilBERT", ["q_lin", "lin1"]),
        ("ViT", ["q_proj", "fc1"]),
    ],
)
def test_adapters_are_steps_of_a_block(name: str, targets: list[str], dropout: float) -> None:
    torch.manual_seed(3)
    config = LoraConfig(
        r=2, target_modules=targets, init_lora_weights=False, fan_in_fan_out=name == "GPT-2",
        lora_dropout=dropout,
    )  # fmt: skip
    plain = get_peft_model(model_of(name), config)
    model = sp.sketch_(copy.deepcopy(plain), Tokens(0.3))
    batch = batch_for(name)
    if dropout == 0:
        torch.testing.assert_close(gradients(model, batch)[0], gradients(plain, batch)[0])
    gradients(model, batch)
    assert blocks(model)[0].sketching.note == ""
    assert sp.check_unbiased(model, loss, batch, draws=60).ok


@pytest.mark.parametrize("before", [True, False])
def test_peft_adapters_in_bert(before: bool) -> None:
    torch.manual_seed(3)
    config = LoraConfig(
        r=2, target_modules=["query", "value", "output.dense"], init_lora_weights=False
    )

    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(4)
        return get_peft_model(model, copy.deepcopy(config))

    batch = batch_for("BERT")
    plain = adapted(model_of("BERT"))
    if before:
        model = adapted(sp.sketch_(model_of("BERT"), Tokens(0.3)))
    else:
        model = sp.sketch_(adapted(model_of("BERT")), Tokens(0.3))
    assert len(blocks(model)) == 2
    output, exact = gradients(plain, batch)
    same, sketched = gradients(model, batch)
    torch.testing.assert_close(same, output, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(a, b) for a, b in zip(sketched, exact, strict=True))
    assert sp.check_unbiased(model, loss, batch, draws=60).ok
    sp.set_budget_(model, 1.0)
    for a, b in zip(gradients(model, batch)[1], exact, strict=True):
        assert torch.equal(a, b)


TARGETS = {
    "BERT": ["query", "value", "output.dense"],
    "Llama without a cache": ["q_proj", "v_proj", "down_proj"],
    "ViT": ["q_proj", "v_proj", "fc2"],
}
ADAPTERS: dict[str, Callable[[list[str]], peft.PeftConfig]] = {
    "LoRA": lambda on: LoraConfig(r=2, target_modules=on, init_lora_weights=False),
    "DoRA": lambda on: LoraConfig(
        r=2, target_modules=on, init_lora_weights=False, use_dora=True
    ),
    "IA3": lambda on: peft.IA3Config(
        target_modules=on, feedforward_modules=on[2:], init_ia3_weights=False
    ),
    "AdaLoRA": lambda on: peft.AdaLoraConfig(
        init_r=2, target_r=1, target_modules=on, init_lora_weights=False, total_step=10, tinit=2,
        tfinal=2,
    ),
    "VeRA": lambda on: peft.VeraConfig(r=2, target_modules=on[:2], init_weights=False),
    "OFT": lambda on: peft.OFTConfig(
        r=0, oft_block_size=4, target_modules=on, init_weights=False
    ),
    "prefix": lambda on: peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3),
    "adaption prompt": lambda on: peft.AdaptionPromptConfig(
        adapter_len=2, adapter_layers=1, task_type="SEQ_CLS"
    ),
}  # fmt: skip


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", TARGETS)
def test_every_adapter_is_taken_or_exact(name: str, adapter: str) -> None:
    if (adapter, name) == ("prefix", "ViT") or (adapter == "adaption prompt" and name[0] != "L"):
        pytest.skip("PEFT has none for this model")
    torch.manual_seed(3)
    plain = get_peft_model(model_of(name), ADAPTERS[adapter](TARGETS[name]))
    model = sp.sketch_(copy.deepcopy(plain), Tokens(0.5))
    batch = batch_for(name)
    output, exact = gradients(plain, batch)
    same, sketched = gradients(model, batch)
    torch.testing.assert_close(same, output, rtol=1e-5, atol=1e-6)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
    assert adapter != "LoRA" or not all(map(torch.equal, sketched, exact))
    sp.set_budget_(model, 1.0)
    for a, b in zip(gradients(model, batch)[1], exact, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", MODELS)
def test_what_was_once_asked_for_does_not_change_later_steps(name: str) -> None:
    """transformers leaves the hooks by which it collects outputs on a model for good."""
    model = sp.sketch_(model_of(name), Tokens(0.3))
    model.set_attn_implementation("eager")
    asked, batch = copy.deepcopy(model), batch_for(name)
    for _ in range(2):  # the first batch runs blocks more than once
        outputs = asked(**batch, output_hidden_states=True, output_attentions=True)
        assert (len(outputs.hidden_states), len(outputs.attentions)) == (3, 2)
        assert "output_attentions=True" in blocks(asked)[0].sketching.note
    for options in ({}, {"output_hidden_states": True}):
        logits, expected = gradients(model, batch)
        same, sketched = gradients(asked, {**batch, **options})
        assert torch.equal(same, logits)
        assert blocks(asked)[0].sketching.note == blocks(model)[0].sketching.note
        for a, b in zip(sketched, expected, strict=True):
            assert torch.equal(a, b)


def test_of_an_older_version_no_block_is_known_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hf, "__version__", "5.17.9")
    with pytest.warns(UserWarning, match=r"transformers 5\.17\.9 .* 5\.18 or newer") as said:
        model = sp.sketch_(model_of("BERT"), Tokens(0.3))
    assert len(said) == 1
    assert not blocks(model)
    assert isinstance(model.bert.encoder.layer[0].attention.self.query.sketch, sp.Rows)
    gradients(model, batch_for("BERT"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sp.sketch_(model_of("ViT"), Tokens(0.3))


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_by_autocast_and_in_the_weights(name: str) -> None:
    model = sp.sketch_(model_of(name, 0.1), Tokens(0.3, keys=0.7))
    batch = batch_for(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(model, batch)
    value.backward()
    assert not any(block.sketching.proof for block in blocks(model))
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
    plain = model_of(name, 0.1).bfloat16()
    model = sp.sketch_(copy.deepcopy(plain), Tokens(0.3, keys=0.7))
    output, _ = gradients(plain, half)
    same, grads = gradients(model, half)
    torch.testing.assert_close(same, output, rtol=5e-2, atol=5e-2)
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("name", MODELS)
def test_a_block_can_train_above_frozen_ones(name: str) -> None:
    model = model_of(name)
    model.base_model.requires_grad_(False)
    sp.sketch_(model, Tokens(0.3))
    blocks(model)[1].requires_grad_(True)
    gradients(model, batch_for(name))
    assert all(p.grad is None for p in blocks(model)[0].parameters())
    assert all(p.grad is not None for p in blocks(model)[1].parameters())


def test_gradient_checkpointing_of_transformers() -> None:
    model = sp.sketch_(model_of("BERT", 0.1), Tokens(0.3))
    batch = batch_for("BERT")
    model.gradient_checkpointing_enable()
    assert sp.check_unbiased(model, loss, batch, draws=60).ok


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama"])
def test_it_compiles_without_a_break(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes in (TEXT, GROUPED):
        monkeypatch.setitem(sizes, "num_hidden_layers", 1)
    model = sp.sketch_(model_of(name), Tokens(0.3))
    model.config.use_cache = False
    batch = batch_for(name)
    labels = batch.pop("labels")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    if name != "BERT":  # pooling by the last token reads the ids
        compiled, batch = (
            torch.compile(model.base_model, fullgraph=True, backend="aot_eager"),
            {"input_ids": batch["input_ids"]},
        )
        compiled(**batch).last_hidden_state.square().mean().backward()
    else:
        nn.functional.cross_entropy(compiled(**batch).logits, labels).backward()
    grads = [p.grad for p in model.base_model.parameters() if p.grad is not None]
    assert len(grads) >= 10
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("what", ["rotary", "sdpa"])
def test_a_function_replaced_in_its_file_or_registry_leaves_blocks_exact(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of small weights hardly anything is to be seen in the result; all of it in the gradient."""
    model = sp.sketch_(model_of("Llama without a cache").base_model, Tokens(0.3))
    ids = batch_for("Llama")["input_ids"]
    model(ids)  # the first batch has proved the blocks
    if what == "rotary":
        rotate = modeling_llama.apply_rotary_pos_emb

        def half(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            q, k = rotate(*args, **kwargs)
            return 0.5 * q, k

        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", half)
    else:
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        scaled = lambda *a, **k: attend(*a, **{**k, "scaling": 0.1})  # noqa: E731
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", scaled)
    q = blocks(model)[0].self_attn.q_proj.weight
    (drawn,) = torch.autograd.grad(model(ids).last_hidden_state.sum(), q)
    with sp.exact(model):
        (truth,) = torch.autograd.grad(model(ids).last_hidden_state.sum(), q)
    torch.testing.assert_close(drawn, truth)
