"""Differentiable functions with a sketched backward."""

from .attention import kept_attention
from .branch import branch
from .conv import sketched_conv
from .gate import gate
from .linear import sketched_linear

__all__ = ["branch", "gate", "kept_attention", "sketched_conv", "sketched_linear"]
