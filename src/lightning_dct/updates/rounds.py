"""When parameters are exchanged, and which of them travel together: pure functions, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dct.gradients.plan import real_dtype, real_numel

# One bucket is compressed while others travel. Smaller ones would cost more calls, larger ones take more memory and
# leave the link idle while the first is compressed and the last is read.
LARGEST_BUCKET = 1 << 20
# Once so many entries travel, the oldest bucket is applied before the next is compressed. Twice as many made a step at
# 100 Mbit/s 6% faster, and took 9 MB more of a rank whose layers have 2 million entries.
MOST_TRAVELLING = 1 << 21
# Below this a collective costs more in latency than in bytes.
SMALLEST_BUCKET = 1 << 16
# GPT-2 at its largest rate: 1,000 steps without shorter rounds lost 7%.
SHORTER_IN_WARMUP = 8


def round_length(step: int, local_steps: int, warmup_steps: int) -> int:
    """Optimizer steps from one exchange to the next, about a step of training.

    Weights move fastest while training warms up, and those of ranks that drift apart then cannot be averaged any more
    (Lin et al., *Don't Use Large Mini-Batches, Use Local SGD*, ICLR 2020). So rounds are shorter until then,
    and send as much less: the delay, about length / density, is the same.

    Args:
        step: Steps so far, from 1 on.
        local_steps: The length once training has warmed up.
        warmup_steps: Steps until then.
    """
    return max(1, local_steps // SHORTER_IN_WARMUP) if step <= warmup_steps else local_steps


def is_due(step: int, length: int, place: int = 0, places: int = 1) -> bool:
    """Whether a bucket is exchanged after a step of its optimizer.

    Args:
        step: Steps so far, from 1 on.
        length: Steps from one exchange to the next.
        place: The bucket's place among those that take turns.
        places: How many do. 1 where all are exchanged after the same steps.
    """
    return (step - place * length // places) % length == 0


def buckets_of(parameters: Sequence[tuple[str, Tensor]], turns: int) -> list[list[str]]:
    """Divide parameters into buckets of one dtype and device each.

    Args:
        parameters: Names and parameters, in the model's order.
        turns: Into how many buckets of equal size they shall be divided, where they are large enough for that.
    """
    entries = sum(real_numel(parameter) for _, parameter in parameters)
    largest = min(LARGEST_BUCKET, max(SMALLEST_BUCKET, -(-entries // turns)))
    buckets: list[list[str]] = []
    # The bucket that is being filled, by what its tensors have in common: its number, and its entries so far.
    filling: dict[tuple[torch.dtype, torch.device], tuple[int, int]] = {}
    for name, parameter in parameters:
        kind, size = (real_dtype(parameter), parameter.device), real_numel(parameter)
        number, filled = filling.get(kind, (0, largest))
        if filled + size > largest or kind not in filling:
            number, filled = len(buckets), 0
            buckets.append([])
        buckets[number].append(name)
        filling[kind] = number, filled + size
    return buckets
