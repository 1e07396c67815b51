"""Payloads written and read without the host ever looking at a number: for GPUs, where looking means waiting.

The bytes are those of :mod:`lightning_dct.wire.payload`. The difference is that shapes do not depend on data: entries
come in a fixed number of slots, how many of them are in use is a tensor on the device, and so is the answer to whether
a payload that has arrived is sound. Whatever its bytes say, what is read from it lies within bounds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dct.wire.bits import pack_bits, unpack_bits
from lightning_dct.wire.payload import FORMAT_CODES, HEADER, MAGIC, VERSION, PayloadError, PayloadLayout
from lightning_dct.wire.positions import PositionCode
from lightning_dct.wire.values import decode_values, encode_values

# Where a header holds the number of entries.
COUNT_BYTES = slice(4, 8)


class Slots(NamedTuple):
    """Entries of a bucket in a fixed number of slots; the first ``num_used`` of them are in use.

    Attributes:
        positions: Shape ``[slots]``, int64: ascending places; any place in a slot that is not in use.
        values: Shape ``[slots]``, floating point; zero in a slot that is not in use.
        num_used: Shape ``[]``, int64.
    """

    positions: Tensor
    values: Tensor
    num_used: Tensor

    @property
    def in_use(self) -> Tensor:
        """Which slots are in use: shape ``[slots]``, bool."""
        return torch.arange(self.positions.numel(), device=self.num_used.device) < self.num_used


class Arrived(NamedTuple):
    """What one payload says.

    Attributes:
        entries: In ``layout.capacity`` slots, values in fp32. A slot that is not in use names a place of its own, so
            that adding its zero there does not disturb others.
        whole: Shape ``[whole_bytes]``, uint8: the tensors that went whole, one after the other.
        sound: Shape ``[]``, bool: whether the bytes are a payload of this layout. Where they are not, entries and whole
            tensors mean nothing.
    """

    entries: Slots
    whole: Tensor
    sound: Tensor


def pack_on_device(layout: PayloadLayout, entries: Slots, tensor_index: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Write one payload: byte for byte what :func:`~lightning_dct.wire.payload.pack` writes for the same entries.

    Args:
        layout: The payload's shape.
        entries: Places in the flattened bucket and the values there, in at most ``layout.capacity`` slots.
        tensor_index: Shape ``[slots]``, int64: which tensor each entry belongs to.
        whole: Shape ``[layout.whole_bytes]``, uint8: the tensors that go whole.

    Returns:
        The payload (uint8, shape ``[layout.num_bytes]``) and the values as every receiver will read them (fp32; zero
        in slots that are not in use).
    """
    in_use, value_format = entries.in_use, layout.value_format
    # Slots that are not in use are zeros of one more tensor, whose scale is zero and is not sent.
    tensor_index = torch.where(in_use, tensor_index, layout.num_scales)
    data, scales = encode_values(entries.values, tensor_index, layout.num_scales + 1, value_format)
    payload = _header(layout, entries.num_used.device).new_zeros(layout.num_bytes)
    header, scale_bytes, position_bytes, value_bytes, whole_bytes = payload.split(layout.part_sizes)
    header.copy_(_header(layout, payload.device))
    header[COUNT_BYTES].copy_(entries.num_used.to(torch.int32).view(1).view(torch.uint8))
    scale_bytes.copy_(scales[: layout.num_scales].view(torch.uint8))
    position_bytes.copy_(_encode_positions(layout.position_code, entries.positions, in_use))
    value_bytes[: data.numel()].copy_(data)
    whole_bytes.copy_(whole)
    received = decode_values(data, in_use.numel(), tensor_index, scales, value_format)
    return payload, torch.where(in_use, received, 0.0)


def unpack_on_device(layout: PayloadLayout, payload: Tensor) -> Arrived:
    """Read one payload; what it says is to be believed once somebody has looked at whether it is sound.

    Args:
        layout: The shape it must have.
        payload: Shape ``[layout.num_bytes]``, uint8.

    Raises:
        PayloadError: It has another size. That much is known without looking.
    """
    if payload.numel() != layout.num_bytes:
        raise PayloadError(f"the payload has {payload.numel()} bytes, the layout says {layout.num_bytes}")
    header, scales, position_bytes, value_bytes, whole = payload.split(layout.part_sizes)
    # A number that needs all 32 bits turns negative here and is as wrong then.
    count = header[COUNT_BYTES].clone().view(torch.int32).to(torch.int64).squeeze(0)
    rest = header.clone()
    rest[COUNT_BYTES] = 0
    header_is_sound = (rest == _header(layout, payload.device)).all()
    places = torch.arange(layout.capacity, device=payload.device)
    in_use = places < count
    positions, raised = _decode_positions(layout.position_code, position_bytes, in_use)
    within = positions < layout.position_code.universe
    ascending = positions[1:] > positions[:-1]
    sound = (
        header_is_sound
        & (raised == count)
        & (count <= layout.capacity)
        & (within | ~in_use).all()
        & (ascending | ~in_use[1:]).all()
    )
    positions = torch.where(in_use & within, positions, places)
    values = decode_values(
        value_bytes,
        layout.capacity,
        layout.tensor_index(positions),
        scales.clone().view(torch.float32),
        layout.value_format,
    )
    return Arrived(Slots(positions, torch.where(in_use, values, 0.0), count), whole, sound)


def _encode_positions(code: PositionCode, positions: Tensor, in_use: Tensor) -> Tensor:
    """What :meth:`PositionCode.encode` writes for the positions in use."""
    slots = torch.arange(positions.numel(), device=positions.device)
    # The last bit is for the slots that are not in use, and is not sent.
    bits = torch.zeros(code.num_bits + 1, dtype=torch.uint8, device=positions.device)
    flags = torch.where(in_use, (positions >> code.low_bits) + slots, code.num_bits)
    bits.scatter_(0, flags, 1)
    shifts = torch.arange(code.low_bits, device=positions.device).unsqueeze(1)
    planes = bits[code.num_flags : code.num_bits].view(code.low_bits, code.capacity)
    planes[:, : positions.numel()].copy_((torch.where(in_use, positions, 0) >> shifts) & 1)
    return pack_bits(bits[: code.num_bits])


def _decode_positions(code: PositionCode, message: Tensor, in_use: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (shape ``[code.capacity]``; anything in slots that are not in use), and how many the message marks."""
    bits = unpack_bits(message, code.num_bits)
    flags, planes = bits.split([code.num_flags, code.num_bits - code.num_flags])
    raised = torch.nonzero_static(flags, size=code.capacity, fill_value=0).squeeze(1)
    high = raised - torch.arange(code.capacity, device=bits.device)
    # Where the flags do not hold as many positions as the header says, `high` can be negative.
    positions = torch.where(in_use, high, 0).clamp_(min=0) << code.low_bits
    shifts = torch.arange(code.low_bits, device=bits.device).unsqueeze(1)
    low = planes.view(code.low_bits, code.capacity).to(torch.int64) << shifts
    return positions | low.sum(0), flags.sum()


@lru_cache(maxsize=1024)
def _header(layout: PayloadLayout, device: torch.device) -> Tensor:
    """A payload's header without the number of entries: shape ``[12]``, uint8. Copied to the device once."""
    header = HEADER.pack(MAGIC, VERSION, FORMAT_CODES[layout.value_format], 0, 0, layout.fingerprint)
    return torch.tensor(list(header), dtype=torch.uint8, device=device)
