"""Meters: what a sketch does to the gradient, what it costs and what it saves."""

from .estimate import Estimate
from .flops import FlopsReport, measure_flops
from .measure import MeasureReport, measure
from .memory import MemoryReport, saved_bytes
from .monitor import Monitor
from .plan import PlanReport, plan
from .timing import BenchReport, Times, bench, step_times
from .unbiased import UnbiasedReport, check_unbiased, expected_gradients
from .variance import VarianceReport, measure_variance
from .verdict import Verdict, criterion

__all__ = [
    "BenchReport",
    "Estimate",
    "FlopsReport",
    "MeasureReport",
    "MemoryReport",
    "Monitor",
    "PlanReport",
    "Times",
    "UnbiasedReport",
    "VarianceReport",
    "Verdict",
    "bench",
    "check_unbiased",
    "criterion",
    "expected_gradients",
    "measure",
    "measure_flops",
    "measure_variance",
    "plan",
    "saved_bytes",
    "step_times",
]
