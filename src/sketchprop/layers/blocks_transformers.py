"""Blocks of transformers' models on kept tokens.

``block_class`` loads it for classes of transformers only, and unpickling a model that has such
blocks does. Attention without rotations is taken apart; other attention runs by a stand-in.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.torch_version import TorchVersion

from ..tokens.rowwise import Activation, Linear, Pair, RMSNorm, RowWise, Scale
from .blocks import Anatomy, RowPart, SelfAttention, SketchedBlock, not_as_known
from .sketched import collecting, watched

OLDEST = "5.18"
"""The version of transformers since which all families are made of the parts that are known."""
_HARMLESS = frozenset(
    {"output_hidden_states", "use_cache", "num_items_in_batch", "position_ids", "cache_position",
     "return_dict", "past_key_values", "output_attentions", "output_router_logits"}
)  # fmt: skip
"""Options that do not change what a block computes; some of them only where they are false."""
_CACHED = "a cache wants its keys; give use_cache=False"
_GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "Dinov2SwiGLUFFN")
_CHAINS = {
    "GPT2MLP": ("c_fc", "act", "c_proj", "dropout"),
    "ViTMLP": ("fc1", "activation_fn", "fc2"),
    "Dinov2MLP": ("fc1", "activation_fn", "fc2"),
    "FFN": ("lin1", "activation", "lin2", "dropout"),
}
"""Feed-forward modules that call these parts in turn."""


def _gelu(name: str) -> Callable[[Any], RowWise | None]:
    """GELU, unless it is written in Python and so rounds in another way."""

    def steps(part: Any) -> RowWise | None:
        in_python = isinstance(getattr(part, "act", None), MethodType)
        return None if in_python else RowWise.of((Activation(name), ()))

    return steps


def _rms_norm(part: Any) -> RowWise:
    return RowWise.of((RMSNorm(part.variance_epsilon), (part.weight,)))


_SHARED = ("transformers.activations", "transformers.pytorch_utils")
"""Files of row-wise modules that models share."""
_STEPS: dict[str, Callable[[Any], RowWise | None]] = {
    "GELUActivation": _gelu("gelu_none"),
    "NewGELUActivation": _gelu("gelu_tanh"),
    "GELUTanh": _gelu("gelu_tanh"),
    "SiLUActivation": lambda part: RowWise.of((Activation("silu"), ())),
    "Conv1D": lambda part: RowWise.of((Linear(transposed=True), (part.weight, part.bias))),
    "Dinov2LayerScale": lambda part: RowWise.of((Scale(), (part.lambda1,))),
    "LlamaRMSNorm": _rms_norm,
    "MistralRMSNorm": _rms_norm,
    "Qwen2RMSNorm": _rms_norm,
    "Qwen3RMSNorm": _rms_norm,
}
"""Row-wise modules that are one step."""


class _TransformersBlock(SketchedBlock):
    """Reads the row-wise modules of transformers."""

    vouched = False

    def read(self, part: Callable[[Tensor], Tensor]) -> RowWise | None:
        steps = super().read(part)
        if steps is not None or not isinstance(part, nn.Module) or watched(part):
            return steps
        name = type(part).__name__
        if type(part).__module__ not in (self.plain.__module__, *_SHARED):
            return None
        if name in _CHAINS:
            chunked = getattr(part, "chunk_size_feed_forward", 0)
            return None if chunked else self._in_turn([getattr(part, n) for n in _CHAINS[name]])
        if name in _GATED:
            return self._gated(part)
        return _STEPS[name](part) if name in _STEPS else None

    def _as_known(self, module: nn.Module, name: str) -> tuple[nn.Module, type]:
        """A module, and the class that this block's own file has for it."""
        kind: type = getattr(sys.modules[self.plain.__module__], name)
        return module, kind

    def _in_turn(self, parts: list[Any]) -> RowWise | None:
        whole = RowWise.of()
        for part in parts:
            steps = self.read(part)
            if steps is None:
                return None
            whole += steps
        return whole

    def _gated(self, layer: Any) -> RowWise | None:
        gate = self._in_turn([layer.gate_proj, layer.act_fn])
        up, down = self.read(layer.up_proj), self.read(layer.down_proj)
        if gate is None or up is None or down is None:
            return None
        return RowWise.of((Pair(gate.chain, up.chain), (gate.parameters, up.parameters))) + down


def _refused(x: Any, attention: Any, options: dict[str, Any]) -> str:
    """Why a call cannot run on kept tokens; empty if it can."""
    if not isinstance(x, Tensor) or x.is_nested or x.dim() != 3:
        return "its input is not [samples, tokens, features]"
    if attention.config._attn_implementation not in ("sdpa", "eager"):
        kind = attention.config._attn_implementation
        return f"attn_implementation={kind!r}: only 'sdpa' and 'eager' have kept queries"
    asked = any(collecting(hook) for hook in attention._forward_hooks.values())
    if asked or options.get("output_attentions"):
        return "output_attentions=True: all weights of attention are asked for"
    for name, value in options.items():
        if name not in _HARMLESS and value is not None and value is not False:
            return f"{name} was given, which kept tokens do not know"
    return ""


def _mask_fits(mask: Any) -> bool:
    return mask is None or (isinstance(mask, Tensor) and mask.dim() == 4)


class _Bert(_TransformersBlock):
    """BERT and its kin: normalised last, q, k and v apart."""

    roles = (
        ("attention.self.query", "queries"),
        ("attention.self", "keys"),
        ("attention.output", "queries"),
        ("crossattention", "exact"),
    )

    def anatomy(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Anatomy | str:
        whole, attention, last = self.attention, self.attention.self, self.attention.output
        reason = _refused(hidden_states, attention, options)
        of, family = self._as_known, self.plain.__name__.removesuffix("Layer")
        parts = [of(self.intermediate, f"{family}Intermediate"), of(self.output, f"{family}Output")]
        if why := not_as_known(*parts):
            return why
        if reason or not _mask_fits(attention_mask):
            return reason or "a mask that is not [samples, heads, queries, keys]"
        if encoder_hidden_states is not None or past_key_values is not None:
            return "cross-attention or a cache of keys was given"
        if self.chunk_size_feed_forward:
            return "chunk_size_feed_forward is set: the feed-forward part runs in pieces"

        def plain(x: Tensor) -> Tensor:
            mixed = attention(x, attention_mask=attention_mask, **options)[0]
            y: Tensor = last.dropout(last.dense(mixed))
            return y

        fused = SelfAttention(
            (attention.query, attention.key, attention.value),
            (last.dense, last.dropout),
            attention.num_attention_heads,
            **_how(attention, attention_mask, hidden_states, attention.dropout.p),
        )
        mlp = (
            self.intermediate.dense,
            self.intermediate.intermediate_act_fn,
            self.output.dense,
            self.output.dropout,
        )
        norms = (last.LayerNorm, self.output.LayerNorm)
        known = (
            of(whole, f"{family}Attention"),
            of(attention, f"{family}SelfAttention"),
            of(last, f"{family}SelfOutput"),
        )
        return Anatomy(hidden_states, fused, plain, norms, mlp, False, stands_for=known)


def _how(attention: Any, mask: Tensor | None, x: Tensor, dropout: float) -> dict[str, Any]:
    causal = bool(attention.is_causal) and mask is None and x.shape[1] > 1
    return {
        "mask": mask,
        "dropout_p": dropout if attention.training else 0.0,
        "is_causal": causal,
        "scale": attention.scaling,
    }


_PARTS = {"q_proj": "queries", "k_proj": "keys", "v_proj": "keys", "o_proj": "queries"}
_DISTIL_PARTS = {"q_lin": "queries", "k_lin": "keys", "v_lin": "keys", "out_lin": "queries"}


class _DistilBert(_TransformersBlock):
    """DistilBERT: normalised last, q, k and v apart."""

    roles = tuple((f"attention.{name}", role) for name, role in _DISTIL_PARTS.items())

    def anatomy(
        self: Any, hidden_states: Tensor, attention_mask: Any = None, **options: Any
    ) -> Anatomy | str:
        attention = self.attention
        reason = _refused(hidden_states, attention, options)
        if reason or not _mask_fits(attention_mask):
            return reason or "a mask that is not [samples, heads, queries, keys]"

        def plain(x: Tensor) -> Tensor:
            y: Tensor = attention(x, attention_mask=attention_mask, **options)[0]
            return y

        fused = SelfAttention(
            (attention.q_lin, attention.k_lin, attention.v_lin),
            (attention.out_lin,),
            attention.n_heads,
            **_how(attention, attention_mask, hidden_states, attention.dropout.p),
        )
        norms = (self.sa_layer_norm, self.output_layer_norm)
        known = (self._as_known(attention, "DistilBertSelfAttention"),)
        return Anatomy(hidden_states, fused, plain, norms, (self.ffn,), False, stands_for=known)


class _Vision(_TransformersBlock):
    """Encoders of pictures: normalised first, q, k and v apart."""

    roles = tuple((f"attention.{name}", role) for name, role in _PARTS.items())

    def _parts(
        self: Any,
        x: Tensor,
        mask: Any,
        options: dict[str, Any],
        norms: tuple[RowPart, RowPart],
        after: tuple[Any, Any],
    ) -> Anatomy | str:
        """``after``: what follows attention and the feed-forward part in their branches."""
        attention = self.attention
        reason = _refused(x, attention, options)
        if reason or not _mask_fits(mask):
            return reason or "a mask that is not [samples, heads, queries, keys]"

        def plain(x: Tensor) -> Tensor:
            y: Tensor = after[0](attention(x, attention_mask=mask, **options)[0])
            return y

        fused = SelfAttention(
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (attention.o_proj, after[0]),
            attention.num_attention_heads,
            **_how(attention, mask, x, attention.attention_dropout),
        )
        family = self.plain.__name__.removesuffix("Layer")
        known = (self._as_known(attention, f"{family}Attention"),)
        return Anatomy(x, fused, plain, norms, (self.mlp, after[1]), True, stands_for=known)


class _ViT(_Vision):
    """ViT."""

    def anatomy(
        self: Any, hidden_states: Tensor, attention_mask: Any = None, **options: Any
    ) -> Anatomy | str:
        norms = (self.layernorm_before, self.layernorm_after)
        after = (self.dropout, self.dropout)
        call: Anatomy | str = self._parts(hidden_states, attention_mask, options, norms, after)
        return call


class _Dinov2(_Vision):
    """DINOv2: a layer scale behind each branch."""

    def anatomy(
        self: Any, hidden_states: Tensor, attention_mask: Any = None, **options: Any
    ) -> Anatomy | str:
        if self.training and getattr(self.drop_path, "drop_prob", 0.0) > 0:
            return "drop_path drops whole samples of a branch, and a branch is drawn row by row"
        drop_path = self._as_known(self.drop_path, "Dinov2DropPath")
        why = "" if type(self.drop_path) is nn.Identity else not_as_known(drop_path)
        if why:
            return why
        norms, after = (self.norm1, self.norm2), (self.layer_scale1, self.layer_scale2)
        call: Anatomy | str = self._parts(hidden_states, attention_mask, options, norms, after)
        return call


class _GPT2(_TransformersBlock):
    """GPT-2: normalised first, causal, weights stored transposed and packed."""

    roles = (("attn.c_attn", "packed"), ("attn.c_proj", "queries"), ("crossattention", "exact"))

    def anatomy(
        self: Any,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        use_cache: bool | None = False,
        **options: Any,
    ) -> Anatomy | str:
        attention = self.attn
        reason = _refused(hidden_states, attention, options)
        if reason or not _mask_fits(attention_mask):
            return reason or "a mask that is not [samples, heads, queries, keys]"
        if encoder_hidden_states is not None:
            return "cross-attention was asked for"
        if _holds_keys(past_key_values, attention):
            return "a cache that holds keys was given"
        if attention.reorder_and_upcast_attn:
            return "reorder_and_upcast_attn=True: attention in a precision of its own"

        def plain(x: Tensor) -> Tensor:
            given = {**options, "attention_mask": attention_mask, "use_cache": use_cache}
            y: Tensor = attention(x, past_key_values=past_key_values, **given)[0]
            return y

        fused, why = None, _CACHED
        if past_key_values is None:
            fused = SelfAttention(
                (attention.c_attn,),
                (attention.c_proj, attention.resid_dropout),
                attention.num_heads,
                **_how(attention, attention_mask, hidden_states, attention.attn_dropout.p),
            )
        norms, known = (self.ln_1, self.ln_2), (self._as_known(attention, "GPT2Attention"),)
        return Anatomy(hidden_states, fused, plain, norms, (self.mlp,), True, None, why, known)


class _Decoder(_TransformersBlock):
    """Llama and its kin: RMS norms, rotary positions, grouped-query heads, a gated MLP."""

    roles = tuple((f"self_attn.{name}", role) for name, role in _PARTS.items())

    def anatomy(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Anatomy | str:
        attention = self.self_attn
        allowed = {"position_embeddings", "attention_mask"}
        others = {name: value for name, value in options.items() if name not in allowed}
        reason = _refused(hidden_states, attention, others)
        mask = options.get("attention_mask")
        if reason or args or not _mask_fits(mask):
            return reason or "arguments by place, or a mask that is not [N, heads, T, T]"
        if _holds_keys(options.get("past_key_values"), attention):
            return "a cache that holds keys was given"

        def plain(x: Tensor) -> Tensor:
            y: Tensor = attention(hidden_states=x, **options)[0]
            return y

        fused = None
        why = "q and k have norms" if hasattr(attention, "q_norm") else _CACHED
        if options.get("past_key_values") is None and not hasattr(attention, "q_norm"):
            fused = SelfAttention(
                (attention.q_proj, attention.k_proj, attention.v_proj),
                (attention.o_proj,),
                attention.config.num_attention_heads,
                attention.config.num_key_value_heads,
                rotary=options["position_embeddings"],
                **_how(attention, mask, hidden_states, attention.attention_dropout),
            )
        norms = (self.input_layernorm, self.post_attention_layernorm)
        family = self.plain.__name__.removesuffix("DecoderLayer")
        known = (self._as_known(attention, f"{family}Attention"),)
        return Anatomy(hidden_states, fused, plain, norms, (self.mlp,), True, None, why, known)


_FAMILIES: Mapping[str, tuple[str, type[SketchedBlock]]] = MappingProxyType(
    {
        "BertLayer": ("bert", _Bert),
        "RobertaLayer": ("roberta", _Bert),
        "TransformerBlock": ("distilbert", _DistilBert),
        "ViTLayer": ("vit", _ViT),
        "Dinov2Layer": ("dinov2", _Dinov2),
        "GPT2Block": ("gpt2", _GPT2),
        "LlamaDecoderLayer": ("llama", _Decoder),
        "MistralDecoderLayer": ("mistral", _Decoder),
        "Qwen2DecoderLayer": ("qwen2", _Decoder),
        "Qwen3DecoderLayer": ("qwen3", _Decoder),
    }
)
"""The block's class: its folder in transformers' models, and what is mixed in."""


def block_of(block: type[nn.Module]) -> type[SketchedBlock] | None:
    """The class that a block of transformers becomes; ``None`` if it is not known."""
    folder, _ = _FAMILIES.get(block.__name__, ("", None))
    if block.__module__ != _module(folder) or _too_old(sys.modules["transformers"].__version__):
        return None
    kind: Any = block
    made: type[SketchedBlock] = _made(kind)
    return made


@cache
def _too_old(version: str) -> bool:
    """Says once that blocks were made of other parts then."""
    old = TorchVersion(version) < OLDEST
    if old:
        warnings.warn(
            f"transformers {version} is too old for kept tokens, which need {OLDEST}: its blocks "
            "are not known, and Tokens gives their linear layers Rows",
            stacklevel=2,
        )
    return old


@cache
def _made(block: Any) -> type[SketchedBlock]:
    """One class for each block; only models that are used are imported."""
    _, mixin = _FAMILIES[block.__name__]
    about = f"transformers' ``{block.__name__}`` on kept tokens."
    entries = {"plain": block, "__module__": __name__, "__doc__": about}
    return type(f"Sketched{block.__name__}", (mixin, block), entries)


def __getattr__(name: str) -> Any:
    """A class by its name, as unpickling asks for it."""
    plain = name.removeprefix("Sketched")
    if plain == name or plain not in _FAMILIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    loaded = importlib.import_module(_module(_FAMILIES[plain][0]))
    return _made(getattr(loaded, plain))


def _module(folder: str) -> str:
    return f"transformers.models.{folder}.modeling_{folder}"


def _holds_keys(cache: Any, attention: Any) -> bool:
    return cache is not None and cache.get_seq_length(attention.layer_idx) > 0
