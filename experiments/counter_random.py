"""Random numbers addressed by counters: number ``(seed, row, column)`` is the same on every rank at
any time.

Training rows that are a pure function of their index need no state and no agreement between ranks.
The hash is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), applied once for every
counter that is absorbed.
"""

import numpy as np
import numpy.typing as npt

from lightning_dct.embedding.owners import GOLDEN, mix

UInt64Array = npt.NDArray[np.uint64]


def hash_counters(seed: int, *counters: npt.ArrayLike) -> UInt64Array:
    """Hash a seed and counters into 64 random bits each: uint64 of the broadcast shape, of at least
    one dimension.

    The order of the counters matters. Put small shapes first: each is absorbed at the shape reached
    so far.
    """
    state = mix(np.array([seed % 2**64], dtype=np.uint64) + GOLDEN)
    for counter in counters:
        # Plus one, so that the counter 0 moves the state too.
        state = mix(state + (np.atleast_1d(counter).astype(np.uint64) + np.uint64(1)) * GOLDEN)
    return state


def uniform(bits: UInt64Array) -> npt.NDArray[np.float64]:
    """Map hashed bits to floats in [0, 1), 53 bits of resolution."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform_pair(bits: UInt64Array) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Split hashed bits into two independent floats in [0, 1), 32 bits of resolution each."""
    high = (bits >> np.uint64(32)).astype(np.float64) * 2.0**-32
    low = (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) * 2.0**-32
    return high, low


def normal(bits: UInt64Array) -> npt.NDArray[np.float64]:
    """Map hashed bits to standard normal numbers (Box and Muller), one a word."""
    radius, angle = uniform_pair(bits)
    # 1 - u lies in (0, 1], so that the logarithm stays finite.
    return np.sqrt(-2.0 * np.log1p(-radius)) * np.cos(2.0 * np.pi * angle)
