"""Callbacks for trainers. Each module needs its own package and is imported only by its users:

from sketchprop.integrations.transformers import SketchCallback
from sketchprop.integrations.lightning import SketchCallback
"""
