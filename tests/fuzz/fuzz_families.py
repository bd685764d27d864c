"""The families of cases."""

from __future__ import annotations

from fuzz_functions import Function
from fuzz_layers import Layer
from fuzz_models import Model

FAMILIES = (Layer, Function, Model)
