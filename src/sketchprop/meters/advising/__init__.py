"""``advise``: what fits a model, measured on it, and the one that pays, if any; ``trial``."""

from .advise import advise
from .answer import Advice, Option
from .candidates import Candidate
from .race import trial
from .trial import Moment, Trial, Way

__all__ = ["Advice", "Candidate", "Moment", "Option", "Trial", "Way", "advise", "trial"]
