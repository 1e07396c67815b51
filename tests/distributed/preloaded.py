"""What the fork server imports for all processes. The garbage collection that ends every fit passes it over."""

import contextlib
import gc
import os

import hydra  # noqa: F401
import hypothesis  # noqa: F401
import lightning.pytorch  # noqa: F401
import pytest  # noqa: F401
import torch
import wandb  # noqa: F401

from distributed.harness import TESTS
from lightning_dct.kernels import select

with contextlib.suppress(ImportError):
    import rich.table  # noqa: F401

torch.set_num_threads(1)
# The first call of numba's kernels takes a second, and much longer where they are not yet compiled.
for dtype in (torch.float32, torch.float64):
    select(torch.zeros(8, dtype=dtype), torch.zeros(8, dtype=dtype), [(0, 8)], [1.0])

# What `started` in harness.py puts there for this file.
os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", "").removeprefix(f"{TESTS}{os.pathsep}")
gc.collect()
gc.freeze()
