"""A different order for every epoch, computed place by place: nothing is kept and nothing is shuffled.

A number below ``n`` is written as two digits, and each digit in turn is moved on by a hash of the other (a Feistel
network with addition). Every such move can be undone, so the whole is a permutation; numbers that leave ``n`` go
through again until they are back.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from counter_random import hash_counters

_ROUNDS = 6


def shuffled(places: npt.NDArray[np.int64], size: int, seed: int) -> npt.NDArray[np.int64]:
    """Say which rows lie at some places of an endless order, in which each epoch holds every row once.

    Args:
        places: int64 ``[n]``, places from 0 on; epoch ``e`` lies at ``[e * size, (e + 1) * size)``.
        size: Rows an epoch.
        seed: Chooses the order.

    Returns:
        int64 ``[n]`` row numbers below ``size``, a pure function of place, size and seed.
    """
    epochs, rows = np.divmod(places, size)
    base = math.isqrt(size - 1) + 1  # The least with base * base >= size: at most a few numbers go round again.
    rows = _permute(rows, epochs, base, seed)
    outside = np.flatnonzero(rows >= size)
    while len(outside):
        rows[outside] = _permute(rows[outside], epochs[outside], base, seed)
        outside = outside[rows[outside] >= size]
    return rows


def _permute(
    numbers: npt.NDArray[np.int64], epochs: npt.NDArray[np.int64], base: int, seed: int
) -> npt.NDArray[np.int64]:
    """Permute the numbers below ``base ** 2``, in each epoch in another way."""
    high, low = np.divmod(numbers, base)
    for step in range(_ROUNDS):
        moved = high + (hash_counters(seed, step, epochs, low) % np.uint64(base)).astype(np.int64)
        high, low = low, moved % base
    return high * base + low
