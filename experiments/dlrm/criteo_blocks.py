"""Many lines of Criteo's Kaggle file at once, as fast as numpy goes over memory.

Eight characters of a field are decoded at a time with arithmetic on 64-bit words. Whatever does not look like a row as
Criteo writes it is left to ``criteo_lines.parse_line``, so that both ways agree on every byte.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from dlrm.criteo_lines import (
    LAST_INTEGER,
    MAX_HEX_DIGITS,
    MAX_LINE_BYTES,
    NUM_CATEGORIES,
    NUM_FIELDS,
    NUM_INTEGERS,
    STRIPPED_FIELDS,
    LineProblem,
    parse_line,
)

_TAB, _NEWLINE, _MINUS = b"\t\n-"
_WORD = 8


@dataclass(frozen=True)
class BadLine:
    """A line that is no row: its number (from 1), what is wrong with it, and its bytes without the newline."""

    number: int
    problem: str
    text: bytes


@dataclass(frozen=True)
class Rows:
    """The rows of some lines.

    Attributes:
        label: uint8 ``[n]``, 0 or 1.
        integers: int64 ``[n, 13]``, missing ones 0.
        values: uint32 ``[n, 26]``, missing ones 0.
        missing: uint32 ``[n]``; bit ``c`` says that category ``c`` is missing (0 is a value like any other).
        lines: How many lines were read, bad ones included.
        stripped: How many rows came from lines without their empty last fields.
        bad: The lines that gave no row.
    """

    label: npt.NDArray[np.uint8]
    integers: npt.NDArray[np.int64]
    values: npt.NDArray[np.uint32]
    missing: npt.NDArray[np.uint32]
    lines: int
    stripped: int = 0
    bad: list[BadLine] = field(default_factory=list)


def _word(byte: int) -> np.uint64:
    """Eight times the same byte."""
    return np.uint64(byte * 0x0101_0101_0101_0101)


_ZERO, _HIGH_HALF, _LOW_HALF, _ONE = _word(ord("0")), _word(0xF0), _word(0x0F), _word(1)
_LAST_BYTES = np.array([0] + [(2**64 - 1) ^ (2 ** (8 * (8 - size)) - 1) for size in range(1, 9)], dtype=np.uint64)
"""Masks that keep the last ``size`` characters of a word: the high bytes, as words are little-endian."""


def _decode_digits(
    words: npt.NDArray[np.uint64], sizes: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Read the last ``sizes`` (0 to 8) characters of each word as decimal digits; also say which are none."""
    digits = (words ^ _ZERO) & _LAST_BYTES[sizes]
    # A byte that is no digit is 16 or more, or 10 to 15 and then 16 or more once 6 is added.
    wrong = ((digits | (digits + _word(6))) & _HIGH_HALF) != 0
    # Neighbours are added up in pairs: 1 digit a byte, then 2 in 16 bits, 4 in 32, and 8.
    digits = (digits * np.uint64(10 * 2**8 + 1)) >> np.uint64(8) & np.uint64(0x00FF_00FF_00FF_00FF)
    digits = (digits * np.uint64(100 * 2**16 + 1)) >> np.uint64(16) & np.uint64(0x0000_FFFF_0000_FFFF)
    digits = (digits * np.uint64(10_000 * 2**32 + 1)) >> np.uint64(32)
    return digits.astype(np.int64), wrong


def _decode_hex(words: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
    """Read words of 8 characters as hexadecimal numbers in lower case; also say which are none."""
    nibbles = (words & _LOW_HALF) + np.uint64(9) * (words >> np.uint64(6) & _ONE)
    # Right only where writing the number again gives the same characters: 'a' lies 39 after the character behind '9'.
    is_letter = nibbles + _word(6) >> np.uint64(4) & _ONE
    wrong = (nibbles + _ZERO + np.uint64(39) * is_letter != words) | (nibbles & _HIGH_HALF != 0)
    nibbles = nibbles.byteswap()
    nibbles = (nibbles | nibbles >> np.uint64(4)) & np.uint64(0x00FF_00FF_00FF_00FF)
    nibbles = (nibbles | nibbles >> np.uint64(8)) & np.uint64(0x0000_FFFF_0000_FFFF)
    return (nibbles | nibbles >> np.uint64(16)).astype(np.uint32), wrong


def _parse_regular(
    padded: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """Decode lines of 40 fields.

    Args:
        padded: uint8, the block with 8 bytes more on either side.
        ends: int64 ``[n, 40]``, where each field ends in ``padded``.
        sizes: int64 ``[n, 40]``, characters of each field.

    Returns:
        The rows ``[n]``, and bool ``[n]``: those that the fast way cannot vouch for.
    """
    # Every 8 bytes in a row as a word, wherever they begin.
    words = np.ndarray((len(padded) - _WORD + 1,), dtype="<u8", buffer=padded, strides=(1,))

    labels = padded[ends[:, 0] - 1] ^ np.uint8(ord("0"))
    odd = (sizes[:, 0] != 1) | (labels > 1)

    ends_of_integers, sizes_of_integers = ends[:, 1 : 1 + NUM_INTEGERS], sizes[:, 1 : 1 + NUM_INTEGERS]
    tails = words[ends_of_integers - _WORD]
    short = np.minimum(sizes_of_integers, _WORD)
    integers, wrong = _decode_digits(tails, short)
    wrong |= sizes_of_integers > _WORD
    # Few enough are negative to look at again: the same without the sign.
    row, column = np.nonzero(wrong)
    size = short[row, column]
    signed = (padded[ends_of_integers[row, column] - size] == _MINUS) & (size > 1)
    row, column, size = row[signed], column[signed], size[signed]
    magnitudes, still_wrong = _decode_digits(tails[row, column], size - 1)
    integers[row, column] = -magnitudes
    wrong[row, column] = still_wrong | (sizes_of_integers[row, column] > _WORD)
    odd |= wrong.any(axis=1)

    sizes_of_categories = sizes[:, 1 + NUM_INTEGERS :]
    values, wrong = _decode_hex(words[ends[:, 1 + NUM_INTEGERS :] - _WORD])
    empty = sizes_of_categories == 0
    odd |= (~empty & (wrong | (sizes_of_categories != MAX_HEX_DIGITS))).any(axis=1)
    values[empty] = 0
    missing = (empty.astype(np.uint32) << np.arange(NUM_CATEGORIES, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)
    return Rows(labels, integers, values, missing, len(labels)), odd


def parse_block(block: bytes, first_line: int = 1) -> Rows:
    """Read whole lines.

    Args:
        block: Lines with their newlines; the last one may lack it.
        first_line: Number of the first line in its file, from 1.

    Returns:
        The rows in their order, and the bad lines.
    """
    if not block.endswith(b"\n"):
        block += b"\n" if block else b""
    padded = np.zeros(len(block) + 2 * _WORD, dtype=np.uint8)
    padded[_WORD:-_WORD] = np.frombuffer(block, dtype=np.uint8)

    ends = np.flatnonzero((padded == _TAB) | (padded == _NEWLINE))
    sizes = np.diff(ends, prepend=_WORD - 1) - 1
    last = np.flatnonzero(padded[ends] == _NEWLINE)
    fields = np.diff(last, prepend=-1)
    stops = ends[last]
    starts = np.concatenate([[_WORD], stops + 1])[: len(stops)]
    stripped = np.isin(fields, STRIPPED_FIELDS) & (sizes[last] > 0)
    regular = ((fields == NUM_FIELDS) | stripped) & (stops - starts <= MAX_LINE_BYTES)
    if len(ends) == NUM_FIELDS * len(stops) and regular.all() and not stripped.any():
        ends, sizes = ends.reshape(-1, NUM_FIELDS), sizes.reshape(-1, NUM_FIELDS)
    else:
        # What a stripped line lacks is empty and ends where the line does.
        lacking = np.arange(NUM_FIELDS) - (fields[regular] - 1)[:, None]
        places = last[regular, None] + np.minimum(lacking, 0)
        ends, sizes = ends[places], np.where(lacking > 0, 0, sizes[places])
    rows, doubtful = _parse_regular(padded, ends, sizes)
    doubtful |= stripped[regular] & (sizes[:, LAST_INTEGER] >= MAX_HEX_DIGITS)
    if regular.all() and not doubtful.any():
        return replace(rows, stripped=int(stripped.sum()))

    # The other lines one by one, into the places between.
    quick = np.flatnonzero(regular)
    label, integers, values, missing = (
        _spread(part, quick, len(stops)) for part in (rows.label, rows.integers, rows.values, rows.missing)
    )
    is_row = np.ones(len(stops), dtype=bool)
    bad = []
    for line in np.union1d(np.flatnonzero(~regular), quick[doubtful]).tolist():
        text = padded[starts[line] : stops[line]].tobytes()
        try:
            label[line], integers[line], values[line], missing[line] = parse_line(text, first_line + line)
        except LineProblem as problem:
            bad.append(BadLine(first_line + line, str(problem), text))
            is_row[line] = False
    return Rows(
        label[is_row],
        integers[is_row],
        values[is_row],
        missing[is_row],
        lines=len(stops),
        stripped=int((stripped & is_row).sum()),
        bad=bad,
    )


def _spread(values: npt.NDArray, places: npt.NDArray[np.int64], size: int) -> npt.NDArray:
    """Put values at their places among ``size``, zeros elsewhere."""
    spread = np.zeros((size, *values.shape[1:]), dtype=values.dtype)
    spread[places] = values
    return spread
