"""The way of one bucket: gradient -> residual -> threshold -> kernel -> payload, and back. No communication here.

    rank r     a = g + e        pick |a| >= tau        pack ---+
                    |                                          |  all-gather of uint8 payloads
               e = a - what the others will read               |
                                                               v
    every rank                g = (1/W) * sum over ranks of unpack(payload)

This is, equation by equation, the data-parallel half of Dynamic Communication Thresholding (Gupta et al., KDD 2021,
section 3.1) with a threshold for each tensor.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_dct.gradients.awaited import Awaited
from lightning_dct.gradients.on_device import add_payloads, send_largest
from lightning_dct.gradients.plan import BucketPlan
from lightning_dct.kernels import Selection, select, sum_entries
from lightning_dct.threshold import GUARD_RESELECT, Observed, Thresholds, keep_largest, kth_magnitude
from lightning_dct.wire import PayloadError, Unpacked, pack, unpack
from lightning_dct.wire.bits import nonzero_indices

# Devices whose host must not wait for numbers; tests add the CPU to compare both ways.
WITHOUT_WAITING = {"cuda"}


class Compressed(NamedTuple):
    """What is sent of a bucket.

    Attributes:
        payload: Shape ``[plan.layout.num_bytes]``, uint8; for a plan with parts their payloads, one after the other.
        num_entries: Entries of the bucket that are in it; for a GPU a number on it, shape ``[]``.
        observed: How many entries of each compressed tensor reached its threshold; none where the guard has acted.
        selected: Whether any threshold was selected.
    """

    payload: Tensor
    num_entries: int | Tensor
    observed: list[Observed]
    selected: bool


def compress(
    buffer: Tensor,
    residual: Tensor,
    plan: BucketPlan,
    deferred: set[int],
    thresholds: Thresholds,
    gradient_scale: float,
    reselect: bool,
    kernel: str = "auto",
) -> Compressed:
    """Decide what is sent and leave the rest in the residual.

    Afterwards ``decoded(payload) + residual`` equals the earlier ``gradient_scale * buffer + residual``, except for
    infinite and NaN entries: these go into the payload, and the residual keeps its old value.

    Args:
        buffer: Shape ``[n]``: the flattened bucket. Not changed.
        residual: Shape ``[n]``, ``plan.residual_dtype``. Changed in place.
        plan: How each tensor is sent.
        deferred: Indices of tensors of which nothing is sent.
        thresholds: Missing ones are selected from this bucket.
        gradient_scale: Factor on the gradient: one over the loss scale of mixed-precision training.
        reselect: Take a step's own selection as the new threshold when far too many entries reach the old one.
        kernel: See :func:`~lightning_dct.kernels.select`.
    """
    on_device = buffer.device.type in WITHOUT_WAITING
    if plan.parts and not on_device:
        sent, settings = [], (thresholds, gradient_scale, reselect, kernel)
        for part in plan.parts:
            sent.append(compress(buffer, residual, part, deferred, *settings))
            deferred = {index - len(part.names) for index in deferred}
        observed = list(chain.from_iterable(part.observed for part in sent))
        num_entries = sum(part.num_entries for part in sent)
        payload = torch.cat([part.payload for part in sent])
        return Compressed(payload, num_entries, observed, any(part.selected for part in sent))
    used = tuple(index for index in plan.compressed if index not in deferred)
    selected = _select_missing(buffer, residual, plan, used, thresholds, gradient_scale)
    dense = _take_dense(buffer, residual, plan, deferred, gradient_scale)
    dense_entries = sum(plan.sizes[index] for index in plan.dense)
    if on_device:
        payload, count = send_largest(
            buffer, residual, plan, used, dense, thresholds, gradient_scale, guard=reselect, kernel=kernel
        )
        return Compressed(payload, count + dense_entries, [], selected)
    known = [thresholds.get(plan.names[index], plan.targets[index]) for index in used]
    segments, numbers = [plan.bounds[i] for i in used], [tau for tau in known if tau is not None]
    selection = select(buffer, residual, segments, numbers, gradient_scale, kernel)
    positions, values, observed = _fit(selection, plan, used, thresholds, reselect)
    payload, received = pack(plan.layout, plan.to_payload(positions), values, dense)
    left = values - received.to(values.dtype)
    if not _all_finite(left):
        finite = left.isfinite()
        positions, left = positions[finite], left[finite]
    residual.scatter_(0, positions, left)
    return Compressed(payload, values.numel() + dense_entries, observed, selected)


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
    """Overwrite a bucket with the weighted sum of what all ranks sent.

    Every rank adds the same payloads in the same order, its own among them, so replicas stay bitwise identical.

    Args:
        payloads: Shape ``[ranks, plan.layout.num_bytes]``, uint8, by rank. For a plan with parts a row holds a payload
            of each, and they come from one rank each, counted through all rows.
        buffer: Shape ``[n]``: the flattened bucket. Overwritten where the plan's tensors lie.
        plan: How each tensor was sent.
        factor: Weight of each rank: one over the world size, times the loss scale of mixed-precision training.
        awaited: Reports later, for payloads on a GPU, whether they are valid.
        kernel: See :func:`~lightning_dct.kernels.sum_entries`.
        what: What was sent, for error messages.
        by_senders: Multiply each entry by the square root of the number of ranks over the number that sent it.

    Raises:
        PayloadError: No rank with this plan can have sent such a payload; the message names the rank. On a GPU
            ``awaited`` raises it later.
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
        own = payloads.split(sizes, dim=1)
        for index, (part, payloads_of_part) in enumerate(zip(parts, own, strict=True)):
            _add_up(payloads_of_part, total, part, factor, kernel, senders[index :: len(parts)], by_senders)
    return total if total is buffer else buffer.copy_(total)


def _add_up(
    payloads: Tensor, total: Tensor, plan: BucketPlan, factor: float, kernel: str, senders: list[str], by_senders: bool
) -> None:
    received = [_unpack(payload, plan, sender) for payload, sender in zip(payloads.unbind(), senders, strict=True)]
    dense_tensors = [dense.clone().view(plan.dtype) for _, _, dense in received]
    for (_, values, _), dense, sender in zip(received, dense_tensors, senders, strict=True):
        # A sum is finite only where all of it is; nothing costs less.
        if not math.isfinite(float(values.sum()) + float(dense.sum())):
            name_broken_sender(sender)
    entries = [(plan.to_bucket(positions), values) for positions, values, _ in received]
    segments = [(0, total.numel())] if plan.starts is None else plan.bounds
    sum_entries(total, segments, entries, factor, kernel, by_senders and len(entries) > 1)
    for dense in dense_tensors:
        parts = dense.split([plan.sizes[index] for index in plan.dense])
        for index, part in zip(plan.dense, parts, strict=True):
            total[slice(*plan.bounds[index])].add_(part, alpha=factor)


def _unpack(payload: Tensor, plan: BucketPlan, sender: str) -> Unpacked:
    try:
        return unpack(plan.layout, payload)
    except PayloadError as error:
        raise PayloadError(f"{sender} of the process group: {error}.") from error


@lru_cache(maxsize=256)
def name_broken_sender(sender: str) -> None:
    """Warn, once and on one rank, who has sent infinite or NaN numbers."""
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
    """Select the thresholds that are missing, and return whether there were any. This waits for a GPU."""
    missing = [index for index in used if not thresholds.has(plan.names[index], plan.targets[index])]
    for index in missing:
        part = slice(*plan.bounds[index])
        accumulated = (buffer[part].to(residual.dtype) * scale).add_(residual[part])
        target = plan.targets[index]
        thresholds.set(plan.names[index], target, kth_magnitude(accumulated, target))
    return bool(missing)


def _fit(
    selection: Selection, plan: BucketPlan, used: tuple[int, ...], thresholds: Thresholds, reselect: bool
) -> tuple[Tensor, Tensor, list[Observed]]:
    """Cut a selection down to the capacity of the payload: the largest entries of each tensor.

    The capacity is fixed, because collectives need equal sizes. The rest stays in the residual. A tensor with infinite
    or NaN entries sends only those: the step is lost anyway.
    """
    positions, values = selection.positions, selection.values
    finite = None if _all_finite(values) else values.isfinite()
    observed: list[Observed] = []
    keep: Tensor | None = None
    stop = 0
    for index, count in zip(used, selection.counts, strict=True):
        start, stop = stop, stop + count
        name, target = plan.names[index], plan.targets[index]
        broken = finite is not None and not bool(finite[start:stop].all())
        if not broken and count <= target:
            observed.append(Observed(name, count, target, plan.sizes[index]))
            continue
        if keep is None:
            keep = torch.ones_like(positions, dtype=torch.bool)
        if finite is not None and broken:
            keep[start:stop] = False
            keep[start + nonzero_indices(~finite[start:stop])[:target]] = True
            continue
        keep[start:stop], smallest = keep_largest(values[start:stop], target)
        if reselect and count > GUARD_RESELECT * target:
            thresholds.set(name, target, smallest)
        else:
            observed.append(Observed(name, count, target, plan.sizes[index]))
    if keep is None:
        return positions, values, observed
    kept = nonzero_indices(keep)
    return positions[kept], values[kept], observed


def _all_finite(values: Tensor) -> bool:
    # numpy is several times faster than torch here.
    return bool(np.isfinite(values.numpy()).all() if values.device.type == "cpu" else values.isfinite().all())


def _take_dense(
    buffer: Tensor, residual: Tensor, plan: BucketPlan, deferred: set[int], gradient_scale: float
) -> Tensor:
    """Tensors sent dense (shape ``[dense bytes]``, uint8), zeros for deferred ones; the residual keeps the rest."""
    going = [slice(*plan.bounds[index]) for index in plan.dense if index not in deferred]
    if not going:
        return buffer.new_zeros(sum(plan.sizes[index] for index in plan.dense), dtype=plan.dtype).view(torch.uint8)
    sizes = [part.stop - part.start for part in going]
    residuals = [residual[part] for part in going]
    before = torch.cat(residuals)
    accumulated = before + torch.cat([buffer[part] for part in going]).to(before.dtype) * gradient_scale
    sent = accumulated.to(plan.dtype)
    left = accumulated - sent
    torch._foreach_copy_(residuals, torch.where(left.abs() < math.inf, left, before).split(sizes))
    parts = iter(sent.split(sizes))
    nothing = sent.new_zeros(1)
    dense = [nothing.expand(plan.sizes[index]) if index in deferred else next(parts) for index in plan.dense]
    return torch.cat(dense).view(torch.uint8)
