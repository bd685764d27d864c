"""Which rows of G belong to one sample."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Samples(NamedTuple):
    """The rows of a layer as ``[before, samples, after]``: those of one sample, all tokens of it.

    ``[N, T, d]`` has T rows after the sample's axis, the sequence-first ``[T, N, d]`` has T before
    it. ``pixels``: whether the rows are positions of an image, which convolutions mix.
    """

    before: int
    samples: int
    after: int
    pixels: bool = False

    @classmethod
    def of(cls, dims: tuple[int, ...], sample_dim: int | None = 0) -> Samples:
        """Of rows with leading dimensions ``dims``; ``None``: all are one sample's."""
        if sample_dim is None or not dims:
            return cls(1, 1, math.prod(dims))
        after = math.prod(dims[sample_dim + 1 :])
        return cls(math.prod(dims[:sample_dim]), dims[sample_dim], after)

    @property
    def tokens(self) -> int:
        """Rows of one sample."""
        return self.before * self.after

    def sample_major(self, values: Tensor) -> Tensor:
        """``[..., B]``, a value for each row, with the rows of one sample side by side."""
        if self.before == 1:
            return values
        parts = values.reshape(*values.shape[:-1], self.before, self.samples, self.after)
        return parts.transpose(-3, -2).flatten(-3)

    def row_of(self, index: Tensor) -> Tensor:
        """The row at a place in sample-major order."""
        if self.before == 1:
            return index
        sample, token = index // self.tokens, index % self.tokens
        block, place = token // self.after, token % self.after
        return (block * self.samples + sample) * self.after + place

    def rows_of_samples(self, samples: Tensor) -> Tensor:
        """All rows of the samples ``[..., r]``: ``[..., r · tokens]``."""
        tokens = torch.arange(self.tokens, device=samples.device)
        places = samples.unsqueeze(-1) * self.tokens + tokens
        return self.row_of(places.flatten(-2))
