"""Blocks of transformers' models on kept tokens.

``block_class`` loads it for classes of transformers only, and unpickling a model that has such
blocks does. Attention without rotations is taken apart; other attention runs by a stand-in.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import MappingProxyType, MethodType
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from torch.torch_version import TorchVersion

from ..tokens.rowwise import Activation, Linear, Pair, RMSNorm, RowWise, Scale
from .blocks import Anatomy, SelfAttention, SketchedBlock, applied, not_as_known
from .sketched import collecting, watched

OLDEST = "5.18"
"""The version of transformers since which all families are made of the parts that are known."""
_HARMLESS = frozenset(
    {"output_hidden_states", "use_cache", "num_items_in_batch", "position_ids", "cache_position",
     "return_dict", "past_key_values", "output_attentions", "output_router_logits"}
)  # fmt: skip
"""Options that do not change what a block computes; some of them only where they are false."""
_ENCODER = ("encoder_hidden_states", "encoder_attention_mask")
_QKV = ("q_proj", "k_proj", "v_proj")
_CACHED = "a cache wants its keys; give use_cache=False"
_SDPA = "transformers.integrations.sdpa_attention"
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


class _Layout(NamedTuple):
    """Where a block has its parts: the names of modules."""

    attention: str
    projections: tuple[str, ...]
    """q, k and v, or one that makes all three."""
    out: tuple[str, ...]
    """What follows in attention's own module."""
    heads: str
    """Of attention, as ``dropout``."""
    dropout: str
    norms: tuple[str, str]
    mlp: tuple[str, ...]
    norm_first: bool = True
    after: tuple[str, ...] = ()
    """What follows attention's own module in its branch."""
    known: tuple[tuple[str, str], ...] = ()
    """Modules that are not called, and their classes; {} is the family's name."""
    places: tuple[str, ...] = ("attention_mask",)
    """Arguments behind the first that may be given by place."""
    allowed: tuple[str, ...] = ("attention_mask", "encoder_attention_mask")

    def roles(self) -> tuple[tuple[str, str], ...]:
        q, *others = self.projections
        return (
            (q, "queries" if others else "packed"),
            *((name, "keys") for name in others),
            *((name, "queries") for name in (*self.out, *self.after)),
            ("crossattention", "exact"),
        )


class _TransformersBlock(SketchedBlock):
    """Reads the row-wise modules of transformers."""

    vouched = False
    layout: ClassVar[_Layout]

    def anatomy(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Anatomy | str:
        layout: _Layout = self.layout
        attention = _part(self, layout.attention)
        if len(args) > len(layout.places):
            return "it got more positional arguments than are known: give them by name"
        given = {"attention_mask": None, **dict(zip(layout.places, args, strict=False)), **options}
        mask, cached = given["attention_mask"], given.get("past_key_values")
        known = (*layout.allowed, "is_causal")
        others = {name: value for name, value in given.items() if name not in known}
        reason = _refused(hidden_states, attention, others) or self.refuses(given)
        if reason or not (mask is None or (isinstance(mask, Tensor) and mask.dim() == 4)):
            return reason or "a mask that is not [samples, heads, queries, keys]"
        if cached is not None and cached.get_seq_length(attention.layer_idx) > 0:
            return "a cache that holds keys was given"
        projections, out, after, mlp, (norm1, norm2) = (
            tuple(_part(self, name) for name in names)
            for names in (
                layout.projections, layout.out, layout.after, layout.mlp, layout.norms
            )
        )  # fmt: skip

        def plain(x: Tensor) -> Tensor:
            return applied(after, attention(x, **given)[0])

        fused, heads = None, _part(attention, layout.heads)
        kv_heads = getattr(attention.config, "num_key_value_heads", None) or heads
        apart = _apart(attention, projections, heads, kv_heads)
        apart = apart or (_CACHED if cached is not None else "")
        if not apart:
            dropout = _part(attention, layout.dropout)
            causal = given.get("is_causal")
            fused = SelfAttention(
                projections,
                (*out, *after),
                heads,
                kv_heads,
                mask,
                getattr(dropout, "p", dropout) if attention.training else 0.0,
                bool(attention.is_causal if causal is None else causal)
                and mask is None
                and hidden_states.shape[1] > 1,
                attention.scaling,
                given.get("position_embeddings"),
            )
        return Anatomy(
            hidden_states, fused, plain, (norm1, norm2), mlp, layout.norm_first, None, apart,
            self.of_class(layout.known),
        )  # fmt: skip

    def refuses(self, given: dict[str, Any]) -> str:
        """Why this family cannot run a call on kept tokens; empty if it can."""
        return ""

    def of_class(self, names: Iterable[tuple[str, str]]) -> tuple[tuple[nn.Module, type], ...]:
        """Modules by name, and the classes that this block's own file has for them."""
        family = self.plain.__name__.removesuffix("Layer").removesuffix("Decoder")
        file = sys.modules[self.plain.__module__]
        return tuple((_part(self, n), getattr(file, kind.format(family))) for n, kind in names)

    def read(self, part: Callable[[Tensor], Tensor]) -> RowWise | None:
        steps = super().read(part)
        if steps is not None or not isinstance(part, nn.Module) or watched(part):
            return steps
        name = type(part).__name__
        if type(part).__module__ not in (self.plain.__module__, *_SHARED):
            return None
        if name in _CHAINS:
            chunked = getattr(part, "chunk_size_feed_forward", 0)
            return None if chunked else self._steps([getattr(part, n) for n in _CHAINS[name]])
        if name in _GATED:
            return self._gated(part)
        return _STEPS[name](part) if name in _STEPS else None

    def _gated(self, layer: Any) -> RowWise | None:
        gate = self._steps([layer.gate_proj, layer.act_fn])
        up, down = self.read(layer.up_proj), self.read(layer.down_proj)
        if gate is None or up is None or down is None:
            return None
        return RowWise.of((Pair(gate.chain, up.chain), (gate.parameters, up.parameters))) + down


def _part(module: Any, name: str) -> Any:
    """What stands at a name with dots."""
    for step in name.split("."):
        module = getattr(module, step)
    return module


def _apart(attention: Any, projections: tuple[Any, ...], heads: int, kv_heads: int) -> str:
    """Why attention cannot be taken apart; empty if it can."""
    if hasattr(attention, "q_norm"):
        return "q and k have norms"
    size = getattr(attention, "head_dim", None) or attention.attention_head_size
    made = [getattr(part, "out_features", None) for part in projections]
    wanted = [number * size for number in (heads, kv_heads, kv_heads)]
    if len(made) == 3 and any(n not in (None, m) for n, m in zip(made, wanted, strict=True)):
        return "it has other heads than its config says"
    return ""


def _refused(x: Any, attention: Any, options: dict[str, Any]) -> str:
    """Why a call cannot run on kept tokens; empty if it can."""
    if not isinstance(x, Tensor) or x.is_nested or x.dim() != 3:
        return "its input is not [samples, tokens, features]"
    kind = attention.config._attn_implementation
    registered = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS.get(kind)
    anew = registered is not None and registered.__module__ != _SDPA
    if anew or kind not in ("sdpa", "eager"):
        return f"attn_implementation={kind!r}: only torch's 'sdpa' and 'eager' have kept queries"
    asked = any(collecting(hook) for hook in attention._forward_hooks.values())
    if asked or options.get("output_attentions"):
        return "output_attentions=True: all weights of attention are asked for"
    for name, value in options.items():
        if name not in _HARMLESS and value is not None:
            return f"kept tokens do not support the argument {name}"
    return ""


class _Bert(_TransformersBlock):
    """BERT and its kin: normalised last, q, k and v apart."""

    layout = _Layout(
        "attention.self",
        tuple(f"attention.self.{name}" for name in ("query", "key", "value")),
        (),
        "num_attention_heads",
        "dropout",
        ("attention.output.LayerNorm", "output.LayerNorm"),
        (
            "intermediate.dense", "intermediate.intermediate_act_fn", "output.dense",
            "output.dropout",
        ),
        norm_first=False,
        after=("attention.output.dense", "attention.output.dropout"),
        known=(
            ("attention", "{}Attention"),
            ("attention.self", "{}SelfAttention"),
            ("attention.output", "{}SelfOutput"),
        ),
        places=("attention_mask", *_ENCODER, "past_key_values"),
    )  # fmt: skip

    def refuses(self: Any, given: dict[str, Any]) -> str:
        parts = (("intermediate", "{}Intermediate"), ("output", "{}Output"))
        if why := not_as_known(*self.of_class(parts)):
            return why
        if given.get("past_key_values") is not None:
            return "a cache of keys was given"
        chunks = "chunk_size_feed_forward is set: the feed-forward part runs in pieces"
        return chunks if self.chunk_size_feed_forward else ""


class _DistilBert(_TransformersBlock):
    """DistilBERT: normalised last, q, k and v apart."""

    layout = _Layout(
        "attention",
        ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        ("attention.out_lin",),
        "n_heads",
        "dropout",
        ("sa_layer_norm", "output_layer_norm"),
        ("ffn",),
        norm_first=False,
        known=(("attention", "DistilBertSelfAttention"),),
    )


class _ViT(_TransformersBlock):
    """ViT: normalised first, q, k and v apart."""

    layout = _Layout(
        "attention",
        tuple(f"attention.{name}" for name in _QKV),
        ("attention.o_proj",),
        "num_attention_heads",
        "attention_dropout",
        ("layernorm_before", "layernorm_after"),
        ("mlp", "dropout"),
        after=("dropout",),
        known=(("attention", "{}Attention"),),
    )


class _Dinov2(_TransformersBlock):
    """DINOv2: as ViT, with a layer scale behind each branch."""

    layout = _ViT.layout._replace(
        norms=("norm1", "norm2"), mlp=("mlp", "layer_scale2"), after=("layer_scale1",)
    )

    def refuses(self: Any, given: dict[str, Any]) -> str:
        if self.training and getattr(self.drop_path, "drop_prob", 0.0) > 0:
            return "drop_path drops whole samples of a branch, and a branch is drawn row by row"
        if type(self.drop_path) is nn.Identity:
            return not_as_known((self.drop_path, nn.Identity))
        return not_as_known(*self.of_class([("drop_path", "Dinov2DropPath")]))


class _GPT2(_TransformersBlock):
    """GPT-2: normalised first, causal, weights stored transposed and packed."""

    layout = _Layout(
        "attn",
        ("attn.c_attn",),
        ("attn.c_proj", "attn.resid_dropout"),
        "num_heads",
        "attn_dropout",
        ("ln_1", "ln_2"),
        ("mlp",),
        known=(("attn", "GPT2Attention"),),
        places=("past_key_values", "attention_mask", *_ENCODER, "use_cache"),
    )

    def refuses(self: Any, given: dict[str, Any]) -> str:
        upcast = "reorder_and_upcast_attn=True: attention in a precision of its own"
        return upcast if self.attn.reorder_and_upcast_attn else ""


class _Decoder(_TransformersBlock):
    """Llama and its kin: RMS norms, rotary positions, grouped-query heads, a gated MLP."""

    layout = _Layout(
        "self_attn",
        tuple(f"self_attn.{name}" for name in _QKV),
        ("self_attn.o_proj",),
        "config.num_attention_heads",
        "attention_dropout",
        ("input_layernorm", "post_attention_layernorm"),
        ("mlp",),
        known=(("self_attn", "{}Attention"),),
        places=(),
        allowed=("attention_mask", "position_embeddings"),
    )


_FAMILIES: Mapping[str, tuple[str, type[_TransformersBlock]]] = MappingProxyType(
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
            f"transformers {version} is too old for kept tokens: Tokens sketches its linear layers "
            f"by Rows instead of whole blocks; install transformers {OLDEST} or newer",
            stacklevel=2,
        )
    return old


@cache
def _made(block: Any) -> type[SketchedBlock]:
    """One class for each block; only models that are used are imported."""
    _, mixin = _FAMILIES[block.__name__]
    about = f"transformers' ``{block.__name__}`` on kept tokens."
    entries = {"plain": block, "__module__": __name__, "__doc__": about}
    entries["roles"] = mixin.layout.roles()
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
