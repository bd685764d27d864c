"""What a layer's backward is asked for, and what answers it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from .checks import check_given
from .samples import Samples


class Vjp(NamedTuple):
    """dX = G W, dW = Gᵀ X, db = 1ᵀ G: ``G: [..., B, n]``, ``W: [..., n, d]``, ``X: [..., B, d]``.

    Leading dimensions are a stack of independent layers. W and X are ``None`` where nobody looks
    at them. ``samples`` says which rows belong to one sample; ``None``: each row is a sample.
    In forward, where G is not known yet, it has B rows and no columns.
    """

    G: Tensor
    W: Tensor | None = None
    X: Tensor | None = None
    samples: Samples | None = None

    @property
    def rows(self) -> Samples:
        """Which rows belong to one sample, said or not."""
        return self.samples or Samples(1, self.G.shape[-2], 1)

    def weight(self, sketch: object) -> Tensor:
        """W, for a sketch that cannot do without it."""
        return check_given(self.W, sketch, "weight", "weight=... or Vjp(G, W)")

    def input(self, sketch: object) -> Tensor:
        """X, for a sketch that cannot do without it."""
        return check_given(self.X, sketch, "input", "Vjp(G, W, X)")


class CompactGradient(Protocol):
    """Ĝ without its zeros: what flows from a sketch to a layer, a meter or a pipeline stage.

    ``dense()`` is Ĝ ``[..., B, n]``, ``input_grad(W)`` is Ĝ W ``[..., B, d]``, ``weight_grad(X)``
    is Ĝᵀ X ``[..., n, d]``, and ``bias_grad()`` is 1ᵀ Ĝ ``[..., n]``.
    """

    def dense(self) -> Tensor: ...
    def input_grad(self, W: Tensor) -> Tensor: ...
    def weight_grad(self, X: Tensor) -> Tensor: ...
    def bias_grad(self) -> Tensor: ...
