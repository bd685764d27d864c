"""Between machines: smaller backward messages in pipelines, smaller all-reduces in DDP.

Everything runs on torch's own engines: ``torch.distributed.pipelining``, DDP's communication
hooks, FSDP2. Import this package by name; ``import sketchprop`` does not load it.
"""

from .ddp import SharedDraws, share_draws_
from .pipeline import sketch_stage_
from .wire import Traffic, WireCounter, WireFormat

__all__ = [
    "SharedDraws", "Traffic", "WireCounter", "WireFormat", "share_draws_", "sketch_stage_",
]  # fmt: skip
