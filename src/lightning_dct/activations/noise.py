"""Uniform random numbers as a pure function of a seed, the data and the position.

A generator with state would give other numbers on a GPU, and when activation checkpointing repeats a forward. A hash
gives the same numbers for the same seed and data on every device, and does not wait for a GPU. The integer hash is
"lowbias32" (C. Wellons, *Prospecting for hash functions*, 2018).
"""

from typing import Any

import torch
from torch import Tensor

# The two multipliers of lowbias32, as signed 32-bit integers.
FIRST = 0x7FEB352D
SECOND = 0x846CA68B - (1 << 32)
# Numbers computed at a time. They stay in a CPU's cache, which doubles the speed.
CHUNK = 1 << 15

FORWARD_ROUNDING = 1
BACKWARD_ROUNDING = 2


def mixed_seed(seed: int, step: int) -> int:
    """One 63-bit seed for an optimizer step."""
    # With SplitMix64's increment and first multiplier, neighbouring steps get distant seeds.
    mixed = (seed * 0xBF58476D1CE4E5B9 + (step + 1) * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    return (mixed ^ (mixed >> 31)) & ((1 << 63) - 1)


def uniform(count: int, seed: int, stream: int, content: Tensor) -> Tensor:
    """Random numbers in [0, 1), multiples of ``2 ** -24``: fp32 ``[count]`` on the device of ``content``.

    Args:
        count: Number of random numbers.
        seed: Non-negative, below ``2 ** 63``.
        stream: The purpose; different streams are independent.
        content: The data, floating point, any shape: each micro-batch has its own numbers.
    """
    bits = content.detach().to(torch.float32).reshape(-1).view(torch.int32)
    # Zeros at the end of the data do not change its numbers.
    key = bits.sum(0, keepdim=True, dtype=torch.int64) + salt(seed, stream)
    low = _hashed(_fast((key & 0x7FFFFFFF).to(torch.int32)))
    high = _hashed(_fast((key >> 31 & 0x7FFFFFFF).to(torch.int32)) ^ low)
    numbers = torch.empty(count, device=content.device)
    chunk = CHUNK if content.device.type == "cpu" else max(count, 1)
    for start in range(0, count, chunk):
        place = torch.arange(start, min(start + chunk, count), dtype=torch.int32, device=content.device)
        hashed = _hashed(_hashed(_fast(place) ^ low) + high)
        torch.mul(torch.as_tensor(hashed & 0xFFFFFF), 2.0**-24, out=numbers[start : start + chunk])
    return numbers


def salt(seed: int, stream: int) -> int:
    """The number, below ``2 ** 62``, that a seed and a stream add to the sum of the data's bits."""
    return (seed * 0x9E3779B97F4A7C15 + (stream + 1) * 0xBF58476D1CE4E5B9) & ((1 << 62) - 1)


def _fast(numbers: Tensor) -> Any:
    """A numpy array on the CPU: numpy takes half the time for these operations, and a third for a single number."""
    return numbers.numpy() if numbers.device.type == "cpu" else numbers


def _hashed(x: Any) -> Any:
    """Scramble int32 numbers, one to one, in place."""
    x ^= (x >> 16) & 0xFFFF
    x *= FIRST
    x ^= (x >> 15) & 0x1FFFF
    x *= SECOND
    x ^= (x >> 16) & 0xFFFF
    return x
