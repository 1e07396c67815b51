"""What the fork server imports for all processes.

The garbage collection that ends every fit passes it over.
"""

import contextlib
import gc
import os

import hydra  # noqa: F401
import hypothesis  # noqa: F401
import lightning.pytorch  # noqa: F401
import pytest  # noqa: F401
import torch

from distributed.compiling import compile_all
from distributed.harness import TESTS
from lightning_dct.elastic.present import import_torchft
from lightning_dct.kernels import fastest_kernel

with contextlib.suppress(ImportError):
    import wandb  # noqa: F401
with contextlib.suppress(ImportError):
    import rich.table  # noqa: F401
with contextlib.suppress(ImportError):
    import_torchft()

torch.set_num_threads(1)
if fastest_kernel("cpu") == "numba":
    compile_all()

# What `started` in harness.py puts there for this file.
os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", "").removeprefix(f"{TESTS}{os.pathsep}")
gc.collect()
gc.freeze()
