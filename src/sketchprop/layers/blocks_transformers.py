"""Blocks of transformers' models on kept tokens (stub)."""
from __future__ import annotations
from torch import nn
from .blocks import SketchedBlock
def block_of(block: type[nn.Module]) -> type[SketchedBlock] | None:
    return None
