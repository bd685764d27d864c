"""What a measurement depends on beside the model: versions and the machine."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime

import torch

from .._version import __version__
from ..core.stopwatch import cpu_name


def setup_facts(device: torch.device | None = None) -> dict[str, str]:
    """Versions, processor, threads and the time of day, as words.

    >>> setup_facts()["sketchprop"] == __version__
    True
    """
    facts = {
        "when": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "sketchprop": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": f"{cpu_name()}, {os.cpu_count()} cores",
        "threads": str(torch.get_num_threads()),
    }
    if device is not None and device.type != "cpu":
        name = getattr(torch.get_device_module(device), "get_device_name", lambda _: "")
        facts["device"] = f"{device} {name(device)}".strip()
    return facts
