"""What a layer's backward is asked for, as one object."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .samples import Samples


class Vjp(NamedTuple):
    """dX = G W, dW = Gᵀ X, db = 1ᵀ G: ``G: [..., B, n]``, ``W: [..., n, d]``, ``X: [..., B, d]``.

    Leading dimensions are a stack of independent layers. W and X are ``None`` where nobody looks
    at them. ``samples`` says which rows belong to one sample; ``None``: each row is a sample.
    """

    G: Tensor
    W: Tensor | None = None
    X: Tensor | None = None
    samples: Samples | None = None

    @property
    def rows(self) -> Samples:
        """Which rows belong to one sample, said or not."""
        return self.samples or Samples(1, self.G.shape[-2], 1)
