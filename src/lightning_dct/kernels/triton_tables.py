"""The two tables that describe a plan to the kernels in Triton: its compressed tensors, and its
payloads.

The host writes rows (:class:`TensorRow`, :class:`PartRow`), int64, and after them one with the
ends. Kernels read a column by its name here. Offsets in payloads are in words of 32 bits.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class TensorRow(NamedTuple):
    """What kernels need of a compressed tensor."""

    entries: int
    first_block: int
    first_word: int  # of its flags in the scratch
    part: int  # the number of the payload that holds it
    scale: int  # where that payload has its scale
    target: int  # entries that an exchange sends of it


class PartRow(NamedTuple):
    """What kernels need of a payload, one part of a plan."""

    header: int  # where the payload has its header
    positions: int
    values: int
    first_block: int  # of its tensors, and so on
    first_word: int
    first_tensor: int
    low_bits: int  # of its Elias-Fano code; -1 for a bitmap
    code_flags: int  # flags of that code
    capacity: int  # the most entries that it holds
    fingerprint: int
    first_code_block: int  # the first block of the code's flags


def _column(row: type[TensorRow] | type[PartRow], name: str) -> tl.constexpr:
    return tl.constexpr(row._fields.index(name))


TENSOR_COLUMNS = tl.constexpr(len(TensorRow._fields))
TENSOR_ENTRIES = _column(TensorRow, "entries")
TENSOR_FIRST_BLOCK = _column(TensorRow, "first_block")
TENSOR_FIRST_WORD = _column(TensorRow, "first_word")
TENSOR_PART = _column(TensorRow, "part")
TENSOR_SCALE = _column(TensorRow, "scale")
TENSOR_TARGET = _column(TensorRow, "target")

PART_COLUMNS = tl.constexpr(len(PartRow._fields))
PART_HEADER = _column(PartRow, "header")
PART_POSITIONS = _column(PartRow, "positions")
PART_VALUES = _column(PartRow, "values")
PART_FIRST_BLOCK = _column(PartRow, "first_block")
PART_FIRST_WORD = _column(PartRow, "first_word")
PART_FIRST_TENSOR = _column(PartRow, "first_tensor")
PART_LOW_BITS = _column(PartRow, "low_bits")
PART_CODE_FLAGS = _column(PartRow, "code_flags")
PART_CAPACITY = _column(PartRow, "capacity")
PART_FINGERPRINT = _column(PartRow, "fingerprint")
PART_FIRST_CODE_BLOCK = _column(PartRow, "first_code_block")


@triton.jit
def of_tensor(tensors, t, COLUMN: tl.constexpr):
    """One column of a tensor's row."""
    return tl.load(tensors + t * TENSOR_COLUMNS + COLUMN)


@triton.jit
def row_of_part(parts, p):
    """Where the row of a payload begins."""
    return parts + p * PART_COLUMNS


@triton.jit
def of_next_part(part, COLUMN: tl.constexpr):
    """One column of the row after that of a payload, where what it has of a kind ends."""
    return tl.load(part + PART_COLUMNS + COLUMN)
