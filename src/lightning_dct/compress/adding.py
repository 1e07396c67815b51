"""Reads the payloads of all senders on a CPU, and adds the weighted sum to a bucket in one pass."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_dct.compress.bucket_plan import Bucket, BucketPlan, SentPayload
from lightning_dct.kernels import cpu_kernel
from lightning_dct.kernels.bits import flags_num_bytes
from lightning_dct.kernels.plain import Sent
from lightning_dct.wire.payload import read_scales, unpack_flags, unpack_stretch, unpack_values
from lightning_dct.wire.positions import count_flags, reading

# Entries of a large tensor that are read at once. Fewer cost more calls.
AT_ONCE = 1 << 21


def add_to_bucket(
    plan: BucketPlan, bucket: Bucket, arrived: Sequence[SentPayload], weights: Tensor, mine: int, kernel: str
) -> None:
    """Add what senders have sent; ``mine`` is the number of this rank's own one, or -1."""
    flags = arrived[0].payload.new_zeros(len(arrived), plan.layout.flags_num_bytes)
    counts = []
    for one, row in zip(arrived, flags, strict=True):
        with reading(f"{one.sender} of the process group"):
            counts.append(unpack_flags(one.plan.layout, one.payload, row))
    add_sums = partial(cpu_kernel(kernel).add_sums, weights=weights, mine=mine)
    if plan.compressed and len(plan.sizes) == 1 and plan.sizes[0] > AT_ONCE:
        ((begin, _),) = plan.bounds
        for start, stop, sent in _stretches(plan.sizes[0], flags, arrived):
            owns, totals = bucket.parts([(begin + start, begin + stop)])
            add_sums(totals, owns or None, [0], sent)
        return
    sums = [sum(of_sender) for of_sender in counts]
    values = torch.empty(sum(sums), dtype=torch.float32)
    for one, own_counts, own in zip(arrived, counts, values.split_with_sizes(sums), strict=True):
        unpack_values(one.plan.layout, one.payload, own_counts, own)
        _check_finite(one, own)
    first = [plan.starts_in_payload[index] for index in plan.compressed]
    owns, totals = bucket.parts([plan.bounds[index] for index in plan.compressed])
    add_sums(totals, owns or None, first, Sent(flags, values, sums))
    if plan.dense:
        _add_dense(plan, bucket, arrived, weights, mine)


def _stretches(size: int, flags: Tensor, arrived: Sequence[SentPayload]) -> Iterator[tuple[int, int, Sent]]:
    """What is sent of a large tensor, a stretch at a time: all values together would take more than the weights.

    Each is valid until the next is asked for.
    """
    cursors = [0] * len(arrived)
    room = flags.new_zeros(len(arrived), flags_num_bytes(AT_ONCE))
    memory = torch.empty(8 + len(arrived) * AT_ONCE, dtype=torch.float32)
    for start in range(0, size, AT_ONCE):
        stop = min(start + AT_ONCE, size)
        packed = flags[:, start // 8 : (stop + 7) // 8]
        room[:, : packed.shape[1]] = packed
        counts = [count_flags(row, [stop - start])[0] for row in room]
        # The last first: an entry may write over the last ones before it.
        place = 8 + sum(counts)
        values = memory[8:place]
        for one, cursor, count in reversed([*zip(arrived, cursors, counts, strict=True)]):
            place -= count
            unpack_stretch(one.plan.layout, one.payload, cursor, count, memory, place)
            _check_finite(one, memory[place : place + count])
        cursors = [cursor + count for cursor, count in zip(cursors, counts, strict=True)]
        yield start, stop, Sent(room, values, counts)


def _check_finite(one: SentPayload, values: Tensor) -> None:
    # One value that is infinite or NaN makes the scale so.
    layout = one.plan.layout
    if not is_finite(read_scales(layout, one.payload) if layout.num_scales else values):
        name_broken_sender(one.sender)


def _add_dense(plan: BucketPlan, bucket: Bucket, arrived: Sequence[SentPayload], weights: Tensor, mine: int) -> None:
    sent = []
    for one in arrived:
        layout = one.plan.layout
        # In memory of its own, because a view as another dtype has to be aligned.
        sent.append(one.payload[layout.num_bytes - layout.dense_bytes :].clone().view(plan.dtype))
        if not is_finite(sent[-1]):
            name_broken_sender(one.sender)
    bounds, sizes = [plan.bounds[index] for index in plan.dense], [plan.sizes[index] for index in plan.dense]
    summed = [dense.to(plan.residual_dtype) for dense in sent[: len(weights) - 1]]
    mean = sum(summed[1:], start=summed[0]) * weights[-1]
    owns, totals = bucket.parts(bounds)
    torch._foreach_add_(totals, list(mean.split(sizes)))
    if owns:
        if mine >= 0:
            torch._foreach_sub_(owns, list(sent[mine].to(plan.residual_dtype).split(sizes)))
        torch._foreach_add_(owns, list(mean.split(sizes)))


@lru_cache(maxsize=256)
def name_broken_sender(sender: str) -> None:
    """Warn once, on rank 0, that a rank has sent infinite or NaN numbers."""
    rank_zero_warn(
        f"{sender} of the process group are infinite or NaN, and so are the weights of all ranks from now on. Look at"
        " the loss and the data of that rank. A loss scaler skips such a step by itself."
    )


def is_finite(values: Tensor) -> bool:
    """Whether all values and their sum are finite: the cheapest check."""
    return not values.numel() or math.isfinite(float(values.sum()))
