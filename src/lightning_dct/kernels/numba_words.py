"""Flags, 64 to a word, in loops that numba compiles: windows of flags, their number, and a hint to the memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.cpython.unsafe import numbers
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

trailing_zeros: Any = numbers.trailing_zeros
ONE, WORD = np.uint64(1), np.uint64(63)


def words_of(flags: Tensor) -> NDArray[np.uint64]:
    """A view of packed flags; shape ``[bytes]`` or ``[senders, bytes]``, uint8, in whole words."""
    words: NDArray[np.uint64] = flags.numpy().view(np.uint64)
    return words


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def window(words: Any, bit: Any, length: Any) -> Any:
    """Up to 64 flags from a bit on, the first in the lowest bit; those beyond ``length`` are zero."""
    word, shift = bit >> 6, np.uint64(bit) & WORD
    flags = words[word] >> shift
    if shift:
        flags |= words[word + 1] << (np.uint64(64) - shift)
    if length < 64:
        flags &= (ONE << np.uint64(length)) - ONE
    return flags


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def set_window(words: Any, bit: Any, flags: Any) -> None:
    """Set up to 64 flags from a bit on."""
    word, shift = bit >> 6, np.uint64(bit) & WORD
    words[word] |= flags << shift
    # Only if it changes: the next word may be another thread's.
    if shift and flags >> (np.uint64(64) - shift):
        words[word + 1] |= flags >> (np.uint64(64) - shift)


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def popcount(word: Any) -> Any:
    """The number of set flags. Compilers know this formula, and use the processor's instruction."""
    word = word - ((word >> ONE) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@njit(nogil=True, cache=True, error_model="numpy")
def flags_before(words: Any, bit: int, start: int = 0) -> int:
    """The number of set flags from number ``start`` on, before number ``bit``."""
    count = 0
    while start < bit:
        # Up to the end of a word.
        length = min(64 - (start & 63), bit - start)
        count += popcount(window(words, start, length))
        start += length
    return count


@intrinsic
def _prefetch_entry(context: Any, array: Any, index: Any) -> Any:
    """Have the processor fetch the cache line of an array's entry, which may lie beyond its end."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, number, number, number]), "llvm.prefetch.p0i8"
        )
        # To be written, into the first-level cache, as data.
        kind = [ir.Constant(number, value) for value in (1, 3, 1)]
        builder.call(function, [builder.bitcast(builder.gep(data, [arguments[1]]), byte), *kind])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


prefetch: Any = _prefetch_entry
