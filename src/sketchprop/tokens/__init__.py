"""Kept tokens: the backward of transformer blocks on the tokens that carry it."""

from .attention import kept_attention
from .branch import branch

__all__ = ["branch", "kept_attention"]
