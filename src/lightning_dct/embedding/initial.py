"""The initial value of a row: a seeded function of its table and number, which every rank can compute.

The owner's row and the copy on a rank that requests it for the first time both start from this value. So they differ
only by the changes of training. The hash is the finaliser of SplitMix64 (Steele, Lea and Flood, *Fast splittable
pseudorandom number generators*, OOPSLA 2014).
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_dct.kernels import rows_kernel

# 2 ** 64 over the golden ratio, odd.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def initial_rows(
    seed: int,
    tables: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    bounds: npt.NDArray[np.float32],
    dim: int,
) -> Tensor:
    """Rows ``rows`` of ``tables``, both shape ``[n]``: fp32 ``[n, dim]``, uniform on ``[-bound, bound)`` of the table.

    ``bounds`` has shape ``[tables]``.
    """
    state = np.full(1, seed % 2**64, dtype=np.uint64)
    for counter in (tables, rows):
        state = mix(state + (counter.astype(np.uint64) + np.uint64(1)) * GOLDEN)
    if (kernel := rows_kernel("cpu")) is not None:
        values = np.empty((rows.size, dim), dtype=np.float32)
        kernel.fill_uniform(values, state, bounds[tables])
        return torch.from_numpy(values)
    state = mix(state[:, None] + np.arange(1, dim + 1, dtype=np.uint64) * GOLDEN)
    # An fp32 holds 24 bits exactly, so only the last product rounds.
    uniform = (state >> np.uint64(40)).astype(np.float32) * np.float32(2**-23) - np.float32(1)
    uniform *= bounds[tables][:, None]
    return torch.from_numpy(uniform)


def mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash 64-bit numbers to others, one to one, in place."""
    state ^= state >> np.uint64(30)
    state *= _FIRST
    state ^= state >> np.uint64(27)
    state *= _SECOND
    state ^= state >> np.uint64(31)
    return state
