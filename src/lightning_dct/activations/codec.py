"""Activations and their gradients as bytes on a wire, and back. Pure functions of a layout.

Forward, two byte tensors cross:

==================  ==================================  ==========================================================
payload             bytes                               holds
==================  ==================================  ==========================================================
positions           12, and the positions' own          header, positions (none when everything is sent)
values              1 per row, 4, and the values' own   scales of the rows that have entries, values
==================  ==================================  ==========================================================

Backward, one crosses: values at the same positions, in the same layout. The header is

======  =====  ==============================================================================
offset  bytes  holds
======  =====  ==============================================================================
0       1      magic number 0xDA
1       1      version of the layout, 1
2       2      zero, reserved
4       4      number of entries, uint32
8       4      fingerprint of the layout (CRC-32 of its numbers), uint32
======  =====  ==============================================================================

All sizes follow from the layout alone; zeros fill the rest.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dct.activations.layout import HEADER_BYTES, ActivationLayout
from lightning_dct.activations.noise import BACKWARD_ROUNDING, FORWARD_ROUNDING, uniform
from lightning_dct.wire.payload import PayloadError
from lightning_dct.wire.rows import (
    LEVELS,
    decode_rows,
    encode_rows,
    row_scales_num_bytes,
    row_values_num_bytes,
)

MAGIC = 0xDA
VERSION = 1
HEADER = struct.Struct("<BBHII")
assert HEADER.size == HEADER_BYTES


class Encoded(NamedTuple):
    """What crosses forward, and what the sender keeps.

    Attributes:
        positions_payload: Shape ``[layout.forward_positions_bytes]``, uint8.
        values_payload: Shape ``[layout.forward_values_bytes]``, uint8.
        positions: Shape ``[count]``, int64: what was sent, for :func:`decode_backward`; None for everything. Splits
            other than ``SplitPoint`` keep here what both ends need to read the gradient.
    """

    positions_payload: Tensor
    values_payload: Tensor
    positions: Tensor | None


def encode_forward(
    layout: ActivationLayout, activations: Tensor, positions: Tensor | None, seed: int | None = None
) -> Encoded:
    """Write activations.

    Args:
        layout: The payloads' layout.
        activations: Shape ``layout.shape``, floating point.
        positions: Shape ``[count]``, int64: ascending positions in the flattened tensor, at most ``layout.capacity``.
            None sends everything.
        seed: For stochastic rounding; None rounds to nearest.
    """
    if positions is not None:
        positions = positions[positions < layout.numel]
    values = encode_values_at(layout, layout.forward_format, activations, positions, seed, FORWARD_ROUNDING)
    return Encoded(_encode_positions(layout, positions, activations.device), values, positions)


def decode_forward(
    layout: ActivationLayout,
    positions_payload: Tensor,
    values_payload: Tensor,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """Read activations from the payloads of :class:`Encoded`.

    Returns:
        The activations, shape ``layout.shape``, zero where nothing was sent, and the positions for
        :func:`encode_backward` (shape ``[count]``, int64, or None when everything was sent).

    Raises:
        PayloadError: The bytes are not payloads of this layout.
    """
    positions = _decode_positions(layout, positions_payload)
    return decode_values_at(layout, layout.forward_format, values_payload, positions, dtype), positions


def encode_backward(
    layout: ActivationLayout, gradient: Tensor, positions: Tensor | None, seed: int | None = None
) -> Tensor:
    """Write the gradient of activations as received, at the positions that :func:`decode_forward` returned.

    ``seed`` is for stochastic rounding; None rounds to nearest. The payload is uint8, ``[layout.backward_bytes]``.
    """
    return encode_values_at(layout, layout.backward_format, gradient, positions, seed, BACKWARD_ROUNDING)


def decode_backward(
    layout: ActivationLayout, payload: Tensor, positions: Tensor | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Read the gradient at the positions that the sender of the activations kept; zero elsewhere.

    Raises:
        PayloadError: The payload has another size.
    """
    return decode_values_at(layout, layout.backward_format, payload, positions, dtype)


def read_header(layout: ActivationLayout, payload: Tensor) -> int:
    """Check the header of a positions payload, and return the number of entries that were sent.

    Raises:
        PayloadError: The payload was made for another layout, or is corrupt.
    """
    _check_size("positions", payload, layout.forward_positions_bytes)
    magic, version, reserved, count, fingerprint = HEADER.unpack(bytes(payload[:HEADER_BYTES].tolist()))
    if magic != MAGIC:
        raise PayloadError(f"the activations' payload begins with {magic:#x} where {MAGIC:#x} was expected")
    if version != VERSION:
        raise PayloadError(
            f"the activations' payload has layout version {version}, this rank reads {VERSION}: install the same"
            " lightning_dct on every host"
        )
    if fingerprint != layout.fingerprint:
        raise PayloadError(
            "the activations' payload was made for another shape, other settings or another stage of warm-up: use"
            " the same settings on both ranks and call `advance` with the same step on both"
        )
    if count > layout.capacity:
        raise PayloadError(
            f"the activations' payload claims {count} entries, its layout holds at most {layout.capacity}"
        )
    if reserved:
        raise PayloadError(f"the activations' payload has {reserved:#x} in its header where this version writes zero")
    return count


def encode_values_at(
    layout: ActivationLayout,
    value_format: str,
    dense: Tensor,
    positions: Tensor | None,
    seed: int | None,
    stream: int,
) -> Tensor:
    """Write the entries at some positions: scales, then values.

    Args:
        layout: The payload's layout.
        value_format: Of the values.
        dense: Shape ``layout.shape``, floating point.
        positions: Shape ``[count]``, int64, ascending. Positions beyond the tensor, at the end, are written as zeros.
            None for all.
        seed: For stochastic rounding; None rounds to nearest.
        stream: Chooses the random numbers.

    Returns:
        Shape ``[layout.values_bytes(value_format)]``, uint8.
    """
    values = _gather(dense.detach().reshape(-1), positions).to(torch.float32)
    noise = None
    if seed is not None and value_format in LEVELS:
        noise = uniform(values.numel(), seed, stream, values)
    rows = _rows_of(layout, value_format, positions)
    data, scale_data = encode_rows(values, rows, layout.scales_capacity, value_format, noise)
    payload = torch.zeros(layout.values_bytes(value_format), dtype=torch.uint8, device=dense.device)
    scale_bytes = row_scales_num_bytes(value_format, layout.scales_capacity)
    payload[:scale_bytes] = scale_data
    payload[scale_bytes : scale_bytes + data.numel()] = data
    return payload


def decode_values_at(
    layout: ActivationLayout, value_format: str, payload: Tensor, positions: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Undo :func:`encode_values_at`; zero everywhere else.

    Raises:
        PayloadError: The payload has another size.
    """
    _check_size("values", payload, layout.values_bytes(value_format))
    count = layout.numel if positions is None else positions.numel()
    scale_bytes = row_scales_num_bytes(value_format, layout.scales_capacity)
    data = payload[scale_bytes : scale_bytes + row_values_num_bytes(value_format, count)]
    rows = _rows_of(layout, value_format, positions)
    values = _converted(decode_rows(data, count, rows, payload[:scale_bytes], value_format), dtype)
    if positions is None:
        return values.view(layout.shape)
    # One more entry takes the positions beyond the tensor.
    dense = values.new_zeros(layout.numel + 1).scatter_(0, positions, values)
    return dense[: layout.numel].view(layout.shape)


def _gather(flat: Tensor, positions: Tensor | None) -> Tensor:
    if positions is None:
        return flat
    inside = positions < flat.numel()
    return torch.where(inside, flat[positions.clamp(max=flat.numel() - 1)], 0)


def _rows_of(layout: ActivationLayout, value_format: str, positions: Tensor | None) -> Tensor | None:
    """The row of each entry, counted among the rows that have entries; None where no format needs it."""
    if positions is None or value_format not in LEVELS:
        return None
    rows = positions.clamp(max=layout.numel - 1) // layout.row_length
    new = torch.ones_like(rows)
    new[1:] = rows[1:] != rows[:-1]
    return new.cumsum(0).sub_(1)


def _converted(values: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` as ``dtype``; clamped to the range of fp16, because rounding may have left it."""
    if dtype == torch.float16:
        limit = torch.finfo(dtype).max
        values = torch.where(values.isfinite(), values.clamp(-limit, limit), values)
    return values.to(dtype)


def _encode_positions(layout: ActivationLayout, positions: Tensor | None, device: torch.device) -> Tensor:
    count = layout.numel if positions is None else positions.numel()
    header = HEADER.pack(MAGIC, VERSION, 0, count, layout.fingerprint)
    payload = torch.zeros(layout.forward_positions_bytes, dtype=torch.uint8, device=device)
    payload[:HEADER_BYTES] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    if layout.position_code is not None and positions is not None:
        payload[HEADER_BYTES:] = layout.position_code.encode(positions)
    return payload


def _decode_positions(layout: ActivationLayout, payload: Tensor) -> Tensor | None:
    count = read_header(layout, payload)
    if layout.position_code is None:
        if count != layout.numel:
            raise PayloadError(f"the activations' payload claims {count} entries where all {layout.numel} are sent")
        return None
    try:
        return layout.position_code.decode(payload[HEADER_BYTES:], count)
    except ValueError as error:
        raise PayloadError(f"the activations' positions are corrupt: {error}") from error


def _check_size(part: str, payload: Tensor, num_bytes: int) -> None:
    if payload.numel() != num_bytes:
        raise PayloadError(
            f"the activations' {part} payload has {payload.numel()} bytes, the layout says {num_bytes}: use the same"
            " shape and settings on both ranks"
        )
