"""LoRA layers of PEFT as row-wise steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from ..tokens.rowwise import Pair, RowWise


def read_lora(module: nn.Module, read: Callable[[nn.Module], RowWise | None]) -> RowWise | None:
    """base(x) + scaling · B(A(dropout(x))) for each active adapter; ``None`` if it is not that.

    Variants (DoRA and others), adapters that are merged or off, and weights in precisions of their
    own are not that. ``read`` takes the layers that it is made of.
    """
    lora = sys.modules.get("peft.tuners.lora.layer")
    if lora is None or type(module) is not lora.Linear:
        return None
    layer: Any = module
    whole = read(layer.base_layer)
    if whole is None or layer.disable_adapters or layer.merged or layer.lora_variant:
        return None
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        parts = [read(m[name]) for m in (layer.lora_dropout, layer.lora_A, layer.lora_B)]
        adapter = RowWise.of()
        for part in parts:
            if part is None:
                return None
            adapter += part
        if layer.lora_A[name].weight.dtype != layer.get_base_layer().weight.dtype:
            return None
        pair = Pair(whole.chain, adapter.chain, factor=layer.scaling[name])
        whole = RowWise.of((pair, (whole.parameters, adapter.parameters)))
    return whole
