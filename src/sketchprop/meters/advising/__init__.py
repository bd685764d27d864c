"""``advise``: what fits a model, measured on it, and the one that pays, if any; ``trial``."""

from .advice import Advice, Option
from .advise import advise
from .candidates import Candidate
from .trial import Moment, Trial, Way, trial

__all__ = ["Advice", "Candidate", "Moment", "Option", "Trial", "Way", "advise", "trial"]
