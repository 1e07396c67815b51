"""The way of one bucket on a CPU: what is new -> threshold -> flags and values -> payload, and back. No communication.

    gradients   a = e + g        e = a - unpack(payload)               e: the residual
    updates     a = w - S        nothing to write                      w: own weights, S: the shared ones

    rank r      flag |a| >= tau      pack ---+
                                             |  payloads as bytes, by any exchange
                                             v
    gradients   g = (1 / W) * sum over ranks of unpack(payload)
    updates     S += m,  w += m - unpack(own payload)                  m = (f / W) * the same sum

This is the data-parallel half of Dynamic Communication Thresholding (Gupta et al., KDD 2021, section 3.1), with a
threshold for each tensor. :mod:`lightning_dct.compress.on_device` does the same for a GPU.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dct.compress.adding import add_to_bucket, is_finite, name_broken_sender
from lightning_dct.compress.awaited import must_not_wait
from lightning_dct.compress.bucket_plan import Bucket, BucketPlan, Compressed, Received, SentPayload
from lightning_dct.compress.memory import Memory
from lightning_dct.compress.on_device import OnDevice, Sums, add_payloads, send_selected
from lightning_dct.compress.threshold import (
    GUARD_RESELECT,
    Thresholds,
    limit_of,
    nudge,
    sample_of,
    threshold_from,
)
from lightning_dct.kernels import cpu_kernel, weights_by_senders
from lightning_dct.kernels.plain import Sent, keep_some
from lightning_dct.wire.payload import FINGERPRINT, pack, unpack_values
from lightning_dct.wire.payloads_on_device import Verdict
from lightning_dct.wire.positions import PayloadError


def compress(memory: Memory, bucket: Bucket, plan: BucketPlan, deferred: set[int], lost: float = 0.0) -> Compressed:
    """Pack the entries that reach their threshold.

    Of gradients, the rest is in the residual afterwards: ``decoded(payload) + residual`` equals the earlier ``residual
    + scale * gradient``. Infinite and NaN entries go into the payload, and the residual keeps its old value. Of
    weights, nothing changes.

    Args:
        memory: Missing thresholds are selected from this bucket.
        bucket: What may be sent.
        plan: How each tensor is sent.
        deferred: Indices of tensors of which nothing is sent.
        lost: Share of what is not sent that own weights lose.
    """
    on_device = must_not_wait(bucket.bases[0].device)
    parts = plan.groups if on_device else plan.parts or (plan,)
    if parts != (plan,):
        sent = []
        for part in parts:
            sent.append(compress(memory, bucket, part, deferred, lost))
            deferred = {index - len(part.names) for index in deferred}
        payloads, entries, dense_of = zip(*sent, strict=True)
        counts = torch.cat(entries) if on_device else sum(entries)
        return Compressed(torch.cat(payloads), counts, sum(dense_of))
    used = tuple([index for index in plan.compressed if index not in deferred]) if deferred else plan.compressed
    thresholds = memory.thresholds
    memory.selected |= _select_missing(bucket, plan, used, thresholds)
    dense = _take_dense(bucket, plan, deferred)
    dense_entries = dense.numel() // plan.dtype.itemsize
    if on_device:
        payload, sent_by_part = send_selected(bucket, plan, used, dense, thresholds, memory.guard)
        if lost and plan.compressed:
            _decay_on_device(bucket, plan, payload, lost)
        return Compressed(payload, sent_by_part, dense_entries)
    bounds, first = [plan.bounds[index] for index in used], [plan.starts_in_payload[index] for index in used]
    news, bases = bucket.parts(bounds)
    taus = [thresholds.get(plan.names[index], plan.targets[index]) or 0.0 for index in used]
    flags = torch.zeros(plan.layout.flags_num_bytes, dtype=torch.uint8)
    before = [base.clone() for base in bases if bucket.others_keep]
    values, reached = cpu_kernel(memory.kernel).select(news, bases, first, taus, bucket.scale, flags)
    kept = list(values.split(reached))
    broken = [] if is_finite(values) else [number for number, part in enumerate(kept) if not part.isfinite().all()]
    counts = [0] * len(plan.sizes)
    for number, (index, tau, count) in enumerate(zip(used, taus, reached, strict=True)):
        target, where = plan.targets[index], (flags, first[number], plan.sizes[index])
        if number in broken:
            # Only the infinite and NaN entries are sent, because the step is lost anyway.
            kept[number] = keep_some(*where, kept[number], kept[number].isfinite().logical_not_())
        if kept[number].numel() > target:
            # The capacity is fixed, because collectives need equal sizes.
            limit = 0.0 if number in broken else limit_of(kept[number], plan.sizes[index], target)
            kept[number] = cpu_kernel(memory.kernel).thin(*where, kept[number], target, limit)
        counts[index] = kept[number].numel()
        if memory.guard and number not in broken:
            far = count > GUARD_RESELECT * target
            thresholds.set(plan.names[index], target, limit if far else nudge(tau, count, target, plan.sizes[index]))
    if sum(counts) < values.numel():
        values = torch.cat(kept) if len(kept) > 1 else kept[0]
    payload = pack(plan.layout, flags, values, counts, dense)
    if bucket.scale is not None or lost:
        # In the memory of the values, which are not needed any more.
        out = values if values.dtype == torch.float32 else None
        as_read = Sent(flags[None], unpack_values(plan.layout, payload, counts, out), [values.numel()])
        if bucket.scale is not None:
            cpu_kernel(memory.kernel).subtract(bases, first, as_read)
            if before:
                counted = [torch.zeros_like(old) for old in before]
                ones = weights_by_senders(1, 1.0, 1.0, plan.residual_dtype)
                cpu_kernel(memory.kernel).add_sums(counted, None, first, as_read, ones)
                for base, old, one in zip(bases, before, counted, strict=True):
                    base.copy_(torch.where(one != 0, base, old))
        else:
            cpu_kernel(memory.kernel).decay(news, bases, first, as_read, lost)
    return Compressed(payload, values.numel(), dense_entries)


def mark(payloads: Tensor, plan: BucketPlan, tag: int) -> Tensor:
    """Mix a tag into the fingerprints of payloads in place, or take the same one out again; 0 changes nothing.

    ``payloads`` (uint8, ``[..., bytes]``) are as the plan says. The tag has 15 bits.
    """
    if not tag:
        return payloads
    bits = torch.full((1,), tag, dtype=torch.int16, device=payloads.device).view(torch.uint8)
    if plan.parts and must_not_wait(payloads.device):
        places = OnDevice.of(plan, payloads.device).fingerprints
        return payloads.index_copy_(-1, places, payloads[..., places] ^ bits.repeat(len(plan.parts)))
    place = FINGERPRINT
    for part in plan.parts or (plan,):
        payloads[..., place : place + 2].bitwise_xor_(bits)
        place += part.layout.num_bytes
    return payloads


def decompress(memory: Memory, received: Received, buffer: Tensor) -> Tensor:
    """Overwrite a bucket with the weighted sum of all ranks' payloads.

    Every rank adds the same payloads in the same order, so replicas stay bitwise identical.

    Args:
        memory: Each entry's weight follows from its ``lengthening`` and the number of ranks that have sent it; see
            :func:`~lightning_dct.kernels.weights_by_senders`.
        received: The payloads.
        buffer: Shape ``[n]``: the flattened bucket. Overwritten where the plan's tensors lie.

    Raises:
        PayloadError: A payload is corrupt or has another plan; the message names the rank. On a GPU
            ``memory.awaited`` raises it later.
    """
    plan = received.plan
    total = buffer if buffer.dtype == plan.residual_dtype else buffer.to(plan.residual_dtype)
    if must_not_wait(buffer.device):
        for group, sums in _add_on_device(memory, received._replace(own=None)):
            if sums.means:
                torch._foreach_copy_([total[start:stop] for start, stop in group.bounds], sums.means)
    else:
        for start, stop in plan.bounds:
            total[start:stop].zero_()
        apply(memory, received, Bucket([], [total], None))
    return total if total is buffer else buffer.copy_(total)


def decompress_own(memory: Memory, received: Received, mean: Tensor) -> Tensor:
    """What this rank has sent of a bucket, as far as it counts: shape ``[n]``, like the ``mean``."""
    own = received.own
    assert own is not None
    payload, plan, _ = own if isinstance(own, SentPayload) else SentPayload(received.payloads[own], received.plan)
    what = received.what or "This rank's own updates"
    alone = received._replace(payloads=payload.unsqueeze(0), plan=plan, factor=1.0, own=None, what=what)
    sent = decompress(memory, alone, torch.empty_like(mean))
    return torch.where(counting(mean, plan), sent, 0.0) if isinstance(own, SentPayload) else sent


def counting(sums: Tensor, plan: BucketPlan) -> Tensor:
    """Which entries of a sum have been sent: all of a dense tensor, else those that are not zero. Bool, ``[n]``."""
    sent = sums != 0
    for index in plan.dense:
        sent[slice(*plan.bounds[index])] = True
    return sent


def apply(memory: Memory, received: Received, bucket: Bucket) -> None:
    """Add the weighted sum of all ranks' payloads to the bases of a bucket.

    Own weights, if the bucket has any, change by as much, less what this rank has sent, if it has. :func:`decompress`
    describes the arguments and errors.
    """
    if must_not_wait(received.payloads.device):
        for group, sums in _add_on_device(memory, received):
            news, bases = bucket.parts(group.bounds)
            torch._foreach_add_(bases, sums.means)
            if sums.own:
                torch._foreach_sub_(news, sums.own)
            torch._foreach_add_(news, sums.means)
        return
    _, plan, factor, own, _ = received
    for part, rows, senders, own_part in _parts_of(received, memory.what, lambda plan: plan.parts or (plan,)):
        arrived = [SentPayload(row, part, sender) for row, sender in zip(rows, senders, strict=True)]
        mine = own if bucket.news and isinstance(own, int) else -1
        if bucket.news and own_part is not None:
            mine = len(rows)
            arrived.append(own_part)
        weights = weights_by_senders(len(rows), factor, memory.lengthening, plan.residual_dtype)
        add_to_bucket(part, bucket, arrived, weights, mine, memory.kernel)


def _decay_on_device(bucket: Bucket, plan: BucketPlan, payload: Tensor, lost: float) -> None:
    """Take the share ``lost`` of what a payload does not send from this rank's own weights."""
    sent = add_payloads(payload.unsqueeze(0), plan, 1.0, lengthening=1.0).means
    bounds = [plan.bounds[index] for index in plan.compressed]
    news, bases = bucket.parts(bounds)
    left = torch._foreach_sub(news, bases)
    torch._foreach_sub_(left, [sent[index] for index in plan.compressed])
    torch._foreach_mul_(left, lost)
    torch._foreach_sub_(news, left)


def _add_on_device(memory: Memory, received: Received) -> Iterator[tuple[BucketPlan, Sums]]:
    """What payloads bring of the tensors that a device handles at once, group by group."""
    _, _, factor, own, _ = received
    place = own if isinstance(own, int) else None
    for group, payloads, senders, own_part in _parts_of(received, memory.what, lambda plan: plan.groups):
        sums = add_payloads(payloads.contiguous(), group, factor, memory.lengthening, place)
        if own_part is not None:
            mine = add_payloads(own_part.payload.unsqueeze(0), own_part.plan, 1.0, lengthening=1.0).means
            if group.compressed:
                marks = torch._foreach_abs(torch._foreach_sign([sums.means[index] for index in group.compressed]))
                torch._foreach_mul_([mine[index] for index in group.compressed], marks)
            sums = sums._replace(own=mine)
        memory.awaited.when_known(sums.told, partial(_check_received, senders, sums.verdicts))
        yield group, sums


class _Part(NamedTuple):
    """What has been received of a part of a bucket."""

    plan: BucketPlan
    payloads: Tensor  # shape `[rows, plan.num_bytes]`, uint8
    senders: list[str]  # of one row after the other, payload by payload
    own: SentPayload | None  # what this rank has sent, if that is not among them


def _parts_of(received: Received, what: str, split: Callable[[BucketPlan], Sequence[BucketPlan]]) -> Iterator[_Part]:
    """What has been received of each of the plans that ``split`` makes of the whole one.

    Raises:
        PayloadError: The payloads have another size than the plan.
    """
    payloads, plan, _, own, _ = received
    whose, said, plans = plan.whose or (0,), received.what or what, split(plan)
    if payloads.shape[1] != plan.num_bytes:
        raise PayloadError(
            f"{said} from rank 0 of the process group: a payload has {payloads.shape[1]} bytes where its layout has"
            f" {plan.num_bytes}: use the same model, settings and version of lightning_dct on every rank."
        )
    owns: list[SentPayload | None] = [None] * len(plans)
    if isinstance(own, SentPayload):
        own_plans = split(own.plan)
        sent = own.payload.split([part.num_bytes for part in own_plans])
        owns = [own._replace(payload=payload, plan=part) for payload, part in zip(sent, own_plans, strict=True)]
    first = 0
    columns = payloads.split([part.num_bytes for part in plans], dim=1)
    for part, rows, own_part in zip(plans, columns, owns, strict=True):
        here = whose[first : first + (len(part.parts) or 1)]
        first += len(here)
        ranks = [row * (max(whose) + 1) + rank for row in range(len(rows)) for rank in here]
        yield _Part(part, rows, [f"{said} from rank {rank}" for rank in ranks], own_part)


def _check_received(senders: list[str], verdicts: Callable[[Sequence[int]], list[Verdict]], told: list[int]) -> None:
    found = [*zip(senders, verdicts(told), strict=True)]
    for sender in (sender for sender, verdict in found if verdict.is_valid and not verdict.is_finite):
        name_broken_sender(sender)
    if wrong := [sender for sender, verdict in found if not verdict.is_valid]:
        raise PayloadError(
            f"{', '.join(wrong)} of the process group: the payload is corrupt, or was made for another model, other"
            " settings or in another step. Use the same model, settings and version of lightning_dct on every rank, and"
            " let all ranks step the same optimizers in the same order. A run on CPUs reports in more detail what"
            " differs."
        )


def _select_missing(bucket: Bucket, plan: BucketPlan, used: tuple[int, ...], thresholds: Thresholds) -> bool:
    """Select missing thresholds, and return whether there were any. This waits for a GPU."""
    missing = [index for index in used if thresholds.targets.get(plan.names[index]) != plan.targets[index]]
    for index in missing:
        size, target = plan.sizes[index], plan.targets[index]
        sampled = bucket.entries(plan.bounds[index], sample_of(size, target))
        thresholds.set(plan.names[index], target, threshold_from(sampled, size, target))
    return bool(missing)


def _take_dense(bucket: Bucket, plan: BucketPlan, deferred: set[int]) -> Tensor:
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
