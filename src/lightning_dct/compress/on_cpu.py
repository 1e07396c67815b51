"""Packs one bucket, and adds what all senders have sent of it, on a CPU: in plain torch or in loops of numba."""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_dct.compress.bucket_plan import Bucket, BucketPlan, Compressed, Sending, SentPayload
from lightning_dct.compress.memory import Memory
from lightning_dct.compress.threshold import GUARD_RESELECT, limit_of, nudge
from lightning_dct.kernels import cpu_kernel, weights_by_senders
from lightning_dct.kernels.plain import Sent, keep_some
from lightning_dct.wire import payload as wire
from lightning_dct.wire.positions import PayloadError, reading


def pack(memory: Memory, bucket: Bucket, plan: BucketPlan, deferred: set[int], how: Sending) -> Compressed:
    """Pack one payload; see :func:`~lightning_dct.compress.codec.compress`."""
    used = [(number, index) for number, index in enumerate(plan.compressed) if index not in deferred]
    thresholds, kernel = memory.thresholds, cpu_kernel(memory.kernel)
    dense = take_dense(bucket, plan, deferred)
    first = [plan.first[number] for number, _ in used]
    news, bases = bucket.parts([plan.bounds[index] for _, index in used])
    taus = [thresholds.get(plan.names[index], plan.targets[index]) or 0.0 for _, index in used]
    flags = torch.zeros(plan.layout.flags_num_bytes, dtype=torch.uint8)
    before = [base.clone() for base in bases if bucket.others_keep]
    values, reached = kernel.select(news, bases, first, taus, bucket.scale, flags)
    kept = list(values.split(reached))
    broken = [] if is_finite(values) else [number for number, part in enumerate(kept) if not part.isfinite().all()]
    counts = [0] * len(plan.compressed)
    for place, ((number, index), tau, count) in enumerate(zip(used, taus, reached, strict=True)):
        size, target, where = plan.sizes[index], plan.targets[index], (flags, first[place], plan.sizes[index])
        if place in broken:
            # Only the infinite and NaN entries are sent, because the step is lost anyway.
            kept[place] = keep_some(*where, kept[place], kept[place].isfinite().logical_not_())
        if kept[place].numel() > target:
            # The capacity is fixed, because collectives need equal sizes.
            limit = 0.0 if place in broken else limit_of(kept[place], size, target)
            kept[place] = kernel.thin(*where, kept[place], target, limit)
        counts[number] = kept[place].numel()
        if memory.adapt_threshold and place not in broken:
            far = count > GUARD_RESELECT * target
            thresholds.set(plan.names[index], target, limit if far else nudge(tau, count, target, size))
    if sum(counts) < values.numel():
        values = torch.cat(kept) if len(kept) > 1 else kept[0]
    payload = wire.pack(plan.layout, flags, values, counts, dense, how.tag)
    if bucket.scale is not None or how.lost:
        # In the memory of the values, which are not needed any more.
        out = values if values.dtype == torch.float32 else None
        as_read = Sent(flags[None], wire.unpack_values(plan.layout, payload, counts, out), [values.numel()])
        if bucket.scale is not None:
            kernel.subtract(bases, first, as_read)
            if before:
                counted = [torch.zeros_like(old) for old in before]
                kernel.add_sums(counted, None, first, as_read, weights_by_senders(1, 1.0, 1.0, plan.residual_dtype))
                for base, old, one in zip(bases, before, counted, strict=True):
                    base.copy_(torch.where(one != 0, base, old))
        else:
            kernel.decay(news, bases, first, as_read, how.lost)
    return Compressed(payload, values.numel(), dense.numel() // plan.dtype.itemsize)


def take_dense(bucket: Bucket, plan: BucketPlan, deferred: set[int]) -> Tensor:
    """The tensors sent dense (shape ``[dense bytes]``, uint8), zeros for deferred ones; rounding stays in residuals."""
    bounds = [plan.bounds[index] for index in plan.dense if index not in deferred]
    if not bounds:
        whole = sum(plan.sizes[index] for index in plan.dense)
        return bucket.bases[0].new_zeros(whole, dtype=plan.dtype).view(torch.uint8)
    sizes, (news, residuals) = [stop - start for start, stop in bounds], bucket.parts(bounds)
    if bucket.scale is None:
        sent = torch.cat(torch._foreach_sub(news, residuals))
    else:
        before, new = torch.cat(residuals), torch.cat(news)
        accumulated = before + new.to(before.dtype) * bucket.scale
        sent = accumulated.to(plan.dtype)
        left = accumulated - sent
        torch._foreach_copy_(residuals, torch.where(left.abs() < math.inf, left, before).split(sizes))
    if len(bounds) == len(plan.dense):
        return sent.view(torch.uint8)
    parts = iter(sent.split(sizes))
    zero = sent.new_zeros(1)
    dense = [zero.expand(plan.sizes[index]) if index in deferred else next(parts) for index in plan.dense]
    return torch.cat(dense).view(torch.uint8)


def add(
    plan: BucketPlan,
    bucket: Bucket,
    arrived: Sequence[SentPayload],
    weights: Tensor,
    mine: int,
    tag: int,
    kernel: str,
) -> None:
    """Add the weighted sum of what senders have sent; see :func:`~lightning_dct.compress.codec.apply`.

    ``arrived`` are payloads of one part of a bucket. ``mine`` is the number of this rank's own one, or -1. For the
    weights see :func:`~lightning_dct.kernels.plain.add_sums`.
    """
    flags = arrived[0].payload.new_zeros(len(arrived), plan.layout.flags_num_bytes)
    counts = []
    for one, row in zip(arrived, flags, strict=True):
        with reading(f"{one.sender} of the process group"):
            counts.append(wire.unpack_flags(one.plan.layout, one.payload, row, tag))
            words, beyond = plan.beyond
            if (row.numpy().view("uint32")[words] & beyond).any():
                raise PayloadError("the positions are corrupt: some are beyond the end of their tensor")
    sums = [sum(of_sender) for of_sender in counts]
    values = torch.empty(sum(sums), dtype=torch.float32)
    for one, own_counts, own in zip(arrived, counts, values.split_with_sizes(sums), strict=True):
        layout = one.plan.layout
        wire.unpack_values(layout, one.payload, own_counts, own)
        # One value that is infinite or NaN makes the scale so.
        if not is_finite(wire.read_scales(layout, one.payload) if layout.num_scales else own):
            name_broken_sender(one.sender)
    owns, totals = bucket.parts([plan.bounds[index] for index in plan.compressed])
    sent = Sent(flags, values, sums)
    cpu_kernel(kernel).add_sums(totals, owns or None, plan.first, sent, weights, mine)
    if plan.dense:
        dense = []
        for one in arrived:
            # In memory of its own, because a view as another dtype has to be aligned.
            dense.append(wire.read_dense(one.plan.layout, one.payload).clone().view(plan.dtype))
            if not is_finite(dense[-1]):
                name_broken_sender(one.sender)
        add_dense(plan, bucket, dense, weights, mine)


def add_dense(plan: BucketPlan, bucket: Bucket, sent: Sequence[Tensor], weights: Tensor, mine: int) -> None:
    """Add the mean of tensors that are sent dense (all of a sender's, flattened), as :func:`add`, on any device."""
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
