""":mod:`lightning_dct.gradients.compression` for gradients on a GPU, without the host waiting for it.

When a host reads a number from a GPU, it waits until all work before it is done, and then the GPU waits for the host:
backward and compression no longer overlap. So shapes here do not depend on data. A selection goes into a buffer with a
slot for each entry that may be sent. The number of used slots, thresholds, and whether payloads are valid, are tensors
on the device.

The number of operations hardly depends on the number of ranks: entries for several owners are selected and packed
together, and payloads from several senders are unpacked together. Payload and residual equal those of the CPU path.

Results are reproducible: floating-point numbers are summed only where the order is fixed, or where all but one are zero
(``torch.use_deterministic_algorithms`` lists the other operations).

This has not run on a GPU yet. Tests run it on the CPU, and on fake tensors to show that the host never waits.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

import torch
from torch import Tensor

from lightning_dct.gradients.plan import BucketPlan
from lightning_dct.kernels import weights_by_senders
from lightning_dct.kernels.buffered import BufferedSelection, Segments, select_into_buffer
from lightning_dct.threshold import Thresholds, follow_all
from lightning_dct.wire import SideBySide, Slots, pack_on_device, unpack_on_device


class OnDevice:
    """A plan's constants, copied to a device once. ``T`` tensors, counted through all payloads.

    Attributes:
        layouts: The payloads.
        shifts: Shape ``[T]``, int64: each tensor's offset in the bucket less its offset in the payloads.
    """

    def __init__(self, plan: BucketPlan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self.layouts = SideBySide([part.layout for part in plan.parts or (plan,)], device)
        starts = torch.tensor([start for start, _ in plan.bounds], dtype=torch.int64)
        sizes = torch.tensor(plan.sizes, dtype=torch.int64)
        self.shifts = (starts - (sizes.cumsum(0) - sizes)).to(device)
        self._selection_buffer: _SelectionBuffer | None = None
        self._weights: dict[tuple[int, float, torch.dtype], Tensor] = {}

    @staticmethod
    def of(plan: BucketPlan, device: torch.device) -> OnDevice:
        """The constants of a plan, which keeps them."""
        if device not in plan.on_devices:
            plan.on_devices[device] = OnDevice(plan, device)
        known: OnDevice = plan.on_devices[device]
        return known

    def weights(self, ranks: int, factor: float, dtype: torch.dtype) -> Tensor:
        """:func:`~lightning_dct.kernels.weights_by_senders`, copied once."""
        key = ranks, factor, dtype
        if key not in self._weights:
            self._weights[key] = weights_by_senders(ranks, factor, True, dtype).to(self._device)
        return self._weights[key]

    def selection_buffer(self, used: tuple[int, ...]) -> _SelectionBuffer:
        """The buffer for some tensors; it is kept, because the next step usually needs the same."""
        if self._selection_buffer is None or self._selection_buffer.used != used:
            self._selection_buffer = _SelectionBuffer(self._plan, used, self._device)
        return self._selection_buffer


class _SelectionBuffer:
    """The buffer of a bucket's selection, with slots for ``U`` tensors; ``used`` are their indices in the plan."""

    def __init__(self, plan: BucketPlan, used: tuple[int, ...], device: torch.device) -> None:
        self.used = used
        capacities = [plan.targets[index] for index in used]
        self.segments = Segments([plan.bounds[index] for index in used], capacities, device)
        # Shape `[U]`: each tensor's entries, and its index in the plan.
        self.sizes = torch.tensor([plan.sizes[index] for index in used], dtype=torch.float64).to(device)
        self.in_plan = torch.tensor(used, dtype=torch.int64).to(device)
        begins = [0, *accumulate(capacities)]
        # Shape `[payloads + 1]`, int64: the first slot of each payload's tensors, and the end of the last.
        first_of_payload = accumulate((len(part.names) for part in plan.parts or (plan,)), initial=0)
        self.edges = torch.tensor([begins[bisect_left(used, first)] for first in first_of_payload]).to(device)


def send_selected(
    buffer: Tensor,
    residual: Tensor,
    plan: BucketPlan,
    used: tuple[int, ...],
    dense: Tensor,
    thresholds: Thresholds,
    gradient_scale: float,
    guard: bool,
) -> tuple[Tensor, Tensor]:
    """Pack the entries that reach their threshold and leave the rest in the residual.

    Arguments are those of :func:`~lightning_dct.gradients.compression.compress`. ``used`` are the indices of the
    compressed tensors that send something, all of which have thresholds. ``dense`` holds the tensors sent dense, uint8.

    Returns:
        The payloads, one after the other (uint8), and the number of compressed entries in them (int64, ``[]``).
    """
    names = tuple(plan.names[index] for index in used)
    on_device = OnDevice.of(plan, buffer.device)
    selection_buffer = on_device.selection_buffer(used)
    taus = thresholds.on_device(names, buffer.device)
    scale = torch.full((1,), gradient_scale, dtype=residual.dtype, device=residual.device)
    numbers = torch.cat([scale, taus.to(residual.dtype)])
    picked = select_into_buffer(buffer, residual, selection_buffer.segments, numbers)
    filled = selection_buffer.segments.numbers < picked.counts[selection_buffer.segments.segment]
    if guard and used:
        thresholds.replace(names, _follow(taus, picked, filled, selection_buffer))
    indices, entries, tensor = _in_payloads(picked, filled, selection_buffer, on_device)
    payloads, received = pack_on_device(on_device.layouts, entries, tensor, dense)
    received = received.to(residual.dtype)
    taken = (entries.values - received).abs() < math.inf
    # Infinite and NaN values do not change the residual. At most one used slot has a given index. Unused slots add
    # minus zero, which even keeps the sign of a zero.
    residual.index_add_(0, indices, torch.where(taken, received, 0.0), alpha=-1)
    return payloads, entries.counts.sum()


def add_payloads(payloads: Tensor, total: Tensor, plan: BucketPlan, factor: float, by_senders: bool = False) -> Tensor:
    """Add up the payloads of all ranks; see :func:`~lightning_dct.gradients.compression.decompress`.

    Returns:
        Shape ``[ranks, payloads]``, bool: which payloads are valid. With an invalid one the total is meaningless.
    """
    on_device = OnDevice.of(plan, payloads.device)
    arrived = unpack_on_device(on_device.layouts, payloads)
    torch._foreach_zero_([total] if plan.starts is None else [total[start:stop] for start, stop in plan.bounds])
    tensor = torch.searchsorted(on_device.layouts.tensor_ends, arrived.positions, right=True)
    indices = (arrived.positions + on_device.shifts[tensor]).flatten()
    # In the order of the ranks, because this sorts on a GPU. "Unsafe" does not wait to check that indices lie within
    # bounds; they do.
    values = arrived.values.to(total.dtype).flatten()
    torch._index_put_impl_(total, [indices], values, accumulate=True, unsafe=True)
    parts = [total] if plan.starts is None else [total[start:stop] for start, stop in plan.bounds]
    if plan.dense:
        sums = arrived.dense.view(plan.dtype).to(total.dtype).sum(0)
        dense = [total[slice(*plan.bounds[index])] for index in plan.dense]
        torch._foreach_copy_(dense, sums.split([part.numel() for part in dense]))
    if by_senders and len(payloads) > 1:
        senders = torch.zeros(total.numel(), dtype=torch.int32, device=total.device)
        senders.index_add_(0, indices, (values != 0).int())
        for index in plan.dense:
            senders[slice(*plan.bounds[index])] = len(payloads)
        weights = on_device.weights(len(payloads), factor, total.dtype)[senders]
        factors = [weights] if plan.starts is None else [weights[start:stop] for start, stop in plan.bounds]
        torch._foreach_mul_(parts, factors)
    else:
        torch._foreach_mul_(parts, factor)
    return arrived.valid


def _follow(taus: Tensor, picked: BufferedSelection, filled: Tensor, selection_buffer: _SelectionBuffer) -> Tensor:
    """The thresholds after the guard has adjusted them: shape ``[U]``, fp64."""
    slots = selection_buffer.segments.slots
    magnitudes = torch.where(filled, picked.values.abs(), 0.0).to(torch.float64)
    # Unlike a scattered sum, this has a fixed order on a GPU. "Unsafe" does not wait to check the lengths.
    sums = torch.segment_reduce(magnitudes, "sum", lengths=slots, unsafe=True)
    means = sums / picked.counts.minimum(slots).clamp(min=1)
    followed = follow_all(taus, means, picked.counts, slots.to(taus.dtype), selection_buffer.sizes)
    # Infinite and NaN entries do not count.
    return torch.where(picked.broken, taus, followed)


def _in_payloads(
    picked: BufferedSelection, filled: Tensor, selection_buffer: _SelectionBuffer, on_device: OnDevice
) -> tuple[Tensor, Slots, Tensor]:
    """The entries in the slots of payloads: indices into the bucket (unused slots hold one too), values, tensors."""
    layouts = on_device.layouts
    if not selection_buffer.used:
        nothing = torch.zeros_like(layouts.spare)
        in_use, counts = nothing.bool(), torch.zeros_like(layouts.capacities)
        return layouts.spare, Slots(layouts.spare, picked.values.new_zeros(nothing.shape), in_use, counts), nothing
    slots, in_use, counts = (found.squeeze(0) for found in layouts.find(filled.unsqueeze(0), selection_buffer.edges))
    slots.clamp_(max=filled.numel() - 1)
    tensor = selection_buffer.in_plan[selection_buffer.segments.segment[slots]]
    indices, values = picked.positions[slots], torch.where(in_use, picked.values[slots], 0.0)
    indices = torch.where(in_use, indices, layouts.spare)
    return indices, Slots(indices - on_device.shifts[tensor], values, in_use, counts), tensor
