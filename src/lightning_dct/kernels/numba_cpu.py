"""The loops of :mod:`lightning_dct.kernels.plain`, compiled for this CPU by numba (extra ``fast``).

Selecting reads the weights once, and adding the mean reads and writes them once. All else works on
the sent entries: flags, 64 to a word, and values. A loop over the set flags of a word costs little
if the flags are few, and needs no temporary tensor.

All of it is in one file, because numba keeps what it has compiled of a function until that
function's own file changes.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.cpython.unsafe import numbers
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from numpy.typing import NDArray
from torch import Tensor

from lightning_dct.kernels.bits import num_bytes
from lightning_dct.kernels.plain import (
    LARGEST_HALF,
    LIMIT_SAMPLE,
    SMALLEST_THRESHOLD,
    Gains,
    Numbers,
    Sent,
    Tensors,
)

# Entries that fit the first-level cache.
BLOCK = 1024
# Bytes that the memory delivers at once.
LINE = 64
# Rows that are fetched before they are needed.
ROWS_AHEAD = 8
# With fewer entries a second thread costs more than it saves.
ENTRIES_PER_THREAD = 1 << 18
# Multiplied with eight bytes of 0 or 1, this collects them in the highest byte.
GATHER = np.uint64(0x0102040810204080)
trailing_zeros: Any = numbers.trailing_zeros
ONE = np.uint64(1)
WORD = np.uint64(63)
# Rows of a `_table`.
SIZE = 0
FIRST = 1
# Numbers of a payload's layout: where its parts begin, bytes of its positions, how these are coded,
# and bits of a value.
SCALES = 0
POSITIONS = 1
VALUES = 2
DENSE = 3
POSITION_BYTES = 4
NUM_FLAGS = 5
LOW_BITS = 6
CAPACITY = 7
UNIVERSE = 8
VALUE_BITS = 9


def select(
    inputs: Tensors,
    references: Tensors,
    first: Numbers,
    thresholds: Sequence[float],
    scale: float | None,
    flags: Tensor,
) -> tuple[Tensor, list[int]]:
    """See :func:`lightning_dct.kernels.plain.select`."""
    if not references:
        return torch.empty(0), []
    # numba does not support bfloat16.
    inputs = [new.to(base.dtype).contiguous() for new, base in zip(inputs, references, strict=True)]
    found = _scratch(8 * flags.numel(), references[0].dtype)
    dtype = references[0].numpy().dtype
    given = (
        np.array(thresholds, dtype),
        scale if scale is None else dtype.type(scale),
        _words(flags),
        found.numpy(),
    )
    shares = _in_threads(_select, _table(first, inputs, references), *given)
    values = [found[begin : begin + int(counts.sum())] for begin, counts in shares]
    return torch.cat(values) if len(values) > 1 else values[0], np.sum(
        [n for _, n in shares], axis=0
    ).tolist()


def fit(
    flags: Tensor, first: Numbers, sizes: Numbers, values: Tensor, counts: Numbers, targets: Numbers
) -> tuple[Tensor, list[int], list[float]]:
    """See :func:`lightning_dct.kernels.plain.fit`."""
    table = np.array([sizes, first, targets, counts], np.int64)
    limits = np.zeros(len(counts))
    sample = np.empty(LIMIT_SAMPLE, values.numpy().dtype)
    count = _fit(
        _words(flags), table, values.numpy(), limits, sample, sample.view(f"i{sample.itemsize}")
    )
    return values[:count], table[3].tolist(), limits.tolist()


def subtract(tensors: Tensors, first: Numbers, sent: Sent) -> None:
    """See :func:`lightning_dct.kernels.plain.subtract`."""
    values = sent.values.to(tensors[0].dtype) if tensors else sent.values
    _in_threads(_subtract, _table(first, tensors), _words(sent.flags)[0], values.numpy())


def decay(inputs: Tensors, references: Tensors, first: Numbers, sent: Sent, dropped: float) -> None:
    """See :func:`lightning_dct.kernels.plain.decay`."""
    values = (sent.values.to(inputs[0].dtype) if inputs else sent.values).numpy()
    _in_threads(
        _decay,
        _table(first, inputs, references),
        values.dtype.type(dropped),
        _words(sent.flags)[0],
        values,
    )


def add_sums(
    totals: Tensors,
    owns: Tensors | None,
    first: Numbers,
    sent: Sent,
    weights: Tensor,
    mine: int = -1,
    gains: Gains | None = None,
) -> None:
    """See :func:`lightning_dct.kernels.plain.add_sums`."""
    table = _table(first, totals) if owns is None else _table(first, totals, owns)
    starts = np.array([*accumulate(sent.counts, initial=0)][:-1], np.int64)
    factors = weights[:0] if gains is None else gains.factors
    places = np.zeros((4, 0), np.int64) if gains is None else gains.places.numpy()
    values = sent.values.numpy()
    words = _words(sent.flags)
    _in_threads(
        _add_sums, table, words, values, starts, mine, weights.numpy(), factors.numpy(), places
    )


def select_rows(
    rows: Tensor,
    at: Tensor,
    new: Tensor,
    new_at: Tensor,
    lengths: Numbers,
    thresholds: Sequence[float],
    scale: float,
    is_kept: bool,
    flags: Tensor,
) -> tuple[Tensor, list[int]]:
    """See :func:`lightning_dct.kernels.plain.select_rows`."""
    found = _scratch(at.numel() * rows.shape[1], rows.dtype)
    array = rows.numpy()
    counts = _select_rows(
        array,
        at.numpy(),
        new.numpy(),
        new_at.numpy(),
        np.array(lengths, np.int64),
        np.array(thresholds, array.dtype),
        array.dtype.type(scale),
        is_kept,
        _words(flags),
        found.numpy(),
    )
    return found[: int(counts.sum())], counts.tolist()


def add_flagged(rows: Tensor, at: Tensor, flags: Tensor, values: Tensor) -> None:
    """See :func:`lightning_dct.kernels.plain.add_flagged`."""
    added = values.to(rows.dtype)
    _change_flagged(rows.numpy(), at.numpy(), _words(flags), added.numpy(), True)


def keep_rest(rows: Tensor, at: Tensor, flags: Tensor, values: Tensor, sent: Tensor) -> None:
    """See :func:`lightning_dct.kernels.plain.keep_rest`."""
    left = values - sent.to(values.dtype)
    _change_flagged(rows.numpy(), at.numpy(), _words(flags), left.numpy(), False)


def unflag(flags: Tensor, keep: Tensor) -> None:
    """See :func:`lightning_dct.kernels.plain.unflag`."""
    _unflag(_words(flags), keep.numpy())


def rows_of_flags(flags: Tensor, values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """See :func:`lightning_dct.kernels.plain.rows_of_flags`."""
    touched, rows = _rows_of_flags(_words(flags), values.numpy(), dim)
    return torch.from_numpy(touched), torch.from_numpy(rows)


def encode_scaled(values: Tensor, counts: Numbers, bits: int) -> tuple[Tensor, Tensor]:
    """The bytes and scales of ``1bit`` or ``2bit``, as in
    :func:`lightning_dct.wire.values.encode_values`.
    """
    words = np.zeros(bits * values.numel() // 64 + 1, np.uint64)
    scales = torch.empty(len(counts), dtype=torch.float32)
    codes = words.view(np.uint8)
    given = (values.numpy(), np.array(counts, np.int64))
    if bits == 1:
        _encode_signs(*given, words, scales.numpy())
    else:
        _encode_levels(*given, codes, scales.numpy())
    return torch.from_numpy(codes[: num_bytes(bits * values.numel())]), scales


def decode_scaled(
    codes: Tensor, counts: Numbers, scales: Tensor, values: Tensor, bits: int
) -> None:
    """Undo :func:`encode_scaled`, into ``values``: shape ``[sum(counts)]``, fp32."""
    words = np.zeros(bits * values.numel() // 64 + 1, np.uint64)
    size = num_bytes(bits * values.numel())
    words.view(np.uint8)[:size] = codes.numpy()[:size]
    _decode_scaled(words, bits, np.array(counts, np.int64), scales.numpy(), values.numpy())


def write_payload(
    layout: NDArray[np.int64],
    header: bytes,
    flags: Tensor,
    values: Tensor,
    counts: Numbers,
    dense: Tensor,
    num_bytes: int,
) -> Tensor | None:
    """See :func:`lightning_dct.wire.payload.pack_payload`; None if the positions do not fit.

    ``layout`` are the numbers of :attr:`lightning_dct.wire.payload.PayloadLayout.numbers`.
    """
    payload = np.zeros(num_bytes, np.uint8)
    payload[: len(header)] = np.frombuffer(header, np.uint8)
    if dense.numel():
        start = layout[DENSE]
        payload[start : start + dense.numel()] = dense.numpy()
    number_of = np.array(counts, np.int64)
    if not _write_payload(layout, _words(flags), values.numpy(), number_of, payload):
        return None
    return torch.from_numpy(payload)


def read_payload(
    layout: NDArray[np.int64],
    spans: NDArray[np.int64],
    payload: Tensor,
    count: int,
    flags: Tensor,
    values: Tensor,
) -> bool | None:
    """See :func:`lightning_dct.wire.payload.read_payload`; None if the positions are corrupt."""
    found = _read_payload(layout, spans, payload.numpy(), count, _words(flags), values.numpy())
    return None if found < 0 else bool(found)


def count_flags(flags: Tensor, sizes: Numbers) -> list[int]:
    """See :func:`lightning_dct.wire.positions.count_flags`."""
    return _count_flags(_words(flags), np.array(sizes, np.int64)).tolist()


def positions_of(flags: Tensor, count: int) -> Tensor:
    """See :func:`lightning_dct.kernels.positions_of`."""
    positions = torch.empty(count, dtype=torch.int64)
    _write_positions(_words(flags), positions.numpy())
    return positions


def encode_elias_fano(
    flags: Tensor, num_bits: int, num_flags: int, low_bits: int, capacity: int
) -> Tensor:
    """The positions of set flags in the code of :mod:`lightning_dct.wire.positions`: uint8,
    ``num_bits`` bits.
    """
    message = np.zeros(num_bits // 64 + 2, np.uint64)
    if not _encode_elias_fano(_words(flags), message, num_flags, low_bits, capacity):
        raise ValueError(f"More than {capacity} positions do not fit.")
    return torch.from_numpy(message.view(np.uint8)[: num_bytes(num_bits)])


def decode_elias_fano(
    message: Tensor, universe: int, num_flags: int, low_bits: int, capacity: int, flags: Tensor
) -> int:
    """Undo :func:`encode_elias_fano`, into ``flags``, which are zero before.

    Returns:
        The number of positions, or -1 if they are not ascending, not below ``universe``, or more
        than ``capacity``.
    """
    words = np.zeros(message.numel() // 8 + 3, np.uint64)
    words.view(np.uint8)[: message.numel()] = message.numpy()
    return int(_decode_elias_fano(words, universe, num_flags, low_bits, capacity, _words(flags)))


def add_rows(total: Tensor, indices: Tensor, rows: Tensor) -> None:
    """See :func:`lightning_dct.kernels.add_rows`."""
    # Read where they lie: the gradient of a part of a concatenation is no contiguous tensor.
    groups = rows if rows.ndim == 3 else rows.unsqueeze(0)
    groups = groups if groups.stride(2) == 1 else groups.contiguous()
    entries = groups.untyped_storage().nbytes() // groups.itemsize - groups.storage_offset()
    memory = groups.as_strided((max(entries, 0),), (1,))
    _add_rows(
        total.numpy(), indices.numpy(), memory.numpy(), *groups.shape[:2], *groups.stride()[:2]
    )


def _words(flags: Tensor) -> NDArray[np.uint64]:
    return flags.numpy().view(np.uint64)


_scratch_tensors = threading.local()


def _scratch(count: int, dtype: torch.dtype) -> Tensor:
    """A tensor that a thread reuses, of ``count`` entries or more."""
    # The system maps pages only when they are written, and few are. A new tensor would have it
    # clear them in each call.
    tensor = vars(_scratch_tensors).get(str(dtype))
    if tensor is None or tensor.numel() < count:
        tensor = vars(_scratch_tensors)[str(dtype)] = torch.empty(count, dtype=dtype)
    return tensor


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def window(words: Any, bit: Any, length: Any) -> Any:
    """Up to 64 flags from a bit on, the first in the lowest bit; those beyond ``length`` are
    zero.
    """
    word = bit >> 6
    shift = np.uint64(bit) & WORD
    flags = words[word] >> shift
    if shift:
        flags |= words[word + 1] << (np.uint64(64) - shift)
    if length < 64:
        flags &= (ONE << np.uint64(length)) - ONE
    return flags


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _set_window(words: Any, bit: Any, flags: Any) -> None:
    word = bit >> 6
    shift = np.uint64(bit) & WORD
    words[word] |= flags << shift
    # Only if it changes: the next word may be another thread's.
    if shift and flags >> (np.uint64(64) - shift):
        words[word + 1] |= flags >> (np.uint64(64) - shift)


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def ones(word: Any) -> Any:
    """The number of set flags. Compilers know this formula, and use the processor's instruction."""
    word = word - ((word >> ONE) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + (
        (word >> np.uint64(2)) & np.uint64(0x3333333333333333)
    )
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@njit(nogil=True, cache=True, error_model="numpy")
def _flags_before(words: Any, bit: int, start: int = 0) -> int:
    """The number of set flags from number ``start`` on, before number ``bit``."""
    first = min(bit, start + (-start & 63))
    count = ones(window(words, start, first - start)) if start < first else 0
    for word in range(first >> 6, bit >> 6):
        count += ones(words[word])
    first = max(first, bit & ~63)
    return count + (ones(window(words, first, bit - first)) if first < bit else 0)


@njit(nogil=True, cache=True, error_model="numpy")
def _count_flags(words: Any, sizes: Any) -> Any:
    counts = np.zeros(sizes.size, np.int64)
    start = 0
    for number in range(sizes.size):
        counts[number] = _flags_before(words, start + sizes[number], start)
        start += sizes[number]
    return counts


@njit(nogil=True, cache=True, error_model="numpy")
def _write_positions(words: Any, positions: Any) -> None:
    count = 0
    for word in range(words.size):
        flags = words[word]
        while flags and count < positions.size:
            positions[count] = 64 * word + np.int64(trailing_zeros(flags))
            flags &= flags - ONE
            count += 1


@intrinsic
def _prefetch_entry(context: Any, array: Any, index: Any) -> Any:
    """Have the processor fetch the cache line of an array's entry, which may lie beyond its end."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte, number, number, number]),
            "llvm.prefetch.p0i8",
        )
        # To be written, into the first-level cache, as data.
        kind = [ir.Constant(number, value) for value in (1, 3, 1)]
        builder.call(function, [builder.bitcast(builder.gep(data, [arguments[1]]), byte), *kind])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def _pointer_to(context: Any, address: Any) -> Any:
    return types.voidptr(types.int64), lambda _, builder, __, given: builder.inttoptr(
        given[0], cgutils.voidptr_t
    )


_prefetch: Any = _prefetch_entry
_pointer: Any = _pointer_to


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _part(table: Any, row: int, tensor: int, begin: int, end: int, like: Any) -> Any:
    """The entries of a tensor, whose address is in a row of the table, with the flags ``begin`` to
    ``end``.
    """
    size = table[SIZE, tensor]
    first = table[FIRST, tensor]
    start = max(begin - first, 0)
    stop = min(end - first, size)
    return carray(_pointer(table[row, tensor]), size, like.dtype)[start : max(start, stop)]


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _collect(
    reached: Any, block: Any, length: int, words: Any, bit: int, values: Any, count: int
) -> int:
    """Set the flags of a block, given as bytes of 0 or 1, and append its flagged entries to the
    values.
    """
    eights = reached.view(np.uint64)
    reached[length:] = 0
    for start in range(0, length, 64):
        flags = np.uint64(0)
        for byte in range(8):
            flags |= ((eights[start // 8 + byte] * GATHER) >> np.uint64(56)) << np.uint64(8 * byte)
        if flags:
            _set_window(words, bit + start, flags)
        while flags:
            values[count] = block[start + trailing_zeros(flags)]
            flags &= flags - ONE
            count += 1
    return count


@njit(nogil=True, cache=True, error_model="numpy")
def _select(
    table: Any, begin: int, end: int, limits: Any, scale: Any, words: Any, found: Any
) -> tuple[int, Any]:
    old = np.empty(BLOCK, found.dtype)
    block = np.empty(BLOCK, found.dtype)
    reached = np.empty(BLOCK, np.uint8)
    # A share has no more entries than flags.
    values = found[begin:end]
    count = 0
    counts = np.zeros(limits.size, np.int64)
    for tensor in range(limits.size):
        before = count
        bit = max(begin, table[FIRST, tensor])
        limit = limits[tensor]
        new = _part(table, 2, tensor, begin, end, values)
        base = _part(table, 3, tensor, begin, end, values)
        for start in range(0, new.size, BLOCK):
            # Indices into slices start at zero, so the compiler knows that none is negative.
            ours = new[start : start + BLOCK]
            theirs = base[start : start + BLOCK]
            first = count
            # "Not below" instead of "at or above", because it is true for NaN.
            if scale is None:
                for i in range(ours.size):
                    block[i] = ours[i] - theirs[i]
                    reached[i] = not (abs(block[i]) < limit)
            else:
                for i in range(ours.size):
                    old[i] = theirs[i]
                    block[i] = old[i] + scale * ours[i]
                    theirs[i] = block[i]
                    reached[i] = not (abs(block[i]) < limit)
            count = _collect(reached, block, ours.size, words, bit + start, values, count)
            if scale is not None and not np.isfinite(values[first:count]).all():
                for i in range(ours.size):
                    if not np.isfinite(block[i]):
                        theirs[i] = old[i]
        counts[tensor] = count - before
    return begin, counts


@njit(nogil=True, cache=True, error_model="numpy")
def _fit(words: Any, table: Any, values: Any, limits: Any, sample: Any, bits: Any) -> int:
    start = 0
    kept = 0
    for tensor in range(limits.size):
        size = table[SIZE, tensor]
        target = table[2, tensor]
        count = table[3, tensor]
        broken = 0
        reached = values[start : start + count]
        for number in range(count):
            broken += not np.isfinite(reached[number])
        if broken or count > target:
            limits[tensor] = (
                np.inf
                if broken
                else max(_limit(reached, target, sample[:size], bits), SMALLEST_THRESHOLD)
            )
            table[3, tensor] = _thin(
                words, table[FIRST, tensor], size, reached, target, limits[tensor]
            )
        if kept < start:
            for number in range(table[3, tensor]):
                values[kept + number] = reached[number]
        start = start + count
        kept = kept + table[3, tensor]
    return kept


@njit(nogil=True, cache=True, error_model="numpy")
def _limit(reached: Any, target: int, sample: Any, bits: Any) -> float:
    # Number n of the sample is entry n * size // wanted.
    entry = 0
    remainder = 0
    wanted = sample.size
    for number in range(wanted):
        sample[number] = abs(reached[entry])
        entry = entry + reached.size // wanted
        remainder = remainder + reached.size % wanted
        if remainder >= wanted:
            entry = entry + 1
            remainder = remainder - wanted
    # Magnitudes have the order of their bits: this is the largest number with at most `index` of
    # the sample below it. numpy's own search would take numba seconds to compile.
    index = wanted - -(-wanted * target // reached.size)
    found = 0
    for shift in range(8 * bits.itemsize - 2, -1, -1):
        below = 0
        for number in range(wanted):
            below += bits[number] < found + (1 << shift)
        found += (1 << shift) * (below <= index)
    bits[0] = found
    return sample[0]


@njit(nogil=True, cache=True, error_model="numpy")
def _thin(words: Any, begin: int, size: int, values: Any, target: int, limit: float) -> int:
    large = 0
    for number in range(values.size):
        large += not abs(values[number]) < limit
    # Of `large` entries number n is left if n * wanted // large is another number than for the one
    # before it.
    cursor = 0
    count = 0
    remainder = 0
    wanted = min(target, large)
    for bit in range(begin, begin + size, 64):
        flags = window(words, bit, begin + size - bit)
        while flags:
            lowest = flags & (~flags + ONE)
            flags ^= lowest
            is_large = not abs(values[cursor]) < limit
            remainder += wanted * is_large
            if is_large and remainder >= large:
                remainder -= large
                values[count] = values[cursor]
                count += 1
            else:
                place = bit + np.int64(trailing_zeros(lowest))
                words[place >> 6] ^= ONE << (np.uint64(place) & WORD)
            cursor += 1
    return count


@njit(nogil=True, cache=True, error_model="numpy")
def _subtract(table: Any, begin: int, end: int, words: Any, values: Any) -> None:
    cursor = _flags_before(words, begin)
    for tensor in range(table.shape[1]):
        whole = _part(table, 2, tensor, begin, end, values)
        bit = max(begin, table[FIRST, tensor])
        for start in range(0, whole.size, 64):
            part = whole[start : start + 64]
            flags = window(words, bit + start, part.size)
            while flags:
                i = trailing_zeros(flags)
                flags &= flags - ONE
                left = part[i] - values[cursor]
                if np.isfinite(left):
                    part[i] = left
                cursor += 1


@njit(nogil=True, cache=True, error_model="numpy")
def _decay(table: Any, begin: int, end: int, dropped: Any, words: Any, values: Any) -> None:
    left = np.empty(64, values.dtype)
    cursor = _flags_before(words, begin)
    for tensor in range(table.shape[1]):
        bit = max(begin, table[FIRST, tensor])
        new = _part(table, 2, tensor, begin, end, values)
        base = _part(table, 3, tensor, begin, end, values)
        for start in range(0, new.size, 64):
            ours = new[start : start + 64]
            theirs = base[start : start + 64]
            flags = window(words, bit + start, ours.size)
            for i in range(ours.size):
                left[i] = ours[i] - theirs[i]
            while flags:
                left[trailing_zeros(flags)] -= values[cursor]
                flags &= flags - ONE
                cursor += 1
            for i in range(ours.size):
                ours[i] -= dropped * left[i]


@njit(nogil=True, cache=True, error_model="numpy")
def _add_sums(
    table: Any,
    begin: int,
    end: int,
    words: Any,
    values: Any,
    starts: Any,
    mine: int,
    weights: Any,
    factors: Any,
    places: Any,
) -> None:
    cursors = np.empty_like(starts)
    for sender in range(starts.size):
        cursors[sender] = starts[sender] + _flags_before(words[sender], begin)
    nowhere = np.zeros(4, np.int64)
    for tensor in range(table.shape[1]):
        total = _part(table, 2, tensor, begin, end, weights)
        bit = max(begin, table[FIRST, tensor])
        own = _part(table, 3, tensor, begin, end, weights) if table.shape[0] > 3 else weights[:0]
        place = nowhere
        if factors.size:
            place = places[:, tensor].copy()
            place[3] += bit - table[FIRST, tensor]
        _add_part(total, own, words, bit, values, cursors, mine, weights, factors, place)


@njit(nogil=True, cache=True, error_model="numpy")
def _add_part(
    total: Any,
    own: Any,
    words: Any,
    bit: int,
    values: Any,
    cursors: Any,
    mine: int,
    weights: Any,
    factors: Any,
    place: Any,
) -> None:
    sums = np.zeros(64, total.dtype)
    senders = np.zeros(64, np.int64)
    summed = weights.size - 1
    rows = place[0]
    columns = place[1]
    width = place[2]
    first = place[3]
    for start in range(0, total.size, 64):
        part = total[start : start + 64]
        ours = own[start : start + 64]
        union = np.uint64(0)
        # With few flags the processor does not see that lines follow one another, and would wait
        # for each.
        for entry in range(start + BLOCK, start + BLOCK + 64, LINE // total.itemsize):
            _prefetch(total, entry)
            if own.size:
                _prefetch(own, entry)
        for sender in range(words.shape[0]):
            flags = window(words[sender], bit + start, part.size)
            cursor = cursors[sender]
            if sender < summed:
                union |= flags
            while flags:
                i = trailing_zeros(flags)
                flags &= flags - ONE
                value = values[cursor]
                cursor += 1
                if sender == mine and (sender < summed or sums[i] != 0):
                    ours[i] -= value
                if sender < summed:
                    sums[i] += value
                    senders[i] += value != 0
            cursors[sender] = cursor
        while union:
            i = trailing_zeros(union)
            union &= union - ONE
            mean = weights[senders[i]] * sums[i]
            if factors.size:
                row = (first + start + i) // width
                column = first + start + i - row * width
                mean *= factors[rows + row] * factors[columns + column]
            part[i] += mean
            if ours.size:
                ours[i] += mean
            sums[i] = 0
            senders[i] = 0


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_signs(values: Any, counts: Any, signs: Any, scales: Any) -> None:
    for start in range(0, values.size, 64):
        part = values[start : start + 64]
        flags = np.uint64(0)
        for i in range(part.size):
            flags |= np.uint64(part[i] > 0) << np.uint64(i)
        signs[start // 64] = flags
    start = 0
    for tensor in range(counts.size):
        part = values[start : start + counts[tensor]]
        start += counts[tensor]
        # Sums that do not wait for one another.
        one = 0.0
        two = 0.0
        three = 0.0
        four = 0.0
        for i in range(0, part.size - 3, 4):
            one += abs(np.float64(part[i]))
            two += abs(np.float64(part[i + 1]))
            three += abs(np.float64(part[i + 2]))
            four += abs(np.float64(part[i + 3]))
        for i in range(part.size & ~3, part.size):
            one += abs(np.float64(part[i]))
        scales[tensor] = (one + two + three + four) / max(part.size, 1)


@njit(nogil=True, cache=True, error_model="numpy")
def _decode_scaled(words: Any, bits: int, counts: Any, scales: Any, values: Any) -> None:
    one = np.float32(1)
    two = np.float32(2)
    in_word = 64 // bits
    for word in range(words.size):
        codes = words[word]
        part = values[word * in_word : (word + 1) * in_word]
        if bits == 1:
            for i in range(part.size):
                part[i] = one if (codes >> np.uint64(i)) & ONE else -one
        else:
            for i in range(part.size):
                level = two if (codes >> np.uint64(2 * i + 1)) & ONE else one
                part[i] = level if (codes >> np.uint64(2 * i)) & ONE else -level
    start = 0
    for tensor in range(counts.size):
        part = values[start : start + counts[tensor]]
        scale = scales[tensor]
        for i in range(part.size):
            part[i] *= scale
        start += part.size


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_levels(values: Any, counts: Any, codes: Any, scales: Any) -> None:
    start = 0
    for tensor in range(counts.size):
        part = values[start : start + counts[tensor]]
        count = max(counts[tensor], 1)
        # In the order of torch, because every sum is rounded.
        total = 0.0
        larger = 0.0
        number = 0
        for i in range(part.size):
            total += abs(np.float64(part[i]))
        mean = total / count
        for i in range(part.size):
            magnitude = abs(np.float64(part[i]))
            larger += magnitude if magnitude >= mean else 0.0
            number += magnitude >= mean
        product = total + larger
        square = np.float64(count + 3 * number)
        fits = product * product / square > total * mean and product / square <= LARGEST_HALF
        scales[tensor] = product / square if fits else mean
        for i in range(part.size):
            code = 2 * (fits and abs(np.float64(part[i])) >= mean) + (part[i] > 0)
            codes[(start + i) >> 2] |= code << (2 * ((start + i) & 3))
        start += part.size


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_elias_fano(
    words: Any, message: Any, num_flags: int, low_bits: int, capacity: int
) -> bool:
    count = 0
    low = np.zeros(64, np.int64)
    for word in range(words.size):
        flags = words[word]
        while flags:
            position = 64 * word + np.int64(trailing_zeros(flags))
            flags &= flags - ONE
            if count == capacity:
                return False
            place = (position >> low_bits) + count
            message[place >> 6] |= ONE << (np.uint64(place) & WORD)
            low[count & 63] = position
            count += 1
            if not count & 63:
                _set_planes(message, low, num_flags + count - 64, low_bits, capacity)
    low[count & 63 :] = 0
    _set_planes(message, low, num_flags + (count & ~63), low_bits, capacity)
    return True


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _set_planes(message: Any, low: Any, first: Any, low_bits: Any, capacity: Any) -> None:
    """Write the low bits of 64 positions, plane by plane."""
    for plane in range(low_bits):
        bits = np.uint64(0)
        for i in range(64):
            bits |= np.uint64((low[i] >> plane) & 1) << np.uint64(i)
        if bits:
            _set_window(message, first + plane * capacity, bits)


@njit(nogil=True, cache=True, error_model="numpy")
def _decode_elias_fano(
    message: Any, universe: int, num_flags: int, low_bits: int, capacity: int, words: Any
) -> int:
    count = 0
    last = np.int64(-1)
    low = np.zeros(64, np.int64)
    for start in range(0, num_flags, 64):
        flags = window(message, start, num_flags - start)
        while flags:
            place = start + np.int64(trailing_zeros(flags))
            flags &= flags - ONE
            if count == capacity:
                return -1
            if not count & 63:
                low[:] = 0
                for plane in range(low_bits):
                    bits = window(message, num_flags + plane * capacity + count, capacity - count)
                    for i in range(64):
                        low[i] |= np.int64((bits >> np.uint64(i)) & ONE) << plane
            position = (place - count) << low_bits | low[count & 63]
            if position <= last or position >= universe:
                return -1
            words[position >> 6] |= ONE << (np.uint64(position) & WORD)
            last = position
            count += 1
    return count


@njit(nogil=True, cache=True, error_model="numpy")
def _write_payload(layout: Any, words: Any, values: Any, counts: Any, payload: Any) -> bool:
    scales = np.zeros(counts.size, np.float32)
    bits = layout[VALUE_BITS]
    codes = np.zeros(bits * values.size // 64 + 1, np.uint64)
    if bits == 1:
        _encode_signs(values, counts, codes, scales)
    else:
        _encode_levels(values, counts, codes.view(np.uint8), scales)
    num_bytes = layout[POSITION_BYTES]
    message = words
    if layout[LOW_BITS]:
        message = np.zeros(num_bytes // 8 + 2, np.uint64)
        if not _encode_elias_fano(
            words, message, layout[NUM_FLAGS], layout[LOW_BITS], layout[CAPACITY]
        ):
            return False
    payload[layout[SCALES] : layout[POSITIONS]] = scales.view(np.uint8)
    payload[layout[POSITIONS] : layout[POSITIONS] + num_bytes] = message.view(np.uint8)[:num_bytes]
    num_bytes = (bits * values.size + 7) // 8
    payload[layout[VALUES] : layout[VALUES] + num_bytes] = codes.view(np.uint8)[:num_bytes]
    return True


@njit(nogil=True, cache=True, error_model="numpy")
def _read_payload(
    layout: Any, spans: Any, payload: Any, count: int, words: Any, values: Any
) -> int:
    """Whether all scales are finite, 0 or 1; -1 if the positions are corrupt."""
    num_bytes = layout[POSITION_BYTES]
    universe = layout[UNIVERSE]
    part = payload[layout[POSITIONS] : layout[POSITIONS] + num_bytes]
    if layout[LOW_BITS]:
        message = np.zeros(num_bytes // 8 + 3, np.uint64)
        message.view(np.uint8)[:num_bytes] = part
        found = _decode_elias_fano(
            message, universe, layout[NUM_FLAGS], layout[LOW_BITS], layout[CAPACITY], words
        )
    else:
        words.view(np.uint8)[:num_bytes] = part
        if universe & 63:
            words[universe >> 6] &= (ONE << np.uint64(universe & 63)) - ONE
        found = _flags_before(words, universe)
    if found != count:
        return -1
    counts = np.zeros(spans.shape[1], np.int64)
    for tensor in range(counts.size):
        first = spans[FIRST, tensor]
        counts[tensor] = _flags_before(words, first + spans[SIZE, tensor], first)
    if counts.sum() != count:
        return -1
    scales = np.zeros(counts.size, np.float32)
    scales.view(np.uint8)[:] = payload[layout[SCALES] : layout[POSITIONS]]
    bits = layout[VALUE_BITS]
    num_bytes = (bits * count + 7) // 8
    codes = np.zeros(bits * count // 64 + 1, np.uint64)
    codes.view(np.uint8)[:num_bytes] = payload[layout[VALUES] : layout[VALUES] + num_bytes]
    _decode_scaled(codes, bits, counts, scales, values[:count])
    return np.isfinite(scales.sum())


@njit(nogil=True, cache=True)
def _add_rows(
    total: Any, indices: Any, rows: Any, num_groups: int, size: int, to_group: int, to_row: int
) -> None:
    for i in range(num_groups):
        for k in range(size):
            start = i * to_group + k * to_row
            sums = total[indices[i * size + k]]
            addends = rows[start : start + total.shape[1]]
            for j in range(sums.size):
                sums[j] += addends[j]


@njit(nogil=True, cache=True, error_model="numpy")
def _select_rows(
    rows: Any,
    at: Any,
    new: Any,
    new_at: Any,
    lengths: Any,
    limits: Any,
    scale: Any,
    is_kept: bool,
    words: Any,
    found: Any,
) -> Any:
    dim = rows.shape[1]
    flat_rows = rows.reshape(-1)
    flat_new = new.reshape(-1)
    together = max(BLOCK // dim, 1)
    block = np.empty(together * dim, found.dtype)
    # Bytes of flags, of whole words.
    reached = np.zeros(-(-together * dim // 64) * 64, np.uint8)
    counts = np.zeros(lengths.size, np.int64)
    count = 0
    bit = 0
    row = 0
    for tensor in range(lengths.size):
        before = count
        limit = limits[tensor]
        end = row + lengths[tensor]
        while row < end:
            length = 0
            first = count
            stop = min(row + together, end)
            for i in range(row, stop):
                # Rows lie anywhere, and the processor would wait for each.
                if i + ROWS_AHEAD < at.size:
                    for j in range(0, dim, LINE // rows.itemsize):
                        _prefetch(flat_rows, at[i + ROWS_AHEAD] * dim + j)
                        _prefetch(flat_new, new_at[i + ROWS_AHEAD] * dim + j)
                theirs = rows[at[i]]
                ours = new[new_at[i]]
                sums = block[length : length + dim]
                marks = reached[length : length + dim]
                # "Not below" instead of "at or above", because it is true for NaN.
                for j in range(sums.size):
                    sums[j] = theirs[j] + scale * ours[j]
                    marks[j] = not (abs(sums[j]) < limit)
                length += dim
            count = _collect(reached, block, length, words, bit, found, count)
            if is_kept:
                finite = np.isfinite(found[first:count]).all()
                for i in range(row, stop):
                    theirs = rows[at[i]]
                    sums = block[(i - row) * dim : (i - row + 1) * dim]
                    for j in range(sums.size):
                        if finite or np.isfinite(sums[j]):
                            theirs[j] = sums[j]
            bit += length
            row = stop
        counts[tensor] = count - before
    return counts


@njit(nogil=True, cache=True, error_model="numpy")
def _change_flagged(rows: Any, at: Any, words: Any, values: Any, is_added: bool) -> None:
    """Add values to the flagged entries, or put those that are finite there."""
    dim = rows.shape[1]
    count = 0
    row = 0
    for word in range(words.size):
        flags = words[word]
        while flags and count < values.size:
            position = 64 * word + np.int64(trailing_zeros(flags))
            flags &= flags - ONE
            # Positions ascend, so there is no division.
            while position >= (row + 1) * dim:
                row += 1
            if is_added:
                rows[at[row], position - row * dim] += values[count]
            elif np.isfinite(values[count]):
                rows[at[row], position - row * dim] = values[count]
            count += 1


@njit(nogil=True, cache=True, error_model="numpy")
def _unflag(words: Any, keep: Any) -> None:
    count = 0
    for word in range(words.size):
        flags = words[word]
        kept = flags
        while flags:
            lowest = flags & (~flags + ONE)
            flags ^= lowest
            if not keep[count]:
                kept ^= lowest
            count += 1
        words[word] = kept


@njit(nogil=True, cache=True, error_model="numpy")
def _rows_of_flags(words: Any, values: Any, dim: int) -> Any:
    number = 0
    for is_counted in (True, False):
        if not is_counted:
            touched = np.empty(number, np.int64)
            rows = np.zeros((number, dim), values.dtype)
        number = 0
        count = 0
        row = 0
        last = -1
        for word in range(words.size):
            flags = words[word]
            while flags and count < values.size:
                position = 64 * word + np.int64(trailing_zeros(flags))
                flags &= flags - ONE
                while position >= (row + 1) * dim:
                    row += 1
                if row != last:
                    last = row
                    number += 1
                if not is_counted:
                    touched[number - 1] = row
                    rows[number - 1, position - row * dim] = values[count]
                count += 1
    return touched, rows


def _table(first: Numbers, *tensors: Tensors) -> NDArray[np.int64]:
    """For loops over a bucket: a row of sizes, one of first flags, and one of addresses for each
    list of tensors.

    A call of a loop costs microseconds, so there is one for all tensors of a bucket.
    """
    addresses = ([*map(Tensor.data_ptr, some)] for some in tensors)
    return np.array([[*map(Tensor.numel, tensors[0])], first, *addresses], np.int64)


def _in_threads(loop: Callable[..., Any], table: NDArray[np.int64], *given: Any) -> list[Any]:
    """Run a loop with a share of a table's flags in each thread. No two share a word of flags."""
    num_flags = int((table[SIZE] + table[FIRST]).max(initial=1))
    share = max(-(-num_flags // torch.get_num_threads()), ENTRIES_PER_THREAD)
    share += -share % 64
    shares = [
        (table, begin, min(begin + share, num_flags), *given)
        for begin in range(0, num_flags, share)
    ]
    helping = [_threads(os.getpid()).submit(loop, *one) for one in shares[1:]]
    return [loop(*shares[0]), *map(Future.result, helping)]


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Threads of this process, by its id, because forks do not inherit their parent's threads."""
    return ThreadPoolExecutor(
        max_workers=max(torch.get_num_threads(), os.cpu_count() or 1), thread_name_prefix="dct"
    )
