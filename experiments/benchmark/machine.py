"""What to know of the machine on which something was measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

BUSY_LOAD = 0.5


def describe_machine() -> dict[str, Any]:
    """Processor, number of cores, versions, and how many processes have wanted a core in the last minute."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": os.getloadavg()[0],
    }


def warn_if_busy(load: float) -> str | None:
    """What to say when others are using the machine; None when nobody is."""
    if load < BUSY_LOAD:
        return None
    return f"The machine was busy when this began (load {load:.1f}): times mean little, bytes and losses are sound."


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
