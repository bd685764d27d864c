"""Meters: what a sketch does to the gradient, what it costs and what it saves."""

from .advising.advice import Advice, Option
from .advising.advise import advise
from .advising.candidates import Candidate
from .advising.trial import Moment, Trial, Way, trial
from .cost.flops import FlopsReport, measure_flops
from .cost.memory import MemoryReport, saved_bytes
from .cost.timing import Times, step_times
from .measure import MeasureReport, Verdict, criterion, measure
from .noise.estimate import Estimate
from .noise.variance import VarianceReport, measure_variance
from .plan import PlanReport, plan
from .unbiased import UnbiasedReport, check_unbiased, expected_gradients

__all__ = [
    "Advice", "Candidate", "Estimate", "FlopsReport", "MeasureReport", "MemoryReport", "Moment",
    "Option", "PlanReport", "Times", "Trial", "UnbiasedReport", "VarianceReport", "Verdict", "Way",
    "advise", "check_unbiased", "criterion", "expected_gradients", "measure", "measure_flops",
    "measure_variance", "plan", "saved_bytes", "step_times", "trial",
]  # fmt: skip
