"""``advise``: what fits a model, measured on it, and the one that pays, if any."""

from .advise import advise
from .answer import Advice, Option
from .candidates import Candidate

__all__ = ["Advice", "Candidate", "Option", "advise"]
