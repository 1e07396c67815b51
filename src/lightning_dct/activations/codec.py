"""Activations and their gradients as bytes on a wire, and back. Pure functions of a layout.

The payload of activations:

==================  ==================================  ==========================================================
part                bytes                               content
==================  ==================================  ==========================================================
header              12                                  see :mod:`lightning_dct.wire.payload`; magic number 0xDA
positions           see :class:`PositionCode`           none when everything is sent
scales              1 per row, and 4                    of the rows that have entries, in formats that need them
values              see :mod:`lightning_dct.wire.rows`  of the entries
==================  ==================================  ==========================================================

The payload of their gradients is scales and values at the same positions, which the sender of the
activations keeps. All sizes follow from the layout; zeros fill the rest.

The random numbers of stochastic rounding are a pure function of a seed, the data and the position.
A generator with state would give other numbers on a GPU, and when activation checkpointing repeats
a forward. A hash gives the same numbers for the same seed and data on every device, and does not
wait for a GPU. The integer hash is "lowbias32" (C. Wellons, *Prospecting for hash functions*,
2018).
"""

import math
import zlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_dct.compress.awaited import Awaited, must_not_wait
from lightning_dct.kernels import compiled
from lightning_dct.wire.payload import HEADER, read_header, write_header
from lightning_dct.wire.positions import PayloadError, PositionCode
from lightning_dct.wire.rows import (
    LEVELS,
    SHARES,
    decode_rows,
    encode_rows,
    row_scales_num_bytes,
    row_values_num_bytes,
)

MAGIC = 0xDA
# The two multipliers of lowbias32, as signed 32-bit integers.
FIRST = 0x7FEB352D
SECOND = 0x846CA68B - (1 << 32)
# Numbers computed at a time. They stay in a CPU's cache, which doubles the speed.
CHUNK = 1 << 15

FORWARD_ROUNDING = 1
BACKWARD_ROUNDING = 2


@dataclass(frozen=True)
class ActivationLayout:
    """The form of the payloads for activations of a shape, the same on both ranks."""

    shape: tuple[int, ...]
    capacity: int  # most entries that are sent
    forward_format: str  # of the activations
    backward_format: str  # of their gradients

    @cached_property
    def numel(self) -> int:
        """Entries of the tensor."""
        return math.prod(self.shape)

    @property
    def sends_everything(self) -> bool:
        """Whether all entries are sent, without positions."""
        return self.capacity == self.numel

    @property
    def row_length(self) -> int:
        """Entries of a row, the last dimension."""
        return self.shape[-1] if self.shape else 1

    @property
    def scales_capacity(self) -> int:
        """Most rows with entries in a payload."""
        return min(self.numel // max(self.row_length, 1), self.capacity)

    @cached_property
    def position_code(self) -> PositionCode | None:
        """The code of positions; None when everything is sent."""
        return None if self.sends_everything else PositionCode(self.numel, self.capacity)

    @cached_property
    def values_begin(self) -> int:
        """Bytes of a forward payload before its scales and values."""
        return HEADER.size + (self.position_code.num_bytes if self.position_code else 0)

    @property
    def forward_bytes(self) -> int:
        """Size of the forward payload."""
        return self.values_begin + self.values_bytes(self.forward_format)

    @property
    def backward_bytes(self) -> int:
        """Size of the backward payload."""
        return self.values_bytes(self.backward_format)

    @cached_property
    def on_the_wire(self) -> tuple[int, int]:
        """How a pipeline sends the forward payload: as many words of four bytes as its gradient
        takes, and the rest.

        See :mod:`lightning_dct.pipeline.borders`. The rest is at least one byte, because empty
        tensors cannot be sent.
        """
        words = -(-self.backward_bytes // 4)
        return words, max(self.forward_bytes - 4 * words, 1)

    @cached_property
    def fingerprint(self) -> int:
        """A number that differs between layouts that differ."""
        return zlib.crc32(repr(self).encode())

    def values_bytes(self, value_format: str) -> int:
        """Bytes of values and scales in a format."""
        scales = row_scales_num_bytes(value_format, self.scales_capacity)
        return scales + row_values_num_bytes(value_format, self.capacity)


def encode_forward(
    layout: ActivationLayout, activations: Tensor, positions: Tensor | None, seed: int | None = None
) -> Tensor:
    """Encode activations, floating point of shape ``layout.shape``: uint8,
    ``[layout.forward_bytes]``.

    ``positions`` (``[count]``, int64) are ascending in the flattened tensor and at most
    ``layout.capacity``; None sends everything. ``seed`` is for stochastic rounding; None rounds to
    nearest.
    """
    count = layout.numel if positions is None else positions.numel()
    header = write_header(MAGIC, 0, count, layout.fingerprint)
    key = None if seed is None else salt(seed, FORWARD_ROUNDING)
    return _encode(layout, layout.forward_format, activations, positions, key, header)


def decode_forward(
    layout: ActivationLayout,
    payload: Tensor,
    dtype: torch.dtype = torch.float32,
    awaited: Awaited | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Decode activations.

    With ``awaited`` a GPU's host does not wait, if everything is sent: a corrupt header is reported
    later. Otherwise it waits for the number of entries.

    Returns:
        The activations, zero where nothing was sent, and the positions for :func:`encode_backward`.

    Raises:
        PayloadError: The bytes are not a payload of this layout.
    """
    _check_size(payload, layout.forward_bytes)
    header, positions_data, values = payload.tensor_split([HEADER.size, layout.values_begin])
    positions = None
    if layout.sends_everything and awaited is not None and must_not_wait(payload.device):
        expected = write_header(MAGIC, 0, layout.numel, layout.fingerprint)
        awaited.on_ready(
            (header == _on_device(expected, header.device)).all().view(1), _check_header
        )
    else:
        count = read_header(header, MAGIC, 0, layout.fingerprint, layout.capacity)
        if layout.position_code is not None:
            positions = layout.position_code.decode(positions_data, count)
        elif count != layout.numel:
            raise PayloadError(
                f"the activations' payload claims {count} entries where all {layout.numel} are sent"
            )
    return _decode_values(layout, layout.forward_format, values, positions, dtype), positions


def encode_backward(
    layout: ActivationLayout, gradient: Tensor, positions: Tensor | None, seed: int | None = None
) -> Tensor:
    """Encode the gradient of received activations at the same positions: uint8,
    ``[layout.backward_bytes]``.

    ``seed`` is for stochastic rounding; None rounds to nearest.
    """
    key = None if seed is None else salt(seed, BACKWARD_ROUNDING)
    return _encode(layout, layout.backward_format, gradient, positions, key)


def decode_backward(
    layout: ActivationLayout,
    payload: Tensor,
    positions: Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Decode the gradient at the positions that the sender of the activations kept; zero elsewhere.

    Raises:
        PayloadError: The payload has another size.
    """
    _check_size(payload, layout.backward_bytes)
    return _decode_values(layout, layout.backward_format, payload, positions, dtype)


def _encode(
    layout: ActivationLayout,
    value_format: str,
    dense: Tensor,
    positions: Tensor | None,
    key: int | None,
    header: bytes = b"",
) -> Tensor:
    """Forward the header and the positions; then, both ways, scales, values, and zeros up to the
    payload's size.
    """
    if kernel := _compiled(layout, value_format, positions, dense):
        return kernel.encode(
            dense, layout.scales_capacity, LEVELS[value_format], SHARES, key, header
        )
    flat = dense.detach().reshape(-1)
    values = (flat if positions is None else flat[positions]).to(torch.float32)
    noise = (
        uniform(values.numel(), key, values) if key is not None and value_format in LEVELS else None
    )
    rows = _rows_of(layout, value_format, positions)
    data, scale_data = encode_rows(values, rows, layout.scales_capacity, value_format, noise)
    filling = layout.values_bytes(value_format) - scale_data.numel() - data.numel()
    parts = [scale_data, data, data.new_zeros(filling)] if filling else [scale_data, data]
    if header:
        if layout.position_code is not None and positions is not None:
            parts.insert(0, layout.position_code.encode(positions))
        parts.insert(0, _on_device(header, dense.device))
    return torch.cat(parts)


def _decode_values(
    layout: ActivationLayout,
    value_format: str,
    payload: Tensor,
    positions: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if kernel := _compiled(layout, value_format, positions, payload):
        values = kernel.decode(
            payload, layout.numel, layout.scales_capacity, LEVELS[value_format], SHARES
        )
    else:
        count = layout.numel if positions is None else positions.numel()
        scales, data = payload.tensor_split(
            [row_scales_num_bytes(value_format, layout.scales_capacity)]
        )
        rows = _rows_of(layout, value_format, positions)
        data = data[: row_values_num_bytes(value_format, count)]
        values = decode_rows(data, count, rows, scales, value_format)
    if dtype == torch.float16:
        # Rounding may exceed the range of fp16.
        limit = torch.finfo(dtype).max
        values = torch.where(values.isfinite(), values.clamp(-limit, limit), values)
    values = values.to(dtype)
    if positions is not None:
        values = values.new_zeros(layout.numel).scatter_(0, positions, values)
    return values.view(layout.shape)


def _compiled(
    layout: ActivationLayout, value_format: str, positions: Tensor | None, data: Tensor
) -> Any:
    """The kernel for rows of equal length on the device of ``data``; None if torch encodes and
    decodes them.
    """
    wanted = positions is None and value_format in LEVELS and layout.numel > 0
    return compiled(data.device.type, loops="numba_rows") if wanted else None


def _rows_of(
    layout: ActivationLayout, value_format: str, positions: Tensor | None
) -> Tensor | None:
    """The row of each entry, counted among the rows with entries; None if the format does not need
    it.
    """
    if positions is None or value_format not in LEVELS:
        return None
    return torch.unique_consecutive(positions // layout.row_length, return_inverse=True)[1]


@lru_cache
def _on_device(header: bytes, device: torch.device) -> Tensor:
    """Cached, because the copy waits for a GPU, and where everything is sent the header is always
    the same.
    """
    return torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)


def _check_header(valid: list[int]) -> None:
    if not all(valid):
        raise PayloadError(
            "an activation payload of an earlier step is corrupt, or was made for another layout:"
            " use the same shape and settings on both ranks. A run on CPUs reports in more detail"
            " what differs"
        )


def _check_size(payload: Tensor, num_bytes: int) -> None:
    if payload.numel() != num_bytes:
        raise PayloadError(
            f"the activation payload has {payload.numel()} bytes, but its layout needs {num_bytes}:"
            " use the same shape and settings on both ranks"
        )


def mixed_seed(seed: int, step: int) -> int:
    """One 63-bit seed for an optimizer step."""
    # With SplitMix64's increment and first multiplier, neighbouring steps get distant seeds.
    mixed = (seed * 0xBF58476D1CE4E5B9 + (step + 1) * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    return (mixed ^ (mixed >> 31)) & ((1 << 63) - 1)


def uniform(count: int, key: int, content: Tensor) -> Tensor:
    """Random numbers in [0, 1), multiples of ``2 ** -24``: fp32 ``[count]`` on the device of
    ``content``.

    ``key`` is a :func:`salt`. With ``content``, floating point of any shape, each micro-batch has
    its own numbers.
    """
    bits = content.detach().to(torch.float32).reshape(-1).view(torch.int32)
    # Zeros at the end of the data do not change its numbers.
    total = bits.sum(0, keepdim=True, dtype=torch.int64) + key
    low = _hashed(_fast((total & 0x7FFFFFFF).to(torch.int32)))
    high = _hashed(_fast((total >> 31 & 0x7FFFFFFF).to(torch.int32)) ^ low)
    numbers = torch.empty(count, device=content.device)
    chunk = CHUNK if content.device.type == "cpu" else max(count, 1)
    for start in range(0, count, chunk):
        place = torch.arange(
            start, min(start + chunk, count), dtype=torch.int32, device=content.device
        )
        hashed = _hashed(_hashed(_fast(place) ^ low) + high)
        torch.mul(torch.as_tensor(hashed & 0xFFFFFF), 2.0**-24, out=numbers[start : start + chunk])
    return numbers


def salt(seed: int, stream: int) -> int:
    """The number, below ``2 ** 62``, that a seed and a purpose add to the sum of the data's
    bits.
    """
    return (seed * 0x9E3779B97F4A7C15 + (stream + 1) * 0xBF58476D1CE4E5B9) & ((1 << 62) - 1)


def _fast(numbers: Tensor) -> Any:
    """A numpy array on the CPU: numpy takes half the time for these operations, and a third for a
    single number.
    """
    return numbers.numpy() if numbers.device.type == "cpu" else numbers


def _hashed(x: Any) -> Any:
    """Scramble int32 numbers, one to one, in place."""
    x ^= (x >> 16) & 0xFFFF
    x *= FIRST
    x ^= (x >> 15) & 0x1FFFF
    x *= SECOND
    x ^= (x >> 16) & 0xFFFF
    return x
