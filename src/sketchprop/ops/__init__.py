"""Differentiable functions with a sketched backward."""

from .conv import sketched_conv
from .gate import gate
from .linear import sketched_linear

__all__ = ["gate", "sketched_conv", "sketched_linear"]
