"""Data sets as plain tensors: found where the user says, cached, or downloaded; always checked."""

from .cifar import cifar10
from .digits import mnist, normalised
from .files import VARIABLE, DataError, Labelled

__all__ = ["VARIABLE", "DataError", "Labelled", "cifar10", "mnist", "normalised"]
