"""Meters: what a sketch does to the gradient."""

from .unbiased import UnbiasedReport, check_unbiased, expected_gradients

__all__ = ["UnbiasedReport", "check_unbiased", "expected_gradients"]
