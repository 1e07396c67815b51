""":mod:`lightning_dct.compress.on_host` for tensors on a GPU, without the host waiting for it.

When a host reads a number from a GPU, it waits until all work before it is done, and then the GPU waits for the host:
backward and compression no longer overlap. So shapes here do not depend on data. All entries of a bucket are marked or
not in their places. The number of marks, thresholds, and whether payloads are valid, are tensors on the device.

The number of operations does not depend on the number of ranks: entries for several owners are marked and packed
together, and payloads from several senders are unpacked together. Payloads, residuals and sums equal those of the CPU
path.

Results are reproducible: floating-point numbers are summed only where the order is fixed, or where all but one are zero
(``torch.use_deterministic_algorithms`` lists the other operations).

Tests run it on the CPU, and on fake tensors to show that the host never waits; ``docs/evidence/gpu.md`` has what one
card has shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dct.compress.bucket_plan import Bucket, BucketPlan
from lightning_dct.compress.marking import Marked, RowLayout, Senders
from lightning_dct.compress.threshold import Aims, Reached, Thresholds
from lightning_dct.kernels import weights_by_senders
from lightning_dct.kernels.bits import pack_marks
from lightning_dct.wire.payload import FINGERPRINT
from lightning_dct.wire.payloads_on_device import Bitmaps, SideBySide, Verdict, headers_of, numbers, slots_of
from lightning_dct.wire.values import decode_values, encode_values, values_num_bytes


class OnDevice:
    """A plan's constants, copied to a device once.

    Attributes:
        layouts: The payloads'.
        bounds: Of each tensor, counted through all payloads.
        row: Where the tensors lie in a row of entries.
        fingerprints: The places of two bytes of each payload's.
        bitmaps: Reads the payloads if all their positions are bitmaps; else None, and ``side_by_side`` does.
    """

    def __init__(self, plan: BucketPlan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self.layouts = [part.layout for part in plan.parts or (plan,)]
        self.row = RowLayout([layout.tensor_sizes for layout in self.layouts])
        self.row_ends, self.row_first = (torch.tensor(places).to(device) for places in (self.row.ends, self.row.first))
        self.slots = [slots_of(layout) for layout in self.layouts]
        ends = list(accumulate(plan.sizes))
        self.bounds = [(stop - size, stop) for size, stop in zip(plan.sizes, ends, strict=True)]
        self.headers = headers_of(self.layouts).to(device)
        starts = [0, *accumulate(layout.num_bytes for layout in self.layouts[:-1])]
        places = [start + FINGERPRINT + place for start in starts for place in range(2)]
        self.fingerprints = torch.tensor(places).to(device)
        are_bitmaps = any(plan.sizes) and all(layout.position_code.is_bitmap for layout in self.layouts)
        self.bitmaps = Bitmaps(self.layouts, device) if are_bitmaps else None
        self.side_by_side = None if are_bitmaps else SideBySide(self.layouts, device)
        self._senders: tuple[tuple[int, ...], Senders, Aims] | None = None
        self._lengths: dict[int, Tensor] = {}
        self._zeros: dict[torch.dtype, Tensor] = {}
        self._fewer: dict[int, Tensor] = {}

    def nothing(self, dense: Tensor) -> Tensor:
        """Payloads without entries: the bytes between their headers and dense tensors are zeros."""
        pieces = []
        for layout, header, own in zip(self.layouts, self.headers, self.split_dense(dense), strict=True):
            pieces += [header, dense.new_zeros(layout.num_bytes - header.numel() - own.numel()), own]
        return torch.cat(pieces)

    def split_dense(self, dense: Tensor) -> tuple[Tensor, ...]:
        """The bytes of each payload's dense tensors."""
        return dense.split([layout.dense_bytes for layout in self.layouts])

    @staticmethod
    def of(plan: BucketPlan, device: torch.device) -> OnDevice:
        """The constants of a plan, which keeps them."""
        if device not in plan.on_devices:
            plan.on_devices[device] = OnDevice(plan, device)
        return plan.on_devices[device]

    def weights(self, ranks: int, factor: float, lengthening: float | None, dtype: torch.dtype) -> Tensor:
        """:func:`~lightning_dct.kernels.weights_by_senders`, of numbers that are copied once."""
        if ranks not in self._fewer:
            self._fewer[ranks] = weights_by_senders(ranks, 1.0, float(ranks), torch.float64).to(self._device)
        fewer = self._fewer[ranks]
        return (fewer.sqrt() if lengthening is None else fewer.clamp(max=lengthening)).mul_(factor).to(dtype)

    def zero(self, dtype: torch.dtype) -> Tensor:
        """Zero in a dtype: shape ``[1]``."""
        if dtype not in self._zeros:
            self._zeros[dtype] = torch.zeros(1, dtype=dtype, device=self._device)
        return self._zeros[dtype]

    def senders(self, used: tuple[int, ...]) -> tuple[Senders, Aims]:
        """The constants of some tensors; they are kept, because the next step usually needs the same."""
        if self._senders is None or self._senders[0] != used:
            targets, sizes = ([numbers[i] for i in used] for numbers in (self._plan.targets, self._plan.sizes))
            aims = Aims.of(targets, sizes, self._device)
            self._senders = used, Senders(self.row, used, targets, self.slots, self._device), aims
        return self._senders[1:]

    def lengths(self, rows: int) -> Tensor:
        """Their number, for sums over rows: shape ``[1]``, int64."""
        if rows not in self._lengths:
            self._lengths[rows] = torch.tensor([rows]).to(self._device)
        return self._lengths[rows]


def send_selected(
    bucket: Bucket, plan: BucketPlan, used: tuple[int, ...], dense: Tensor, thresholds: Thresholds, guard: bool
) -> tuple[Tensor, Tensor]:
    """Pack the entries that reach their threshold and leave the rest in the residual.

    Arguments are those of :func:`~lightning_dct.compress.on_host.compress`. ``used`` are the indices of the
    compressed tensors that send something, all of which have thresholds. ``dense`` holds the tensors sent dense, uint8.

    Returns:
        The payloads, one after the other (uint8), and the number of compressed entries in each (int64).
    """
    on_device, value_format = OnDevice.of(plan, dense.device), plan.value_format
    if not used:
        return on_device.nothing(dense), dense.new_zeros(1, dtype=torch.int64)
    names, (senders, aims) = tuple(plan.names[index] for index in used), on_device.senders(used)
    bounds = [plan.bounds[index] for index in used]
    news, bases = bucket.parts(bounds)
    zero, old = on_device.zero(bases[0].dtype), None
    if bucket.scale is None:
        row = senders.lay_out(torch._foreach_sub(news, bases), zero)
    else:
        old = senders.lay_out(bases, zero)
        # Two operations, because a fused one would round once instead of twice.
        row = senders.lay_out(news, on_device.zero(news[0].dtype)).to(old.dtype).mul(bucket.scale).add_(old)
    taus = thresholds.on_device(names, dense.device)
    marked = senders.mark(row, taus)
    if guard:
        thresholds.follow(names, Reached(taus, marked.limits, marked.reached, marked.whole), aims)
    # An unused slot has an entry of the padding, which is zero.
    slots = torch.searchsorted(marked.numbers[:-1], numbers(sum(on_device.slots), dense.device), right=True)
    if value_format == "1bit":
        scales = senders.mean_magnitudes(marked)
        data, scale_bytes = pack_marks((row > 0)[slots]), _of_every_tensor(scales, used, on_device)
    else:
        entries, tensor = row[slots], torch.bucketize(slots, on_device.row_ends, right=True)
        data, scales = encode_values(entries, tensor, len(on_device.row.ends), value_format)
        sizes = [size for layout in on_device.layouts for size in (4 * layout.num_scales, 4 if scales.numel() else 0)]
        scale_bytes = [[part] for part in scales.view(torch.uint8).split(sizes)[::2]]
    if old is not None:
        if value_format == "1bit":
            sent = torch.where(marked.marks, torch.copysign(senders.spread(scales), row)[1:], 0.0)
        else:
            received = decode_values(data, tensor.numel(), tensor, scales, value_format).to(row.dtype)
            # At most one used slot has a given entry, and the others add zero.
            sent = torch.zeros_like(row).index_add_(0, slots, received)[1:]
        # Infinite and NaN values do not change the residual.
        finite = torch.where(marked.magnitudes < math.inf, row, old)[1:]
        left = finite - sent
        left = torch.where(left.abs() < math.inf, left, finite)
        if bucket.others_keep:
            left = torch.where(sent != 0, left, old[1:])
        torch._foreach_copy_(bases, senders.parts(left, 1))
    # What is in slots and of paddings is cut off.
    parts = zip(
        on_device.headers,
        marked.counts.view(torch.uint8).view(-1, 8),
        scale_bytes,
        _positions(on_device, marked, slots),
        data.split([values_num_bytes(value_format, count) for count in on_device.slots]),
        on_device.split_dense(dense),
        strict=True,
    )
    pieces: list[Tensor] = []
    for layout, (header, count, scale, positions, values, own) in zip(on_device.layouts, parts, strict=True):
        pieces += [header[:4], count[:4], header[8:], *scale, positions, values[: layout.part_sizes[3]], own]
    return torch.cat(pieces), marked.counts


def _of_every_tensor(scales: Tensor, used: tuple[int, ...], on_device: OnDevice) -> list[list[Tensor]]:
    """The scales of each payload's tensors in their order, zero for those that send nothing: bytes."""
    own, nothing = iter(scales.view(torch.uint8).split(4)), on_device.zero(torch.float32).view(torch.uint8)
    every = iter([next(own) if index in used else nothing for index in range(len(on_device.row.sizes))])
    return [[next(every) for _ in layout.tensor_sizes] for layout in on_device.layouts]


def _positions(on_device: OnDevice, marked: Marked, slots: Tensor) -> Sequence[Tensor]:
    """The positions of each payload, as bytes."""
    sizes = [layout.position_code.num_bytes for layout in on_device.layouts]
    if (side_by_side := on_device.side_by_side) is not None:
        local = slots - side_by_side.of_slots(on_device.row_first)
        return side_by_side.encode_positions(local, side_by_side.in_use(marked.counts)).split(sizes)
    flags = pack_marks(marked.marks)
    return [flags[first // 8 : first // 8 + size] for first, size in zip(on_device.row.first, sizes, strict=True)]


class Sums(NamedTuple):
    """What payloads bring of each tensor of a plan: views, in the plan's order."""

    means: list[Tensor]  # the weighted sums of what all senders have sent
    own: list[Tensor]  # what this rank has sent; empty where nobody asks
    told: Tensor  # integers, flattened
    verdicts: Callable[[Sequence[int]], list[Verdict]]  # from these numbers: of each payload, by sender


def add_payloads(
    payloads: Tensor, plan: BucketPlan, factor: float, lengthening: float | None, own: int | None = None
) -> Sums:
    """Add up the payloads of all ranks; see :func:`~lightning_dct.compress.on_host.decompress`.

    ``own`` is the number of the row that this rank has sent; None if nobody asks.
    """
    senders, on_device, dtype = len(payloads), OnDevice.of(plan, payloads.device), plan.residual_dtype
    weighted, lengths = lengthening != 1.0 and senders > 1, on_device.lengths(senders)
    if (bitmaps := on_device.bitmaps) is not None:
        pieces: tuple[list[Tensor], list[Tensor]] = [], []

        def take(values: Tensor) -> None:
            values = values.to(dtype)
            pieces[0].append(_add_in_order(values, lengths))
            if weighted:
                pieces[0][-1].mul_(on_device.weights(senders, factor, lengthening, dtype)[(values != 0).sum(0)])
            if own is not None:
                # A copy of a piece, so that the values of the others are freed.
                pieces[1].append(values[own] if values.shape[2] == bitmaps.width else values[own].clone())

        (dense, told), verdicts, bounds = bitmaps.unpack(payloads, take), bitmaps.verdicts, bitmaps.bounds
        sums, mine = _in_one(pieces[0]), None if own is None else _in_one(pieces[1])
    else:
        assert on_device.side_by_side is not None
        positions, values, _, dense, told = on_device.side_by_side.unpack(payloads)
        verdicts, bounds, values = on_device.side_by_side.verdicts, on_device.bounds, values.to(dtype)
        sums, indices = values.new_zeros(sum(plan.sizes)), positions.flatten()
        # In the order of the ranks, because this sorts on a GPU. "Unsafe" does not wait to check that indices lie
        # within bounds; they do.
        torch._index_put_impl_(sums, [indices], values.flatten(), accumulate=True, unsafe=True)
        # At most one used slot of a sender has a given index.
        mine = None if own is None else torch.zeros_like(sums).index_add_(0, positions[own], values[own])
        if weighted:
            counts = torch.zeros_like(sums, dtype=torch.int32)
            counts.index_add_(0, indices, (values != 0).int().flatten())
            sums.mul_(on_device.weights(senders, factor, lengthening, dtype)[counts])
    if not weighted and factor != 1.0:
        sums.mul_(factor)
    means, owns = ([] if every is None else [every[start:stop] for start, stop in bounds] for every in (sums, mine))
    if plan.dense:
        rows, sizes = dense.view(plan.dtype).to(dtype), [plan.sizes[index] for index in plan.dense]
        mean = _add_in_order(rows, lengths)
        mean = mean if factor == 1.0 else mean.mul_(factor)
        for every, row in ((means, mean), *([] if own is None else [(owns, rows[own])])):
            for index, part in zip(plan.dense, row.split(sizes), strict=True):
                every[index] = part
    return Sums(means, owns, told.flatten(), verdicts)


def _in_one(pieces: list[Tensor]) -> Tensor:
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)).flatten()


def _add_in_order(rows: Tensor, lengths: Tensor) -> Tensor:
    """The sum of rows (shape ``[n, ...]``), one after the other as on a CPU; ``sum`` takes four at a time."""
    # "Unsafe" does not wait to check the lengths.
    total = torch.segment_reduce(rows.flatten(1), "sum", lengths=lengths, unsafe=True, initial=0)
    return total.view(rows.shape[1:])
