"""The whole backward pass on a few samples."""

from .loss import sampled_backward, sampled_loss

__all__ = ["sampled_backward", "sampled_loss"]
