"""One payload: header, scales, positions, values and dense tensors in a single uint8 tensor.

Scales and positions begin at a word of 32 bits, the dense tensors and the next payload at one of
64: a GPU reads and writes words. Zeros fill the gaps. The header's 12 bytes are

======  =====  ==============================================================================
offset  bytes  holds
======  =====  ==============================================================================
0       1      magic number 0xDC
1       1      version of the layout, 3
2       1      value format: 0 fp32, 1 bf16, 3 1bit, 5 2bit
3       1      zero, kept for later versions
4       4      number of entries, uint32
8       4      fingerprint of the layout (CRC-32 of its numbers), uint32
======  =====  ==============================================================================

A receiver checks all of it. So corrupt bytes, or ranks with another model or other settings, cause
an error and never a write out of bounds. A tag of the step is mixed into the fingerprint: a rank at
another step reads a wrong one.
"""

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_dct.kernels import compiled, positions_of
from lightning_dct.kernels.bits import flags_num_bytes, num_bytes
from lightning_dct.wire.positions import PayloadError, PositionCode
from lightning_dct.wire.values import BITS_PER_VALUE, SCALED_FORMATS, decode_values, encode_values

MAGIC = 0xDC
VERSION = 3
HEADER = struct.Struct("<BBBBII")
BE_ALIKE = (
    "use the same model and settings on every rank, and step the same optimizers in the same order,"
    " for as many batches an epoch"
)
FORMAT_CODES = {"fp32": 0, "bf16": 1, "1bit": 3, "2bit": 5}


def _whole(num_bytes: int, word: int) -> int:
    return -(-num_bytes // word) * word


@dataclass(frozen=True)
class PayloadLayout:
    """The sizes of one bucket's payloads, the same on every rank."""

    tensor_sizes: tuple[int, ...]  # entries of each tensor of the bucket, in the bucket's order
    # The largest number of sent entries of each tensor; 0 for a tensor sent dense.
    capacities: tuple[int, ...]
    value_format: str
    dense_bytes: int = 0  # bytes of all tensors sent dense
    # Entries of each tensor, if its size has been rounded up; positions behind them are corrupt.
    entries: tuple[int, ...] | None = None

    @cached_property
    def capacity(self) -> int:
        """The largest number of entries in a payload."""
        return sum(self.capacities)

    @cached_property
    def position_code(self) -> PositionCode:
        """The code for positions in the bucket."""
        return PositionCode(sum(self.tensor_sizes), self.capacity)

    @cached_property
    def fingerprint(self) -> int:
        """A checksum of the layout."""
        return zlib.crc32(
            repr((self.tensor_sizes, self.capacities, self.value_format, self.dense_bytes)).encode()
        )

    @cached_property
    def num_scales(self) -> int:
        """Scales in a payload: one a tensor, in formats with scales."""
        return len(self.tensor_sizes) if self.value_format in SCALED_FORMATS else 0

    @cached_property
    def edges(self) -> tuple[int, int, int, int, int, int]:
        """Where header, scales, positions, values and dense tensors begin, in bytes, and where the
        last ends.
        """
        positions = HEADER.size + 4 * self.num_scales
        values = _whole(positions + self.position_code.num_bytes, 4)
        dense = _whole(values + num_bytes(BITS_PER_VALUE[self.value_format] * self.capacity), 8)
        return 0, HEADER.size, positions, values, dense, _whole(dense + self.dense_bytes, 8)

    @cached_property
    def num_bytes(self) -> int:
        """Size of every payload, in bytes."""
        return self.edges[-1]

    @cached_property
    def spans(self) -> NDArray[np.int64]:
        """The entries of each tensor, and the number of its first flag: shape ``[2, tensors]``."""
        first = list(accumulate(self.tensor_sizes, initial=0))[:-1]
        return np.array([self.entries or self.tensor_sizes, first], np.int64)

    @cached_property
    def beyond(self) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """The words of 32 flags that a tensor does not fill, and the unused flags in each; none if
        sizes have not been rounded up to words.
        """
        sizes, first = self.spans if self.entries else self.spans[:, :0]
        over = sizes % 32
        words = (first + sizes) // 32
        return words[over > 0], (0xFFFFFFFF << over[over > 0] & 0xFFFFFFFF).astype(np.uint32)

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """What loops of numba read of it, in the order that they give it."""
        code = self.position_code
        _, *edges, _ = self.edges
        bits = BITS_PER_VALUE[self.value_format]
        of_code = code.num_bytes, code.num_flags, code.low_bits, code.capacity, code.universe
        return np.array([*edges, *of_code, bits], np.int64)

    @cached_property
    def flags_num_bytes(self) -> int:
        """Bytes of the flags of all tensors while they are not coded."""
        return flags_num_bytes(sum(self.tensor_sizes))


class Unpacked(NamedTuple):
    """The contents of one payload."""

    flags: Tensor  # packed: which entries of the flattened bucket are sent; see `bits.py`
    values: Tensor  # shape `[count]`, fp32: these entries
    dense: Tensor  # shape `[dense_bytes]`, uint8: the tensors sent dense, one after the other

    @property
    def positions(self) -> Tensor:
        """Indices of the sent entries in the flattened bucket: shape ``[count]``, int64,
        ascending.
        """
        return positions_of(self.flags, self.values.numel())


def pack_payload(
    layout: PayloadLayout,
    flags: Tensor,
    values: Tensor,
    counts: Sequence[int],
    dense: Tensor,
    tag: int = 0,
    kernel: str = "auto",
) -> Tensor:
    """Pack one payload: uint8, shape ``[layout.num_bytes]``.

    ``flags`` mark the sent entries of the flattened bucket, ``counts`` of each tensor and at most
    ``layout.capacity``, and ``values`` are the entries there. ``dense`` (``[layout.dense_bytes]``,
    uint8) holds the tensors sent dense.
    """
    header = write_header(
        MAGIC, FORMAT_CODES[layout.value_format], values.numel(), layout.fingerprint ^ tag
    )
    if (loops := _loops(layout, flags, kernel)) is not None:
        # numba has no other dtypes.
        own = values if values.dtype == torch.float64 else values.float()
        whole = loops.write_payload(
            layout.numbers, header, flags, own, counts, dense, layout.num_bytes
        )
        if whole is not None:
            return whole
    data, scales = encode_values(values, counts, layout.value_format, kernel)
    positions = layout.position_code.encode_flags(flags, kernel)
    first = torch.tensor([*header], dtype=torch.uint8, device=data.device)
    payload = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=data.device)
    parts = (first, scales.view(torch.uint8), positions, data, dense)
    for start, part in zip(layout.edges, parts, strict=False):
        payload[start : start + part.numel()] = part
    return payload


def _loops(layout: PayloadLayout, flags: Tensor, kernel: str) -> Any:
    """The loops that write and read a whole payload at once; None if there are none for it."""
    return compiled(flags.device.type, kernel) if layout.value_format in SCALED_FORMATS else None


def unpack_payload(layout: PayloadLayout, payload: Tensor) -> Unpacked:
    """Check and unpack one payload (uint8, shape ``[layout.num_bytes]``); :func:`read_payload`
    describes errors.
    """
    flags = payload.new_zeros(layout.flags_num_bytes)
    values = payload.new_empty(layout.capacity, dtype=torch.float32)
    count, _ = read_payload(layout, payload, flags, values)
    return Unpacked(flags, values[:count], read_dense(layout, payload))


def read_payload(
    layout: PayloadLayout,
    payload: Tensor,
    flags: Tensor,
    values: Tensor,
    tag: int = 0,
    kernel: str = "auto",
) -> tuple[int, bool]:
    """Check a payload, and read its flags, which are zero before, and the values of its entries.

    Args:
        layout: Its layout.
        payload: Shape ``[layout.num_bytes]``, uint8.
        flags: Shape ``[layout.flags_num_bytes]``, uint8, to be written.
        values: fp32, of which as many are written as the payload has entries.
        tag: That of the step.
        kernel: See :func:`~lightning_dct.kernels.cpu_kernel`.

    Returns:
        The number of entries, and whether they are finite: one that is not makes the scale so.

    Raises:
        PayloadError: The bytes are not a payload of this layout.
    """
    count = read_count(layout, payload, tag)
    if (loops := _loops(layout, flags, kernel)) is not None:
        found = loops.read_payload(layout.numbers, layout.spans, payload, count, flags, values)
        if found is not None:
            return count, found
        flags.zero_()  # what follows says what is wrong
    message = payload[layout.edges[2] :][: layout.position_code.num_bytes]
    counts = layout.position_code.decode_flags(message, count, flags, layout.tensor_sizes, kernel)
    words, beyond = layout.beyond
    if flags.is_cpu and (flags.numpy().view(np.uint32)[words] & beyond).any():
        raise PayloadError("the positions are corrupt: some are beyond the end of their tensor")
    read = unpack_values(layout, payload, counts, values[:count], kernel)
    return count, is_finite(read_scales(layout, payload) if layout.num_scales else read)


def is_finite(values: Tensor) -> bool:
    """Whether all values and their sum are finite: the cheapest check."""
    return not values.numel() or math.isfinite(float(values.sum()))


def read_count(
    layout: PayloadLayout, payload: Tensor, tag: int = 0, header: bytes | None = None
) -> int:
    """Check the size and the header of a payload, and return its number of entries (PayloadError).

    If the host has the header already, it need not wait for it.
    """
    if payload.numel() != layout.num_bytes:
        raise PayloadError(
            f"the payload has {payload.numel()} bytes, the layout says {layout.num_bytes}"
        )
    made_for = layout.fingerprint ^ tag
    found = payload[: HEADER.size] if header is None else header
    return read_header(found, MAGIC, FORMAT_CODES[layout.value_format], made_for, layout.capacity)


def unpack_values(
    layout: PayloadLayout,
    payload: Tensor,
    counts: Sequence[int],
    out: Tensor | None = None,
    kernel: str = "auto",
) -> Tensor:
    """The entries of a payload, ``counts`` of each tensor, in ``out`` if it is given: shape
    ``[sum(counts)]``, fp32.
    """
    data = payload[layout.edges[3] : layout.edges[4]]
    scales = read_scales(layout, payload)
    return decode_values(data, counts, scales, layout.value_format, out, kernel)


def read_scales(layout: PayloadLayout, payload: Tensor) -> Tensor:
    """The scales in a payload: shape ``[layout.num_scales]``, fp32."""
    # Memory of their own, because a view as another dtype has to be aligned.
    return payload[HEADER.size : layout.edges[2]].clone().view(torch.float32)


def read_dense(layout: PayloadLayout, payload: Tensor) -> Tensor:
    """The bytes of the tensors sent dense: uint8."""
    return payload[layout.edges[4] :][: layout.dense_bytes]


def tag_of(*shared: object) -> int:
    """A tag of what ranks must have in common: 15 bits, not all zero."""
    return 1 + zlib.crc32(repr(shared).encode()) % 0x7FFF


def write_header(magic: int, format_code: int, count: int, fingerprint: int) -> bytes:
    """The header of a payload with ``count`` entries: 12 bytes."""
    return HEADER.pack(magic, VERSION, format_code, 0, count, fingerprint)


def read_header(
    data: Tensor | bytes, magic: int, format_code: int, fingerprint: int, capacity: int
) -> int:
    """Check the header of a payload, and return its number of entries.

    Raises:
        PayloadError: The payload is corrupt, or was made for another layout.
    """
    if isinstance(data, Tensor):
        data = data.numpy().tobytes() if data.is_cpu else bytes(data.tolist())
    found, version, code, reserved, count, made_for = HEADER.unpack(data)
    if found != magic:
        raise PayloadError(f"the payload begins with {found:#x} where {magic:#x} was expected")
    if version != VERSION:
        raise PayloadError(
            f"the payload has layout version {version}, this rank reads {VERSION}: install the same"
            " lightning_dct on every host"
        )
    if code != format_code:
        raise PayloadError(
            f"the payload's value format has code {code}, this rank's `value_format` has code"
            f" {format_code}: use the same settings on every rank"
        )
    if made_for != fingerprint:
        raise PayloadError(
            "the payload was made for other tensor sizes or densities, or in another step:"
            f" {BE_ALIKE}"
        )
    if count > capacity:
        raise PayloadError(
            f"the payload claims {count} entries, its layout holds at most {capacity}"
        )
    if reserved:
        raise PayloadError(f"the payload's fourth byte is {reserved:#x}, this version writes zero")
    return int(count)
