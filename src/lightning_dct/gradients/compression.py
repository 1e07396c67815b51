"""The way of one bucket: gradient -> residual -> threshold -> kernel -> payload, and back. No communication here.

    rank r     a = g + e        select |a| >= tau      pack ---+
                    |                                          |  all-gather of uint8 payloads
               e = a - unpack(payload)                         |
                                                               v
    every rank                g = (1/W) * sum over ranks of unpack(payload)

This is the data-parallel half of Dynamic Communication Thresholding (Gupta et al., KDD 2021, section 3.1), with a
threshold for each tensor. :mod:`lightning_dct.gradients.on_device` does the same for a GPU.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_dct.gradients.awaited import Awaited
from lightning_dct.gradients.on_device import add_payloads, send_largest
from lightning_dct.gradients.plan import BucketPlan
from lightning_dct.kernels import select, sum_entries
from lightning_dct.kernels.reference import Selection
from lightning_dct.threshold import GUARD_RESELECT, Thresholds, keep_largest, kth_magnitude, nudge
from lightning_dct.wire import PayloadError, pack, unpack
from lightning_dct.wire.bits import nonzero_indices

# Devices whose host must not wait for numbers. Tests add the CPU.
WITHOUT_WAITING = {"cuda"}


class Compressed(NamedTuple):
    """What is sent of a bucket.

    Attributes:
        payload: Shape ``[plan.layout.num_bytes]``, uint8; for a plan with parts, their payloads one after the other.
        num_entries: Entries in the payload; for a GPU a tensor on it, shape ``[]``.
        selected: Whether any threshold was selected.
    """

    payload: Tensor
    num_entries: int | Tensor
    selected: bool


def compress(
    buffer: Tensor,
    residual: Tensor,
    plan: BucketPlan,
    deferred: set[int],
    thresholds: Thresholds,
    gradient_scale: float,
    guard: bool,
    kernel: str = "auto",
) -> Compressed:
    """Pack the largest entries and leave the rest in the residual.

    Afterwards ``decoded(payload) + residual`` equals the earlier ``gradient_scale * buffer + residual``, except
    for infinite and NaN entries: they go into the payload, and the residual keeps its old value.

    Args:
        buffer: Shape ``[n]``: the flattened bucket. Not changed.
        residual: Shape ``[n]``, ``plan.residual_dtype``. Changed in place.
        plan: How each tensor is sent.
        deferred: Indices of tensors of which nothing is sent.
        thresholds: Missing ones are selected from this bucket.
        gradient_scale: Factor on the gradient: one over the loss scale of mixed-precision training.
        guard: Adjust the thresholds to the number of entries that have reached them.
        kernel: See :func:`~lightning_dct.kernels.select`.
    """
    on_device = buffer.device.type in WITHOUT_WAITING
    if plan.parts and not on_device:
        sent, settings = [], (thresholds, gradient_scale, guard, kernel)
        for part in plan.parts:
            sent.append(compress(buffer, residual, part, deferred, *settings))
            deferred = {index - len(part.names) for index in deferred}
        payloads, counts, selected_any = zip(*sent, strict=True)
        return Compressed(torch.cat(payloads), sum(counts), any(selected_any))
    used = tuple(index for index in plan.compressed if index not in deferred)
    selected = _select_missing(buffer, residual, plan, used, thresholds, gradient_scale)
    dense = _take_dense(buffer, residual, plan, deferred, gradient_scale)
    dense_entries = sum(plan.sizes[index] for index in plan.dense)
    if on_device:
        payload, count = send_largest(buffer, residual, plan, used, dense, thresholds, gradient_scale, guard)
        return Compressed(payload, count + dense_entries, selected)
    taus = [thresholds.get(plan.names[index], plan.targets[index]) or 0.0 for index in used]
    selection = select(buffer, residual, [plan.bounds[index] for index in used], taus, gradient_scale, kernel)
    positions, values = _fit(selection, plan, used, taus, thresholds, guard)
    payload, received = pack(plan.layout, plan.to_payload(positions), values, dense)
    left = values - received.to(values.dtype)
    if not _all_finite(left):
        finite = left.isfinite()
        positions, left = positions[finite], left[finite]
    residual.scatter_(0, positions, left)
    return Compressed(payload, values.numel() + dense_entries, selected)


def decompress(
    payloads: Tensor,
    buffer: Tensor,
    plan: BucketPlan,
    factor: float,
    awaited: Awaited,
    kernel: str = "auto",
    what: str = "Gradients",
    by_senders: bool = False,
) -> Tensor:
    """Overwrite a bucket with the weighted sum of all ranks' payloads.

    Every rank adds the same payloads in the same order, so replicas stay bitwise identical.

    Args:
        payloads: Shape ``[ranks, plan.layout.num_bytes]``, uint8, by rank. For a plan with parts a row holds one
            payload for each part, and each payload is from another rank, counted through all rows.
        buffer: Shape ``[n]``: the flattened bucket. Overwritten where the plan's tensors lie.
        plan: How each tensor was sent.
        factor: Weight of each rank: one over the world size, times the loss scale of mixed-precision training.
        awaited: For payloads on a GPU: reports later whether they are valid.
        kernel: See :func:`~lightning_dct.kernels.sum_entries`.
        what: What was sent, for error messages.
        by_senders: Multiply each entry by the square root of the number of ranks over the number that sent it.

    Raises:
        PayloadError: A payload is corrupt or has another plan; the message names the rank. On a GPU ``awaited`` raises
            it later.
    """
    total = buffer if buffer.dtype == plan.residual_dtype else buffer.to(plan.residual_dtype)
    parts = plan.parts or (plan,)
    senders = [f"{what} from rank {rank}" for rank in range(payloads.shape[0] * len(parts))]
    if buffer.device.type in WITHOUT_WAITING:
        valid = add_payloads(payloads, total, plan, factor, by_senders)
        awaited.when_known(valid.flatten(), partial(_check_valid, senders))
    else:
        sizes = [part.layout.num_bytes for part in parts]
        if payloads.shape[1] != sum(sizes):
            raise PayloadError(
                f"{senders[0]} of the process group: a payload has {payloads.shape[1]} bytes where its layout has"
                f" {sum(sizes)}: use the same model, settings and version of lightning_dct on every rank."
            )
        for index, (part, own) in enumerate(zip(parts, payloads.split(sizes, dim=1), strict=True)):
            _add_up(own, total, part, factor, kernel, senders[index :: len(parts)], by_senders)
    return total if total is buffer else buffer.copy_(total)


def _add_up(
    payloads: Tensor, total: Tensor, plan: BucketPlan, factor: float, kernel: str, senders: list[str], by_senders: bool
) -> None:
    received = []
    for payload, sender in zip(payloads.unbind(), senders, strict=True):
        try:
            received.append(unpack(plan.layout, payload))
        except PayloadError as error:
            raise PayloadError(f"{sender} of the process group: {error}.") from error
    dense_tensors = [dense.clone().view(plan.dtype) for _, _, dense in received]
    for (_, values, _), dense, sender in zip(received, dense_tensors, senders, strict=True):
        # The sum is finite only if all entries are; this is the cheapest check.
        if not math.isfinite(float(values.sum()) + float(dense.sum())):
            name_broken_sender(sender)
    entries = [(plan.to_bucket(positions), values) for positions, values, _ in received]
    segments = [(0, total.numel())] if plan.starts is None else plan.bounds
    sum_entries(total, segments, entries, factor, kernel, by_senders and len(entries) > 1)
    for dense in dense_tensors:
        for index, part in zip(plan.dense, dense.split([plan.sizes[index] for index in plan.dense]), strict=True):
            total[slice(*plan.bounds[index])].add_(part, alpha=factor)


@lru_cache(maxsize=256)
def name_broken_sender(sender: str) -> None:
    """Warn once, on rank 0, that a rank has sent infinite or NaN numbers."""
    rank_zero_warn(
        f"{sender} of the process group are infinite or NaN, and so are the weights of all ranks from now on. Look at"
        " the loss and the data of that rank. A loss scaler skips such a step by itself."
    )


def _check_valid(senders: list[str], valid: list[int]) -> None:
    wrong = [sender for sender, is_valid in zip(senders, valid, strict=True) if not is_valid]
    if wrong:
        raise PayloadError(
            f"{', '.join(wrong)} of the process group: the payload is corrupt, or was made for another model or other"
            " settings. Use the same model, settings and version of lightning_dct on every rank; a run on CPUs says"
            " more about what differs."
        )


def _select_missing(
    buffer: Tensor, residual: Tensor, plan: BucketPlan, used: tuple[int, ...], thresholds: Thresholds, scale: float
) -> bool:
    """Select missing thresholds, and return whether there were any. This waits for a GPU."""
    missing = [index for index in used if not thresholds.has(plan.names[index], plan.targets[index])]
    for index in missing:
        part = slice(*plan.bounds[index])
        accumulated = (buffer[part].to(residual.dtype) * scale).add_(residual[part])
        target = plan.targets[index]
        thresholds.set(plan.names[index], target, kth_magnitude(accumulated, target))
    return bool(missing)


def _fit(
    selection: Selection,
    plan: BucketPlan,
    used: tuple[int, ...],
    taus: list[float],
    thresholds: Thresholds,
    guard: bool,
) -> tuple[Tensor, Tensor]:
    """Cut a selection to the payload's capacity, keep each tensor's largest entries, and adjust the thresholds."""
    positions, values, counts = selection
    finite = None if _all_finite(values) else values.isfinite()
    # The capacity is fixed, because collectives need equal sizes.
    keep: Tensor | None = None
    stop = 0
    for index, tau, count in zip(used, taus, counts, strict=True):
        start, stop = stop, stop + count
        name, size, target = plan.names[index], plan.sizes[index], plan.targets[index]
        is_broken = finite is not None and not bool(finite[start:stop].all())
        if keep is None and (is_broken or count > target):
            keep = torch.ones_like(positions, dtype=torch.bool)
        if finite is not None and keep is not None and is_broken:
            # Only the infinite and NaN entries are sent, because the step is lost anyway.
            keep[start:stop] = False
            keep[start + nonzero_indices(~finite[start:stop])[:target]] = True
            continue
        smallest = tau
        if keep is not None and count > target:
            keep[start:stop], smallest = keep_largest(values[start:stop], target)
        if guard:
            reselect = count > GUARD_RESELECT * target
            thresholds.set(name, target, smallest if reselect else nudge(tau, count, target, size))
    if keep is None:
        return positions, values
    kept = nonzero_indices(keep)
    return positions[kept], values[kept]


def _all_finite(values: Tensor) -> bool:
    # numpy is several times faster than torch here.
    return bool(np.isfinite(values.numpy()).all() if values.device.type == "cpu" else values.isfinite().all())


def _take_dense(
    buffer: Tensor, residual: Tensor, plan: BucketPlan, deferred: set[int], gradient_scale: float
) -> Tensor:
    """The tensors sent dense (shape ``[dense bytes]``, uint8), zeros for deferred ones; rounding stays in residuals."""
    sent_dense = [slice(*plan.bounds[index]) for index in plan.dense if index not in deferred]
    if not sent_dense:
        return buffer.new_zeros(sum(plan.sizes[index] for index in plan.dense), dtype=plan.dtype).view(torch.uint8)
    sizes = [part.stop - part.start for part in sent_dense]
    residuals = [residual[part] for part in sent_dense]
    before = torch.cat(residuals)
    accumulated = before + torch.cat([buffer[part] for part in sent_dense]).to(before.dtype) * gradient_scale
    sent = accumulated.to(plan.dtype)
    left = accumulated - sent
    torch._foreach_copy_(residuals, torch.where(left.abs() < math.inf, left, before).split(sizes))
    parts = iter(sent.split(sizes))
    zero = sent.new_zeros(1)
    dense = [zero.expand(plan.sizes[index]) if index in deferred else next(parts) for index in plan.dense]
    return torch.cat(dense).view(torch.uint8)
