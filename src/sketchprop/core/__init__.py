"""Importance, probabilities, draws and compact gradients: the maths, without layers."""
