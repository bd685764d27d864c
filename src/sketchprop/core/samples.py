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

    def by_sample(self, values: Tensor) -> Tensor:
        """``[..., B]``, a value for each row, as ``[..., samples, tokens]``."""
        if self.before == 1:
            return values.reshape(*values.shape[:-1], self.samples, self.after)
        parts = values.reshape(*values.shape[:-1], self.before, self.samples, self.after)
        return parts.transpose(-3, -2).flatten(-2)

    def units(self, whole: bool, device: torch.device) -> Tensor | None:
        """The rows of each unit of a draw, sample by sample: ``[units, rows of a unit]``.

        A unit is a sample (``whole``) or a token; ``None``: unit i is row i.
        """
        if self.before == 1 and (not whole or self.after == 1):
            return None
        rows = self.by_sample(torch.arange(self.samples * self.tokens, device=device))
        return rows if whole else rows.reshape(-1, 1)
