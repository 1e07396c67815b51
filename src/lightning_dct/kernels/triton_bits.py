"""Bits for the kernels in Triton, each of which handles all tensors of a bucket in one launch.

A program handles ``BLOCK`` entries of one tensor, whose row it finds in a table
(:mod:`~lightning_dct.kernels.triton_tables`). The flags and signs of 32 entries are a word, and a
word's bits are moved together or apart at once. *Scratch* flags have the layout of
:attr:`~lightning_dct.compress.bucket_plan.BucketPlan.first`, one part after the other.

Sums have a fixed order, so that a GPU does the same twice; ``enable_fp_fusion=False`` at each
launch keeps products and sums rounded as on a CPU.

With ``TRITON_INTERPRET=1`` all of it runs on a CPU, slowly, for tests.
"""

import triton
import triton.language as tl

from lightning_dct.kernels import triton_tables as tables

BLOCK = 2048
WORDS = tl.constexpr(BLOCK // 32)
ALL = tl.constexpr(0xFFFFFFFF)


@triton.jit
def ones(x):
    """The number of set bits of words."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def first_ones(n):
    """Words whose lowest ``n`` bits, 0 to 32, are set."""
    return tl.where(n > 0, ALL >> ((32 - n) & 31).to(tl.uint32), 0).to(tl.uint32)


@triton.jit
def _parity_below(x):
    """In each bit the parity of the bits up to it."""
    x ^= x << 1
    x ^= x << 2
    x ^= x << 4
    x ^= x << 8
    return x ^ (x << 16)


@triton.jit
def _step(m, gaps, step: tl.constexpr):
    """The bits of ``m`` that move by ``1 << step``, and the mask and the gaps below its bits after
    that.
    """
    odd = _parity_below(gaps)
    move = odd & m
    return move, (m ^ move) | (move >> (1 << step)), gaps & (odd ^ ALL)


@triton.jit
def together(x, m):
    """The bits of ``x`` that are set in ``m``, moved to the low end (Warren, *Hacker's Delight*,
    section 7-4).
    """
    x &= m
    gaps = (m ^ ALL) << 1
    for step in tl.static_range(5):
        move, m, gaps = _step(m, gaps, step)
        moved = x & move
        x = (x ^ moved) | (moved >> (1 << step))
    return x


@triton.jit
def apart(x, m):
    """The low bits of ``x``, moved to the bits that are set in ``m``: :func:`together` undone
    (section 7-5).
    """
    whole = m
    move0, m, gaps = _step(m, (m ^ ALL) << 1, 0)
    move1, m, gaps = _step(m, gaps, 1)
    move2, m, gaps = _step(m, gaps, 2)
    move3, m, gaps = _step(m, gaps, 3)
    move4, m, gaps = _step(m, gaps, 4)
    x = (x & (move4 ^ ALL)) | ((x << 16) & move4)
    x = (x & (move3 ^ ALL)) | ((x << 8) & move3)
    x = (x & (move2 ^ ALL)) | ((x << 4) & move2)
    x = (x & (move1 ^ ALL)) | ((x << 2) & move1)
    x = (x & (move0 ^ ALL)) | ((x << 1) & move0)
    return x & whole


@triton.jit
def set_bits(words, bit, bits, n):
    """Set the ``n`` lowest bits of words from bit number ``bit`` of a message on."""
    word = bit >> 5
    shift = (bit & 31).to(tl.uint32)
    tl.atomic_or(words + word, bits << shift, mask=n > 0, sem="relaxed")
    high = bits >> ((32 - shift) & 31).to(tl.uint32)
    tl.atomic_or(words + word + 1, high, mask=(bit & 31) + n > 32, sem="relaxed")


@triton.jit
def get_bits(words, bit, n):
    """The ``n`` bits (up to 32) of a message from bit number ``bit`` on; anything above them."""
    word = bit >> 5
    shift = (bit & 31).to(tl.uint32)
    low = tl.load(words + word, mask=n > 0, other=0) >> shift
    two = (bit & 31) + n > 32
    high = tl.load(words + word + 1, mask=two, other=0) << ((32 - shift) & 31).to(tl.uint32)
    return low | tl.where(two, high, 0).to(tl.uint32)


@triton.jit
def place(tensors, block_tensor, b):
    """A block's tensor, its first entry there, the tensor's entries, and its first word in the
    scratch.
    """
    t = tl.load(block_tensor + b)
    k = b - tables.of_tensor(tensors, t, tables.TENSOR_FIRST_BLOCK)
    size = tables.of_tensor(tensors, t, tables.TENSOR_ENTRIES)
    return (
        t,
        k * (WORDS * 32),
        size,
        tables.of_tensor(tensors, t, tables.TENSOR_FIRST_WORD) + k * WORDS,
    )


@triton.jit
def lanes():
    """The numbers of a block's entries: shape ``[WORDS, 32]``."""
    return tl.arange(0, WORDS)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def bits_of(words):
    """Words as bits: shape ``[WORDS, 32]``, int1."""
    return ((words[:, None] >> tl.arange(0, 32)[None, :].to(tl.uint32)) & 1) != 0


@triton.jit
def numbered(at, m):
    """The number of each entry's value, if a word's first has number ``at`` and the words' flags
    are ``m``.
    """
    return at[:, None] + ones(m[:, None] & first_ones(tl.arange(0, 32))[None, :])


@triton.jit
def words_of(bits):
    """Undo :func:`bits_of`."""
    return tl.sum(bits.to(tl.uint32) << tl.arange(0, 32)[None, :].to(tl.uint32), axis=1)


@triton.jit
def entries(
    addresses, t, count, i, inside, scale, DTYPE: tl.constexpr, BASE: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """``a`` of some entries, and the base: own less shared weights, or the residual plus a scaled
    gradient.
    """
    new = tl.load(tl.load(addresses + t).to(tl.pointer_type(DTYPE)) + i, mask=inside, other=0.0)
    base = tl.load(
        tl.load(addresses + count + t).to(tl.pointer_type(BASE)) + i, mask=inside, other=0.0
    )
    if SCALED:
        return base + new.to(BASE) * tl.load(scale).to(BASE), base
    return new.to(BASE) - base, base


@triton.jit
def is_finite(x):
    """Neither infinite nor NaN."""
    return tl.abs(x) < float("inf")
