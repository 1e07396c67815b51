"""What :mod:`lightning_dct.gradients.compression` does, for gradients on a GPU: without the host ever waiting for it.

A host that asks a GPU for a number waits until all work before it is done, and then the GPU waits for the host:
backward and compression no longer overlap. So nothing here has a shape that depends on data. A bucket's selection goes
into a room of fixed size, sorting brings each tensor's largest entries to places that are known beforehand; how much of
all this is in use, the thresholds, and whether payloads are sound, are tensors on the device.

    select into room     sort by (tensor, magnitude)     keep the first ``target`` of each     back in order, pack

Payload and residual are those of the ordinary way, to the last bit, unless a tensor has more picks than its room has
slots. Then a regular sample of them competes for the payload. What does not fit stays in the residual, as ever.

This has not run on a GPU yet: tests run it on the CPU, and on tensors without contents to show that nobody waits.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dct.gradients.plan import BucketPlan
from lightning_dct.kernels.room import InRoom, room_for, room_kernel
from lightning_dct.threshold import GUARD_RESELECT, Thresholds, nudge_all
from lightning_dct.wire import Slots, pack_on_device, unpack_on_device


class Sent(NamedTuple):
    """What goes of a bucket.

    Attributes:
        payload: Shape ``[plan.layout.num_bytes]``, uint8.
        num_entries: Shape ``[]``, int64: how many entries of compressed tensors are in it.
    """

    payload: Tensor
    num_entries: Tensor


def send_largest(
    buffer: Tensor,
    residual: Tensor,
    plan: BucketPlan,
    used: tuple[int, ...],
    whole: Tensor,
    thresholds: Thresholds,
    gradient_scale: float,
    guard: bool,
    kernel: str,
) -> Sent:
    """Fill a payload with the largest entries of each tensor and leave the rest in the residual.

    Args:
        buffer: Shape ``[n]``: the flattened bucket. Not changed.
        residual: Shape ``[n]``, ``plan.residual_dtype``. Changed in place.
        plan: What becomes of each tensor.
        used: Indices of the compressed tensors of which something goes.
        whole: Shape ``[plan.layout.whole_bytes]``, uint8: the tensors that go whole.
        thresholds: Has one for each of ``used``.
        gradient_scale: Factor on the gradient: one over the loss scale of mixed-precision training.
        guard: Let the thresholds follow what this step shows.
        kernel: What adds, compares and compacts; see :func:`~lightning_dct.kernels.room.room_kernel`.
    """
    names = tuple(plan.names[index] for index in used)
    layout = _room_layout(plan, used, buffer.device)
    taus = thresholds.on_device(names, buffer.device)
    scale = torch.full((1,), gradient_scale, dtype=residual.dtype, device=residual.device)
    numbers = torch.cat([scale, taus.to(residual.dtype)])
    picked = room_kernel(kernel, buffer.device.type)(buffer, residual, layout.segments, layout.rooms, numbers)
    magnitudes, order = _largest_first(picked, layout)
    if guard and used:
        thresholds.replace(names, _follow(taus, picked, magnitudes[order], layout))
    entries, tensor_index = _keep(picked, magnitudes, order[layout.first_targets], layout)
    at_payload = Slots(plan.to_payload(entries.positions), entries.values, entries.num_used)
    payload, received = pack_on_device(plan.layout, at_payload, tensor_index, whole)
    _take_out(residual, entries, received.to(residual.dtype))
    return Sent(payload, entries.num_used)


def add_payloads(payloads: Tensor, total: Tensor, plan: BucketPlan, factor: float) -> Tensor:
    """Add up what all ranks sent.

    Args:
        payloads: Shape ``[ranks, plan.layout.num_bytes]``, uint8, by rank.
        total: Shape ``[n]``, ``plan.residual_dtype``: a bucket, added to in place where the plan's tensors lie.
        plan: What became of each tensor.
        factor: Weight of each rank.

    Returns:
        Shape ``[ranks]``, bool: which payloads are sound. The total means nothing when one is not.
    """
    sound = []
    for payload in payloads.unbind():
        arrived = unpack_on_device(plan.layout, payload)
        # Rounded after the product and after the sum, as `sum_entries` does.
        values = arrived.entries.values.to(total.dtype).mul(factor)
        total.index_add_(0, plan.to_bucket(arrived.entries.positions), values)
        add_whole(arrived.whole, total, plan, factor)
        sound.append(arrived.sound)
    return torch.stack(sound)


def add_whole(whole: Tensor, total: Tensor, plan: BucketPlan, factor: float) -> None:
    """Add the tensors that went whole (shape ``[plan.layout.whole_bytes]``, uint8) to a bucket, in place."""
    parts = whole.clone().view(plan.dtype).split([plan.sizes[index] for index in plan.whole])
    for index, part in zip(plan.whole, parts, strict=True):
        total[slice(*plan.bounds[index])].add_(part, alpha=factor)


class _RoomLayout(NamedTuple):
    """What is known of a bucket's room beforehand; the tensors were copied to the device once.

    ``T`` tensors, ``R`` slots, ``K`` entries that may go.

    Attributes:
        segments: Where each tensor lies in the bucket.
        rooms: Slots of each.
        tensors: Shape ``[R]``, int64: which of the ``T`` tensors each slot belongs to.
        ranks: Shape ``[R]``, int64: each slot's number among those of its tensor.
        first_targets: Shape ``[K]``, int64: of each tensor, as many slots as it may send entries, from its first one.
        begins: Shape ``[T]``, int64: the first slot of each.
        slots: Shape ``[T]``, int64: slots of each.
        targets: Shape ``[T]``, int64: entries each may send.
        sizes: Shape ``[T]``, fp64: entries of each.
        in_plan: Shape ``[T]``, int64: each one's index in the plan.
    """

    segments: tuple[tuple[int, int], ...]
    rooms: tuple[int, ...]
    tensors: Tensor
    ranks: Tensor
    first_targets: Tensor
    begins: Tensor
    slots: Tensor
    targets: Tensor
    sizes: Tensor
    in_plan: Tensor


@lru_cache(maxsize=1024)
def _room_layout(plan: BucketPlan, used: tuple[int, ...], device: torch.device) -> _RoomLayout:
    rooms = tuple(room_for(plan.sizes[index], plan.targets[index]) for index in used)
    begins = torch.tensor([0, *accumulate(rooms)][: len(rooms)], dtype=torch.int64)
    slots = torch.tensor(rooms, dtype=torch.int64)
    targets = torch.tensor([plan.targets[index] for index in used], dtype=torch.int64)
    sizes = torch.tensor([plan.sizes[index] for index in used], dtype=torch.float64)
    tensors = torch.arange(len(rooms)).repeat_interleave(slots)
    ranks = torch.arange(sum(rooms)) - begins[tensors]
    first_targets = (ranks < targets[tensors]).nonzero().squeeze(1)
    on_host = (tensors, ranks, first_targets, begins, slots, targets, sizes, torch.tensor(used, dtype=torch.int64))
    return _RoomLayout(tuple(plan.bounds[index] for index in used), rooms, *(part.to(device) for part in on_host))


def _largest_first(picked: InRoom, layout: _RoomLayout) -> tuple[Tensor, Tensor]:
    """The magnitude in each slot, -1 where there is none, and the order of the slots that puts the largest first.

    Each tensor's slots stay together in that order, so they are where they were before; among equals the first place
    comes first. Infinite and NaN values are equals: a tensor with any of them holds no others.
    """
    magnitudes = picked.values.abs().nan_to_num_(nan=math.inf, posinf=math.inf)
    magnitudes = torch.where(layout.ranks < picked.counts[layout.tensors], magnitudes, -1.0)
    by_magnitude = torch.argsort(magnitudes, descending=True, stable=True)
    by_tensor = torch.argsort(layout.tensors[by_magnitude], stable=True)
    return magnitudes, by_magnitude[by_tensor]


def _follow(taus: Tensor, picked: InRoom, descending: Tensor, layout: _RoomLayout) -> Tensor:
    """The thresholds that the guard makes of what a step has shown: shape ``[T]``, fp64.

    Far too many picks are an occasion for a new threshold: the smallest magnitude that is kept of them. Where the room
    holds a sample only, it is the magnitude of the same rank among all picks.
    """
    counts, targets = picked.counts, layout.targets
    held = counts.minimum(layout.slots)
    ranks = (targets * held + counts - 1).div(counts.clamp(min=1), rounding_mode="floor") - 1
    cutoffs = descending[layout.begins + ranks.clamp_(min=0)].to(taus.dtype)
    nudged = nudge_all(taus, counts, targets.to(taus.dtype), layout.sizes)
    followed = torch.where(counts > GUARD_RESELECT * targets, cutoffs, nudged)
    # Infinite and NaN entries say nothing about the others.
    return torch.where(picked.broken, taus, followed)


def _keep(picked: InRoom, magnitudes: Tensor, largest: Tensor, layout: _RoomLayout) -> tuple[Slots, Tensor]:
    """The entries that go, in the order of their places in the bucket, and for each its tensor's index in the plan."""
    kept = torch.zeros_like(magnitudes, dtype=torch.bool).scatter_(0, largest, magnitudes[largest] >= 0)
    slots = torch.nonzero_static(kept, size=largest.numel(), fill_value=0).squeeze(1)
    entries = Slots(picked.positions[slots], picked.values[slots], kept.sum())
    entries = entries._replace(values=torch.where(entries.in_use, entries.values, 0.0))
    return entries, layout.in_plan[layout.tensors[slots]]


def _take_out(residual: Tensor, entries: Slots, received: Tensor) -> None:
    """Leave in the residual what the receivers will not read; of infinite and NaN values it keeps what it was."""
    taken = entries.in_use & (entries.values - received).isfinite()
    # A place of its own for each slot that is not in use: zeros there disturb nobody. Minus zero leaves even a zero's
    # sign alone. Adding what is negated rounds as subtracting does.
    spread = torch.arange(received.numel(), device=received.device)
    positions = torch.where(entries.in_use, entries.positions, spread)
    residual.index_add_(0, positions, -torch.where(taken, received, 0.0))
