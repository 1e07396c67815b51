"""Packs and unpacks payloads on a GPU, without the host waiting for a number.

The bytes are those of :mod:`lightning_dct.wire.payload`, but shapes do not depend on data. Entries are in a fixed
number of slots. Which slots are used, and whether a received payload is valid, are tensors on the device. Indices from
a payload always lie within bounds, whatever its bytes.

Launching an operation takes a host about as long as a small operation takes the GPU. So payloads for several owners,
and from several senders, are packed and unpacked together, in as many operations as one payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dct.kernels.bits import num_bytes
from lightning_dct.wire.payload import FORMAT_CODES, MAGIC, PayloadLayout, write_header
from lightning_dct.wire.positions import PayloadError
from lightning_dct.wire.values import SCALED_FORMATS, decode_values, values_num_bytes

# A payload has a multiple of eight slots, so that its values start with a byte in any format. Its last slot is never
# used, so that each entry can be compared with the next slot.
SLOTS = 8


def slots_of(layout: PayloadLayout) -> int:
    """The slots of a payload of this layout."""
    return (layout.capacity // SLOTS + 1) * SLOTS if layout.capacity else 0


def headers_of(layouts: Sequence[PayloadLayout]) -> Tensor:
    """The headers of payloads without entries: uint8, ``[payloads, 12]``."""
    headers = (write_header(MAGIC, FORMAT_CODES[layout.value_format], 0, layout.fingerprint) for layout in layouts)
    return torch.frombuffer(bytearray(b"".join(headers)), dtype=torch.uint8).view(len(layouts), -1)


@lru_cache(maxsize=64)
def _counted(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, device=device)


def numbers(count: int, device: torch.device) -> Tensor:
    """The numbers from 0 to below ``count``: int64, read-only, in memory that all plans share."""
    return _counted(1 << count.bit_length(), device)[:count]


class Arrived(NamedTuple):
    """The contents of the payloads of ``n`` senders."""

    positions: Tensor  # shape `[n, slots]`, int64: counted through all payloads; any valid index in unused slots
    values: Tensor  # shape `[n, slots]`, fp32; zero in unused slots
    in_use: Tensor  # shape `[n, slots]`, bool
    dense: Tensor  # shape `[n, dense bytes]`, uint8: the tensors sent dense, one after the other
    valid: Tensor  # shape `[n, payloads]`, bool: whether each payload is one of its layout


class SideBySide:
    """The layouts of payloads one after the other, and their constants, copied to a device once.

    ``S`` payloads of ``T`` tensors with ``K`` slots in all, with the same value format.

    Attributes:
        num_bytes: Of all payloads together.
        payload: The payload of each slot: shape ``[K]``, int64, or ``[1]`` if there is only one.
        number: Shape ``[K]``, int64: each slot's number in its payload. Of one payload, all plans share them.
        spare: Shape ``[K]``, int64: an index for each unused slot, distinct if there are enough.
        counted: Shape ``[S]``, int64: 0 for a bitmap, else 1: a flag's index is the high part and the slot's number.
        tensor_ends: Shape ``[T]``, int64: the end of each tensor's indices.
        table: Shape ``[S, 4]``, int64: each payload's first flag, low bits, first index and end of indices.
        flag_edges: Shape ``[S + 1]``, int64: the first flag of each payload, and the end of the last.
        pair_edges: Shape ``[S + 1]``, int64: the same for pairs of adjacent slots.
        capacities: Shape ``[S]``, int64.
        headers: Shape ``[S, 3]``, int32: without the number of entries.
        eight: Shape ``[8]``, uint8: 0 to 7.
        zero: Shape ``[1, 1]``, uint8.
    """

    def __init__(self, layouts: Sequence[PayloadLayout], device: torch.device) -> None:
        self.layouts = tuple(layouts)
        self.value_format = layouts[0].value_format
        self.num_bytes = sum(layout.num_bytes for layout in layouts)
        self.num_tensors = sum(len(layout.tensor_sizes) for layout in layouts)
        self.slots = [slots_of(layout) for layout in layouts]
        codes = [layout.position_code for layout in layouts]
        # Low bits are coded byte by byte.
        self.low_bytes = num_bytes(max((code.low_bits for code in codes if code.capacity), default=0))
        edges, num_slots = _edges(self.slots), sum(self.slots)
        self.number = self.spare = numbers(num_slots, device)
        self.payload = torch.zeros(1, dtype=torch.int64).to(device)
        if len(layouts) > 1:
            payload = torch.arange(len(layouts)).repeat_interleave(torch.tensor(self.slots))
            self.payload, self.number = payload.to(device), (torch.arange(num_slots) - edges[payload]).to(device)
        places = _edges([code.universe for code in codes])
        flags = _edges([code.num_flags for code in codes])
        sizes = list(chain.from_iterable(layout.tensor_sizes for layout in layouts))
        low_bits = torch.tensor([code.low_bits for code in codes])
        self.table = torch.stack([flags[:-1], low_bits, places[:-1], places[1:]], dim=1).to(device)
        if num_slots > sum(sizes):
            self.spare = self.spare.clamp(max=max(sum(sizes) - 1, 0))
        self.counted = torch.tensor([not code.is_bitmap for code in codes]).to(device, torch.int64)
        self.tensor_ends = _edges(sizes)[1:].to(device)
        self.flag_edges = flags.to(device)
        self.pair_edges = edges.clamp(max=max(num_slots - 1, 0)).to(device)
        self.capacities = torch.tensor([layout.capacity for layout in layouts]).to(device)
        self.headers = headers_of(layouts).view(torch.int32).to(device)
        self.eight = torch.arange(8, dtype=torch.uint8).to(device)
        self.zero = torch.zeros(1, 1, dtype=torch.uint8).to(device)

    def flags_before(self) -> Tensor:
        """The index of each slot's flag less the high part."""
        return self.number * self.counted[self.payload]

    def find(self, flags: Tensor, edges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Find set flags (shape ``[n, flags]``, bool or uint8); each payload's flags begin at its edge.

        Returns:
            For each slot the index of the set flag with its number (shape ``[n, K]``, int64; at most ``flags`` in
            unused slots), which slots are used (``[n, K]``, bool), and each payload's number of set flags (``[n, S]``).
        """
        # The number of set flags before each; integer sums are the same in any order.
        zeros = self.zero.expand(flags.shape[0], 1)
        before = torch.cat([zeros, flags.view(torch.uint8)], dim=1).cumsum(1)
        at_edges = before[:, edges]
        counts = at_edges.diff(dim=1)
        found = torch.searchsorted(before, at_edges[:, self.payload] + self.number, right=True) - 1
        return found, self.number < counts[:, self.payload], counts


def unpack_on_device(layouts: SideBySide, payloads: Tensor) -> Arrived:
    """Unpack payloads, shape ``[n, layouts.num_bytes]``, uint8, one row a sender.

    Raises:
        PayloadError: They have another size.
    """
    senders, size = payloads.shape
    if size != layouts.num_bytes:
        raise PayloadError(f"the payload has {size} bytes, the layout says {layouts.num_bytes}")
    value_format, every = layouts.value_format, layouts.layouts
    parts = payloads.split([size for layout in every for size in layout.part_sizes], dim=1)
    table = layouts.table[layouts.payload]
    headers = torch.cat(parts[0::5], dim=1).view(torch.int32).view(senders, -1, 3)
    local, in_use, raised = _decode_positions(layouts, torch.cat(parts[2::5], dim=1), table)
    # Unused slots have the end as position, so the position of a used slot must be below that of the next slot.
    ends = table[:, 3]
    positions = torch.where(in_use, local + table[:, 2], ends)
    wrong = (positions + in_use)[:, :-1] > positions[:, 1:]
    wrong = torch.cat([layouts.zero.expand(senders, 1), wrong], dim=1).cumsum(1, dtype=torch.int32)
    # A count that needs all 32 bits is negative here, and does not equal the number of set flags.
    valid = (
        (headers[:, :, ::2] == layouts.headers[:, ::2]).all(2)
        & (headers[:, :, 1] == raised)
        & (raised <= layouts.capacities)
        & (wrong[:, layouts.pair_edges].diff(dim=1) == 0)
    )
    positions = torch.where(positions < ends, positions, layouts.spare)
    scales, tensor = torch.cat(parts[1::5], dim=1).flatten().view(torch.float32), positions
    if value_format in SCALED_FORMATS:
        rows = torch.arange(senders, device=payloads.device) * layouts.num_tensors
        tensor = torch.searchsorted(layouts.tensor_ends, positions, right=True) + rows.unsqueeze(1)
    # Each payload's values, padded to the bytes of its slots.
    sizes = [
        values_num_bytes(value_format, slots) - layout.part_sizes[3]
        for slots, layout in zip(layouts.slots, every, strict=True)
    ]
    padding = [layouts.zero.expand(senders, size) for size in sizes]
    data = torch.cat([*chain.from_iterable(zip(parts[3::5], padding, strict=True))], dim=1)
    values = decode_values(data.flatten(), positions.numel(), tensor.flatten(), scales, value_format)
    values = torch.where(in_use, values.view_as(positions), 0.0)
    return Arrived(positions, values, in_use, torch.cat(parts[4::5], dim=1), valid)


def encode_positions(layouts: SideBySide, positions: Tensor, in_use: Tensor) -> Tensor:
    """:meth:`PositionCode.encode`, payload by payload: uint8.

    ``positions`` (``[K]``, int64) are each slot's in its payload, anything in unused slots.
    """
    codes, table = [layout.position_code for layout in layouts.layouts], layouts.table[layouts.payload]
    local = torch.where(in_use, positions, 0)
    # The last flag is for unused slots, and is not sent.
    num_flags = sum(code.num_flags for code in codes)
    flag = torch.where(in_use, (local >> table[:, 1]) + table[:, 0] + layouts.flags_before(), num_flags)
    flags = torch.zeros(num_flags + 1, dtype=torch.uint8, device=local.device).scatter_(0, flag, 1)
    flags_of = flags[:-1].split([code.num_flags for code in codes])
    # One byte a bit: the lowest bits in the first plane.
    low = local.view(torch.uint8).view(-1, 8)[:, : layouts.low_bytes]
    planes = ((low.unsqueeze(2) >> layouts.eight) & 1).flatten(1).t()
    parts = []
    for code, own_flags, own_planes in zip(codes, flags_of, planes.split(layouts.slots, dim=1), strict=True):
        parts += [own_flags, *own_planes[: code.low_bits, : code.capacity].unbind()]
        parts.append(layouts.zero.expand(1, 8 * code.num_bytes - code.num_bits).squeeze(0))
    bits = torch.cat(parts).view(-1, 8)
    return (bits << layouts.eight).sum(1, dtype=torch.uint8)


def _decode_positions(layouts: SideBySide, message: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Decode the positions of ``n`` senders (shape ``[n, bytes]``).

    Returns:
        Indices into each payload (shape ``[n, K]``, int64, not negative; anything in unused slots), which slots are
        used (``[n, K]``, bool), and the number of set flags (``[n, S]``).
    """
    codes, senders = [layout.position_code for layout in layouts.layouts], message.shape[0]
    bits = ((message.unsqueeze(2) >> layouts.eight) & 1).flatten(1)
    sizes = [
        size
        for code in codes
        for size in (code.num_flags, *[code.capacity] * code.low_bits, 8 * code.num_bytes - code.num_bits)
    ]
    pieces, flags = iter(bits.split(sizes, dim=1)), []
    # By plane, payload by payload, padded with zeros to the same number of planes and to all slots.
    planes: list[list[Tensor]] = [[] for _ in range(8 * layouts.low_bytes)]
    for code, slots in zip(codes, layouts.slots, strict=True):
        flags.append(next(pieces))
        own = [next(pieces) for _ in range(code.low_bits)]
        for number, plane in enumerate(planes):
            sent = own[number : number + 1]
            plane += [*sent, layouts.zero.expand(senders, slots - code.capacity * len(sent))]
        next(pieces)
    raised, in_use, counts = layouts.find(torch.cat(flags, dim=1), layouts.flag_edges)
    low = message.new_zeros(senders, raised.shape[1], 8)
    if layouts.low_bytes:
        shape = (senders, layouts.low_bytes, 8, raised.shape[1])
        stacked = torch.cat([*chain.from_iterable(planes)], dim=1).view(shape)
        low[:, :, : layouts.low_bytes].copy_((stacked << layouts.eight.view(8, 1)).sum(2, dtype=torch.uint8).mT)
    high = raised - table[:, 0] - layouts.flags_before()
    return (high << table[:, 1]) | low.view(torch.int64).squeeze(2), in_use, counts


def _edges(sizes: Sequence[int]) -> Tensor:
    """The start of each part and the end of the last: shape ``[parts + 1]``, int64."""
    return torch.tensor([0, *accumulate(sizes)])
