"""Budgets that tune themselves while a network trains."""

from .controller import Controller, Probe
from .rule import LADDER, Problem
from .tuner import Tuner

__all__ = ["LADDER", "Controller", "Probe", "Problem", "Tuner"]
