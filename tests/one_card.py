"""Where tests compute: on the CPU, or with ``TESTS_ON=cuda`` on one card that all ranks share
(``gpu_check.py``).
"""

import os
from typing import Any

import torch
from lightning.pytorch.accelerators import CUDAAccelerator

DEVICE = torch.device(os.environ.get("TESTS_ON", "cpu"))


class OneCard(CUDAAccelerator):
    """As many devices as a Trainer asks for, all of which are the first card."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cuda", 0)] * len(devices)


def accelerator() -> Any:
    """For a Trainer or Fabric."""
    return OneCard() if DEVICE.type == "cuda" else "cpu"
