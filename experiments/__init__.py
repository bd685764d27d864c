"""Reproductions of published experiments with sketchprop: ``python -m experiments --help``."""
