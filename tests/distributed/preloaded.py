"""What the fork server imports for all processes. The garbage collection that ends every fit passes it over."""

import contextlib
import gc
import os

import hydra  # noqa: F401
import hypothesis  # noqa: F401
import lightning.pytorch  # noqa: F401
import pytest  # noqa: F401
import torch

from distributed.harness import TESTS
from lightning_dct.elastic.present import import_torchft
from lightning_dct.kernels import cpu_kernel
from lightning_dct.kernels.bits import flags_num_bytes
from lightning_dct.kernels.plain import Sent

with contextlib.suppress(ImportError):
    import wandb  # noqa: F401
with contextlib.suppress(ImportError):
    import rich.table  # noqa: F401
with contextlib.suppress(ImportError):
    import_torchft()

torch.set_num_threads(1)
# The first call of numba's kernels takes a second, and much longer where they are not yet compiled.
for dtype in (torch.float32, torch.float64):
    tensors, flags = [torch.zeros(8, dtype=dtype)], torch.zeros(flags_num_bytes(8), dtype=torch.uint8)
    for scale in (None, 1.0):
        cpu_kernel().select(tensors, tensors, [0], [1.0], scale, flags)
    cpu_kernel().add_sums(tensors, tensors, [0], Sent(flags[None], torch.zeros(0), [0]), torch.zeros(2, dtype=dtype))

# What `started` in harness.py puts there for this file.
os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", "").removeprefix(f"{TESTS}{os.pathsep}")
gc.collect()
gc.freeze()
