"""Differentiable functions with a sketched backward."""

from .gate import gate
from .linear import sketched_linear

__all__ = ["gate", "sketched_linear"]
