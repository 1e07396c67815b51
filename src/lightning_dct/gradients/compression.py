"""One bucket's way: gradient -> residual -> threshold -> kernel -> wire, and back. No communication here.

    rank r     a = g + e        pick |a| >= tau        pack ---+
                    |                                          |  all-gather of uint8 payloads
               e = a - what the others will read               |
                                                               v
    every rank                g = (1/W) * sum over ranks of unpack(payload)

This is equation by equation the data-parallel half of Dynamic Communication Thresholding (Gupta et al., KDD 2021,
section 3.1) with per-tensor thresholds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dct.gradients.plan import BucketPlan
from lightning_dct.kernels import Selection, select
from lightning_dct.threshold import GUARD_RESELECT, Observed, Thresholds, keep_largest, kth_magnitude
from lightning_dct.wire import PayloadError, pack, unpack


class Compressed(NamedTuple):
    """What is sent of a bucket.

    Attributes:
        payload: Shape ``[plan.layout.num_bytes]``, uint8.
        num_entries: Entries of the bucket that are in it.
        observed: How many entries of each compressed tensor reached its threshold.
        selected: Whether any threshold was selected anew.
    """

    payload: Tensor
    num_entries: int
    observed: list[Observed]
    selected: bool


def compress(
    buffer: Tensor,
    residual: Tensor,
    plan: BucketPlan,
    held: set[int],
    thresholds: Thresholds,
    gradient_scale: float,
    reselect: bool,
    kernel: str = "auto",
) -> Compressed:
    """Decide what goes and leave the rest in the residual.

    Afterwards ``decoded(payload) + residual`` is what ``gradient_scale * buffer + residual`` was before, except where
    that is infinite or NaN: such entries go into the payload and the residual keeps what it was.

    Args:
        buffer: Shape ``[n]``: the flattened bucket. Not changed.
        residual: Shape ``[n]``, ``plan.residual_dtype``. Changed in place.
        plan: What becomes of each tensor.
        held: Indices of tensors of which nothing goes.
        thresholds: Missing ones are selected from this bucket.
        gradient_scale: Factor on the gradient: one over the loss scale of mixed-precision training.
        reselect: Take a step's own selection as the new threshold when far too many entries reach the old one.
        kernel: What adds, compares and compacts; see :func:`~lightning_dct.kernels.select`.
    """
    used = [index for index in plan.compressed if index not in held]
    missing = [index for index in used if thresholds.get(plan.names[index], plan.targets[index]) is None]
    for index in missing:
        part = slice(*plan.bounds[index])
        accumulated = residual[part] + buffer[part].to(residual.dtype) * gradient_scale
        target = plan.targets[index]
        thresholds.set(plan.names[index], target, kth_magnitude(accumulated, target))
    known = [thresholds.get(plan.names[index], plan.targets[index]) for index in used]
    segments, numbers = [plan.bounds[i] for i in used], [tau for tau in known if tau is not None]
    selection = select(buffer, residual, segments, numbers, gradient_scale, kernel)
    positions, values, observed = _fit(selection, plan, used, thresholds, reselect)
    whole = _take_whole(buffer, residual, plan, held, gradient_scale)
    payload, received = pack(plan.layout, plan.to_payload(positions), values, whole)
    left = values - received.to(values.dtype)
    finite = left.isfinite()
    if not bool(finite.all()):
        positions, left = positions[finite], left[finite]
    residual[positions] = left
    num_entries = values.numel() + sum(plan.sizes[index] for index in plan.whole)
    return Compressed(payload, num_entries, observed, bool(missing))


def decompress(payloads: Tensor, buffer: Tensor, plan: BucketPlan, factor: float) -> Tensor:
    """Overwrite a bucket with the weighted sum of what all ranks sent.

    Every rank adds the same payloads in the same order, its own among them, so replicas stay bitwise identical.

    Args:
        payloads: Shape ``[world size, plan.layout.num_bytes]``, uint8, by rank.
        buffer: Shape ``[n]``: the flattened bucket. Overwritten where the plan's tensors lie.
        plan: What became of each tensor.
        factor: Weight of each rank: one over the world size, times the loss scale of mixed-precision training.

    Raises:
        PayloadError: A payload is not what a rank with this plan can have sent; the message names the rank.
    """
    total = buffer if buffer.dtype == plan.residual_dtype else buffer.to(plan.residual_dtype)
    for start, stop in [(0, total.numel())] if plan.starts is None else plan.bounds:
        total[start:stop].zero_()
    for rank, payload in enumerate(payloads.unbind()):
        try:
            received = unpack(plan.layout, payload)
        except PayloadError as error:
            raise PayloadError(f"Gradients from rank {rank} of the process group: {error}.") from error
        total.index_add_(0, plan.to_bucket(received.positions), received.values.to(total.dtype), alpha=factor)
        whole = received.whole.clone().view(plan.dtype)
        for index, part in zip(plan.whole, whole.split([plan.sizes[i] for i in plan.whole]), strict=True):
            total[slice(*plan.bounds[index])].add_(part, alpha=factor)
    return total if total is buffer else buffer.copy_(total)


def _fit(
    selection: Selection, plan: BucketPlan, used: list[int], thresholds: Thresholds, reselect: bool
) -> tuple[Tensor, Tensor, list[Observed]]:
    """Cut a selection down to what the payload has room for: the largest entries of each tensor.

    The room is fixed, because collectives want equal sizes. What is cut stays in the residual. From a tensor with
    infinite or NaN entries only those go: its other entries are of no use in a step that is lost anyway.
    """
    positions, values = selection.positions, selection.values
    finite = values.isfinite()
    all_finite = bool(finite.all())
    observed: list[Observed] = []
    keep: Tensor | None = None
    stop = 0
    for index, count in zip(used, selection.counts, strict=True):
        start, stop = stop, stop + count
        name, target = plan.names[index], plan.targets[index]
        broken = not all_finite and not bool(finite[start:stop].all())
        if not broken and count <= target:
            observed.append(Observed(name, count, target, plan.sizes[index]))
            continue
        if keep is None:
            keep = torch.ones_like(finite)
        if broken:
            nonfinite = (~finite[start:stop]).nonzero().squeeze(1)[:target]
            keep[start:stop] = False
            keep[start + nonfinite] = True
            continue
        keep[start:stop], smallest = keep_largest(values[start:stop], target)
        if reselect and count > GUARD_RESELECT * target:
            thresholds.set(name, target, smallest)
        else:
            observed.append(Observed(name, count, target, plan.sizes[index]))
    if keep is None:
        return positions, values, observed
    return positions[keep], values[keep], observed


def _take_whole(buffer: Tensor, residual: Tensor, plan: BucketPlan, held: set[int], gradient_scale: float) -> Tensor:
    parts = [buffer.new_empty(0, dtype=plan.dtype)]
    for index in plan.whole:
        part = slice(*plan.bounds[index])
        if index in held:
            parts.append(torch.zeros_like(buffer[part], dtype=plan.dtype))
            continue
        accumulated = residual[part] + buffer[part].to(residual.dtype) * gradient_scale
        sent = accumulated.to(plan.dtype)
        left = accumulated - sent
        residual[part] = torch.where(left.isfinite(), left, residual[part])
        parts.append(sent)
    return torch.cat(parts).view(torch.uint8)
