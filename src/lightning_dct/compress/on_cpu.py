"""Packs one bucket, and adds what all senders have sent of it, on a CPU: in plain torch or in loops
of numba.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_dct.compress.bucket_plan import (
    Bucket,
    BucketPlan,
    ExchangeContext,
    Received,
)
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.compress.gains import gain_of, gains_of
from lightning_dct.compress.threshold import GUARD_RESELECT, nudge
from lightning_dct.kernels import cpu_kernel, weights_by_senders
from lightning_dct.kernels.plain import Sent
from lightning_dct.wire import payload as wire
from lightning_dct.wire.positions import PayloadError, reading


def compress_bucket(
    feedback: ErrorFeedback,
    bucket: Bucket,
    plan: BucketPlan,
    used: tuple[int, ...],
    deferred: set[int],
    context: ExchangeContext,
) -> tuple[Tensor, int]:
    """Pack the payloads of a bucket, and count the entries; see
    :func:`~lightning_dct.compress.codec.compress`.

    ``used`` are the indices of the compressed tensors that send something.
    """
    thresholds = feedback.thresholds
    kernel = cpu_kernel(feedback.kernel)
    numbers = [plan.compressed.index(index) for index in used] if deferred else range(len(used))
    first = [plan.first[number] for number in numbers]
    counts = [0] * len(plan.compressed)
    inputs, references = bucket.parts([plan.bounds[index] for index in used])
    (names, targets), sizes = plan.of_tensors(used), [plan.sizes[index] for index in used]
    taus = [
        thresholds.get(name, target) or 0.0 for name, target in zip(names, targets, strict=True)
    ]
    flags = torch.zeros(sum(plan.flag_bytes), dtype=torch.uint8)
    before = [base.clone() for base in references if bucket.ranks_keep_unsent]
    values, reached = kernel.select(inputs, references, first, taus, bucket.scale, flags)
    # The capacity is fixed, because collectives need equal sizes.
    values, left, limits = kernel.fit(flags, first, sizes, values, reached, targets)
    tensors = zip(numbers, names, sizes, targets, taus, reached, left, limits, strict=True)
    for number, name, size, target, tau, count, kept, limit in tensors:
        counts[number] = kept
        if feedback.adapt_threshold and limit < math.inf:
            thresholds.set(
                name,
                target,
                limit if count > GUARD_RESELECT * target else nudge(tau, count, target, size),
            )
    parts = plan.parts or (plan,)
    each = iter(counts)
    of_parts = [list(islice(each, len(part.compressed))) for part in parts]
    sums = [*map(sum, of_parts)]
    before_part = 0
    sent = []
    # In the memory of the values, which are not needed any more.
    read = (
        values
        if values.dtype == torch.float32
        else torch.empty(values.numel(), dtype=torch.float32)
    )
    split = (
        flags.split_with_sizes(plan.flag_bytes),
        values.split_with_sizes(sums),
        read.split_with_sizes(sums),
    )
    for part, of_part, own_flags, own, out in zip(parts, of_parts, *split, strict=True):
        dense = take_dense(bucket, part, {index - before_part for index in deferred})
        sent.append(
            wire.pack_payload(
                part.layout, own_flags, own, of_part, dense, context.tag, feedback.kernel
            )
        )
        if bucket.scale is not None or context.dropped:
            wire.unpack_values(part.layout, sent[-1], of_part, out, feedback.kernel)
        before_part += len(part.names)
    as_read = Sent(flags[None], read, [values.numel()])
    if bucket.scale is not None:
        kernel.subtract(references, first, as_read)
    elif context.dropped:
        kernel.decay(inputs, references, first, as_read, context.dropped)
    if before:
        counted = [torch.zeros_like(old) for old in before]
        kernel.add_sums(
            counted, None, first, as_read, weights_by_senders(1, 1.0, False, plan.residual_dtype)
        )
        for base, old, one in zip(references, before, counted, strict=True):
            base.copy_(torch.where(one != 0, base, old))
    return torch.cat(sent) if plan.parts else sent[0], values.numel()


def take_dense(bucket: Bucket, plan: BucketPlan, deferred: set[int]) -> Tensor:
    """The tensors sent dense (shape ``[dense bytes]``, uint8), zeros for deferred ones; rounding
    stays in residuals.
    """
    bounds = [plan.bounds[index] for index in plan.dense if index not in deferred]
    if not bounds:
        whole = sum(plan.sizes[index] for index in plan.dense)
        return bucket.references[0].new_zeros(whole, dtype=plan.dtype).view(torch.uint8)
    sizes, (inputs, residuals) = [stop - start for start, stop in bounds], bucket.parts(bounds)
    if bucket.scale is None:
        sent = torch.cat(torch._foreach_sub(inputs, residuals))
    else:
        before = torch.cat(residuals)
        new = torch.cat(inputs)
        accumulated = before + new.to(before.dtype) * bucket.scale
        sent = accumulated.to(plan.dtype)
        left = accumulated - sent
        torch._foreach_copy_(
            residuals, torch.where(left.abs() < math.inf, left, before).split(sizes)
        )
    parts = iter(sent.split(sizes))
    dense = [
        sent.new_zeros(plan.sizes[index]) if index in deferred else next(parts)
        for index in plan.dense
    ]
    return torch.cat(dense).view(torch.uint8)


def add_payloads(feedback: ErrorFeedback, received: Received, bucket: Bucket, label: str) -> None:
    """Add payloads; see :func:`~lightning_dct.compress.codec.apply`."""
    payloads, plan, factor, own, _, context = received
    parts = plan.parts or (plan,)
    sources = [(plan, row) for row in payloads]
    mine = -1
    if bucket.inputs and own is not None:
        mine = own if isinstance(own, int) else len(payloads)
        sources += [(own.plan, own.payloads[0])] if isinstance(own, Received) else []
    flags = payloads.new_zeros(len(sources), sum(plan.flag_bytes))
    # One rank's payload after the other in each row.
    senders = [f"{label} from rank {rank}" for rank in range(len(payloads) * len(parts))]
    senders += ["This rank's own payload"] * (len(sources) * len(parts) - len(senders))
    arrived = [
        (part, payload)
        for source_plan, payload_of_all in sources
        for part, payload in source_plan.divide(payload_of_all)
    ]
    counts = []
    rooms = flags.view(-1).split_with_sizes(plan.flag_bytes * len(sources))
    for sender, (part, payload), room in zip(senders, arrived, rooms, strict=True):
        with reading(f"{sender} of the process group"):
            counts.append(
                wire.unpack_flags(part.layout, payload, room, context.tag, feedback.kernel)
            )
            words, beyond = part.beyond
            if (room.numpy().view("uint32")[words] & beyond).any():
                raise PayloadError(
                    "the positions are corrupt: some are beyond the end of their tensor"
                )
    by = len(parts)
    sums = [sum(of_payload) for of_payload in counts]
    values = torch.empty(sum(sums), dtype=torch.float32)
    for sender, (part, payload), own_counts, out in zip(
        senders, arrived, counts, values.split(sums), strict=True
    ):
        wire.unpack_values(part.layout, payload, own_counts, out, feedback.kernel)
        # One value that is infinite or NaN makes the scale so.
        if not is_finite(wire.read_scales(part.layout, payload) if part.layout.num_scales else out):
            name_broken_sender(sender)
    owns, totals = bucket.parts([plan.bounds[index] for index in plan.compressed])
    weights = weights_by_senders(len(payloads), factor, context.gains is None, plan.residual_dtype)
    gains = gains_of(plan, context.gains, torch.device("cpu"))
    sent = Sent(flags, values, [sum(sums[start : start + by]) for start in range(0, len(sums), by)])
    cpu_kernel(feedback.kernel).add_sums(
        totals, owns or None, plan.first, sent, weights, mine, gains
    )
    for number, part in enumerate(parts):
        if part.dense:
            # In memory of its own, because a view as another dtype has to be aligned.
            dense = [
                wire.read_dense(one.layout, row).clone().view(plan.dtype)
                for one, row in arrived[number::by]
            ]
            for sender, own_dense in zip(senders[number::by], dense, strict=True):
                if not is_finite(own_dense):
                    name_broken_sender(sender)
            add_dense(part, bucket, dense, received, mine)


def add_dense(
    plan: BucketPlan, bucket: Bucket, sent: Sequence[Tensor], received: Received, mine: int
) -> None:
    """Add the mean of tensors that are sent dense (all of a sender's, flattened), as
    :func:`add_payloads`, on any device.

    ``plan`` is that of the received payloads, or of a part of them. This rank's own payload may
    follow those that are summed; ``mine`` is its number, -1 if there is none.
    """
    bounds = [plan.bounds[index] for index in plan.dense]
    sizes = [plan.sizes[index] for index in plan.dense]
    ranks = len(received.payloads)
    gains = received.context.gains
    summed = [dense.to(plan.residual_dtype) for dense in sent[:ranks]]
    total = sum(summed[1:], start=summed[0])
    weight = float(
        weights_by_senders(ranks, received.factor, gains is None, plan.residual_dtype).numpy()[-1]
    )
    means = [one * weight for one in total.split(sizes)]
    if gains:
        means = [
            mean * gain_of(plan, index, gains, mean)
            for index, mean in zip(plan.dense, means, strict=True)
        ]
    owns, totals = bucket.parts(bounds)
    torch._foreach_add_(totals, means)
    if owns:
        if mine >= 0:
            torch._foreach_sub_(owns, list(sent[mine].to(plan.residual_dtype).split(sizes)))
        torch._foreach_add_(owns, means)


@lru_cache(maxsize=256)
def name_broken_sender(sender: str) -> None:
    """Warn once, on rank 0, that a rank has sent infinite or NaN numbers."""
    rank_zero_warn(
        f"{sender} of the process group are infinite or NaN: the weights of all ranks are so from"
        " now on. Stop the run, and look at the loss and the data of that rank. A loss scaler skips"
        " such a step by itself."
    )


def is_finite(values: Tensor) -> bool:
    """Whether all values and their sum are finite: the cheapest check."""
    return not values.numel() or math.isfinite(float(values.sum()))
